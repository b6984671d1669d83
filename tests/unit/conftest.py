"""What tests of one process share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from gpumem_nb.memory.device import open_device
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from tests.unit.dry_runs import forked
from tests.virtual_gpu import process_of_its_own


@pytest.fixture(autouse=True, scope="module")
def what_was_before_is_not_looked_through() -> None:
    """These tests ask the garbage collector a lot; with all that was imported and tested before it takes its time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_accelerator_from_before() -> Iterator[None]:
    """Accelerate keeps one state for a process, which an earlier test may have made in another precision."""
    _forget_accelerator()
    yield
    _forget_accelerator()


def _forget_accelerator() -> None:
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def process_with_a_virtual_gpu() -> Iterator[None]:
    """Where tests under ``on_virtual_gpu`` run."""
    with process_of_its_own():
        yield


@pytest.fixture(scope="module")
def gpu() -> VirtualGPU:
    """A virtual GPU of this process without a limit."""
    device = open_device("virtual", 0, None)
    assert isinstance(device, VirtualGPU)
    device.set_limit(None)
    return device


@pytest.fixture
def dry_runs_forked() -> Iterator[None]:
    """Cold predictions without the seconds in which their process imports torch."""
    with forked():
        yield


@pytest.fixture
def module() -> Iterator[Any]:
    """A module that somebody has imported, with variables of their own (of which the type checker cannot know)."""
    module = ModuleType("somebodys")
    sys.modules["somebodys"] = module
    yield module
    del sys.modules["somebodys"]
