from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpumem_nb.memory.device import open_device
from gpumem_nb.memory.stand_in import StandIn

MIB = 2**20


@pytest.fixture
def device() -> Iterator[StandIn]:
    gc.collect()
    yield StandIn(0, 1024 * MIB, why="a test asks for it")
    gc.collect()


def test_the_environment_variable_chooses_it_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMEM_NB_VIRTUAL", "python")
    device = open_device("virtual", 1, 64 * MIB)
    assert isinstance(device, StandIn)
    assert "GPUMEM_NB_VIRTUAL=python" in device.note
    assert "does not see memory inside operators" in device.note
    assert device.name == "virtual GPU 1 (64.0 MiB, stand-in)"


def test_it_stands_in_where_no_compiler_works(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("GPUMEM_NB_VIRTUAL", raising=False)
    device = open_device("virtual", 0, None)
    assert isinstance(device, StandIn)
    assert "'no-such-compiler', which was not found" in device.note
    assert device.reading().limit_bytes == 2 * 2**30


def test_live_and_peak_are_those_of_the_steps_tensors(device: StandIn) -> None:
    base = device.reading().live_bytes
    with device.step_scope():
        a = torch.empty(MIB)
        b = a + 1
        assert device.reading().live_bytes == base + 8 * MIB
        view = b[5:]
        del a
        assert device.reading().live_bytes == base + 4 * MIB
        del b
        assert device.reading().live_bytes == base + 4 * MIB
        del view
    reading = device.reading()
    assert reading.live_bytes == base
    assert reading.live_peak_bytes == base + 8 * MIB
    assert (reading.reserved_bytes, reading.reserved_peak_bytes, reading.device_used_bytes) == (None, None, None)
    device.reset_peak()
    assert device.reading().live_peak_bytes == base


def test_a_model_from_before_is_seen_and_its_release_too(device: StandIn) -> None:
    base = device.reading().live_bytes
    model = nn.Linear(1024, 1024, bias=False)
    model(torch.ones(1, 1024)).sum().backward()
    assert device.reading().live_bytes == base + 8 * MIB  # weight and gradient
    del model
    assert device.reading().live_bytes == base


def test_a_step_sees_what_it_uses_and_nothing_twice(device: StandIn) -> None:
    base = device.reading().live_bytes
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(3):
        with device.step_scope():
            optimizer.zero_grad()
            model(torch.ones(4, 1024)).sum().backward()
            optimizer.step()
    assert device.reading().live_bytes == base + 3 * 4 * MIB  # weight, gradient, momentum
    assert device.reading().live_peak_bytes >= base + 3 * 4 * MIB


def test_resized_storages_count_what_they_have_become(device: StandIn) -> None:
    base = device.reading().live_bytes
    with device.step_scope():
        a = torch.empty(MIB, dtype=torch.uint8)
        a.resize_(3 * MIB)
        assert device.reading().live_bytes == base + 3 * MIB


def test_passing_the_limit_raises_torchs_error_and_the_result_is_dropped(device: StandIn) -> None:
    held = torch.zeros(MIB)
    base = device.reading().live_bytes
    device.set_limit(base + 6 * MIB)
    with device.step_scope(), pytest.raises(torch.OutOfMemoryError, match=r"virtual GPU out of memory.*aten\.cat"):
        torch.cat([held, held])
    assert device.reading().live_bytes == base
    with device.step_scope():
        assert (held[:4] * 0).sum() == 0


def test_exempt_makes_room_only_inside(device: StandIn) -> None:
    device.set_limit(device.reading().live_bytes + MIB)
    with device.step_scope():
        with device.exempt():
            zeros = torch.zeros(MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(10)
        del zeros
        torch.zeros(10)


def test_no_limit_is_no_limit(device: StandIn) -> None:
    device.set_limit(None)
    with device.step_scope():
        assert torch.zeros(MIB).sum() == 0
    assert device.reading().limit_bytes is None
