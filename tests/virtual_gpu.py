"""The real allocator, in a process of its own: once installed it stays, and other tests' tensors would be counted."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

MIB = 2**20
_processes: list[ProcessPoolExecutor] = []


@contextmanager
def process_of_its_own() -> Iterator[None]:
    """Inside, there is a process for the tests under :func:`on_virtual_gpu`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        _processes.append(process)
        yield
        _processes.clear()


def on_virtual_gpu(test: Callable[[VirtualGPU], None]) -> Callable[[], None]:
    """Run ``test(gpu)`` in that process, on an empty virtual GPU without limit."""

    def in_that_process() -> None:
        _processes[0].submit(_run, test.__module__, test.__name__).result()

    functools.update_wrapper(in_that_process, test)
    del in_that_process.__wrapped__  # type: ignore[attr-defined]  # pytest would look for a fixture named gpu
    in_that_process.body = test  # type: ignore[attr-defined]
    return in_that_process


@functools.cache
def gpu_and_older_tensor() -> tuple[VirtualGPU, torch.Tensor]:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

    torch.set_num_threads(1)
    older = torch.ones(3 * MIB)
    return VirtualGPU(0), older


def _run(module: str, name: str) -> None:
    gpu, _ = gpu_and_older_tensor()
    gc.collect()
    gpu.set_limit(None)
    gpu.empty_cache()
    gpu.reset_peak()
    assert gpu.reading().live_bytes == 0, "an earlier test left tensors behind"
    getattr(importlib.import_module(module), name).body(gpu)


def tensor(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)
