"""The CUDA device through torch's own Python functions; only the driver's functions in C, which a CPU torch lacks, are
stood in for.
"""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumem_nb.memory import cuda, device
from gpumem_nb.memory.cuda import lying_in
from gpumem_nb.memory.device import open_device
from gpumem_nb.memory.ledger.events import TensorLog
from gpumem_nb.shared import gpus
from gpumem_nb.shared.allocator_settings import DEFAULT
from gpumem_nb.shared.errors import InvalidInput, SetupError

from .fake_nvml import GIB, MIB, FakeNvml, Gpu, lost

UUID = "3f5b9a1c-6a0e-4a07-9b8e-8c1d2e3f4a5b"
SNAPSHOT: dict[str, list[Any]] = {"segments": [], "device_traces": [[], []]}


class Driver:
    """What torch's C functions would do, and what they were asked."""

    def __init__(self) -> None:
        self.device = -1
        self.properties = SimpleNamespace(name="Fake H1", total_memory=16 * GIB, uuid=UUID)
        self.fractions: list[tuple[float, int]] = []
        self.peaks_reset: list[int] = []
        self.emptied = 0
        self.free = 16 * GIB
        self.history: list[tuple[Any, ...]] = []
        self.snapshot = dict(SNAPSHOT)
        self.live, self.requested, self.reserved = 300 * MIB, 299 * MIB, 400 * MIB

    def memory_stats(self, device: int) -> dict[str, Any]:
        """As torch.cuda.memory_stats documents it, for the second GPU."""
        assert device == 1

        def stat(current: int) -> dict[str, dict[str, int]]:
            return {"all": {"current": current, "peak": current + MIB, "allocated": 9 * current, "freed": 8 * current}}

        return {
            "allocated_bytes": stat(self.live),
            "requested_bytes": stat(self.requested),
            "reserved_bytes": stat(self.reserved),
            "active_bytes": stat(self.live + MIB),
            "inactive_split_bytes": stat(19 * MIB),
        }

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(device, "_opened", None)  # and back: other tests have devices of their own
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "current_stream": lambda device: SimpleNamespace(cuda_stream=0),
        "get_device_properties": lambda device: driver.properties if device.index == 1 else None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda.memory, name, stand_in, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver.free, driver.properties.total_memory))
    for name, stand_in in {
        "_cuda_setDevice": lambda index: setattr(driver, "device", index),
        "_cuda_memoryStats": driver.memory_stats,
        "_cuda_resetPeakMemoryStats": driver.peaks_reset.append,
        "_cuda_emptyCache": driver.empty_cache,
        "_cuda_setMemoryFraction": lambda fraction, index: driver.fractions.append((fraction, index)),
        "_cuda_record_memory_history": lambda *arguments: driver.history.append(arguments),
        "_cuda_memorySnapshot": lambda *pool: driver.snapshot,
    }.items():
        monkeypatch.setattr(torch._C, name, stand_in, raising=False)
    return driver


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml([Gpu("GPU-other"), Gpu(f"GPU-{UUID}", used=2 * GIB, compute={os.getpid(): GIB})])
    fake.install(monkeypatch)
    monkeypatch.setattr(gpus, "sees_all_processes", lambda: True)
    return fake


def test_a_reading_is_torchs_statistics_of_this_ranks_gpu(driver: Driver) -> None:
    device = open_device("cuda", local_rank=1, memory_limit=None)
    now = device.reading()
    assert (now.live_bytes, now.live_peak_bytes) == (299 * MIB, 300 * MIB)
    assert (now.reserved_bytes, now.reserved_peak_bytes) == (400 * MIB, 401 * MIB)
    assert (now.device_used_bytes, now.limit_bytes) == (2 * GIB, 16 * GIB)
    assert (device.name, device.kind, device.note, driver.device) == ("Fake H1", "cuda", "", 1)
    assert device.driver == "580.65.06"
    driver.requested = 0  # cudaMallocAsync leaves that at zero, as all that it does not count
    assert device.reading().live_bytes == 300 * MIB


def test_ranks_beyond_the_last_gpu_share_them_in_turn(driver: Driver) -> None:
    assert open_device("cuda", local_rank=3, memory_limit=None).torch_device == torch.device("cuda", 1)


def test_nvml_is_asked_when_its_use_is_and_never_by_a_reading(driver: Driver, nvml: FakeNvml) -> None:
    device = open_device("cuda", 1, None)
    nvml.gpus[1].used = 3 * GIB
    assert device.reading().device_used_bytes == 2 * GIB
    use = device.use()
    assert use is not None
    assert (use.used_bytes, use.own_bytes, use.other_bytes) == (3 * GIB, GIB, 0)
    assert device.reading().device_used_bytes == 3 * GIB
    driver.reserved = 2 * GIB  # more than NVML's process of our number holds
    assert device.use().own_bytes is None  # type: ignore[union-attr]


def test_a_lost_gpus_device_bytes_are_none_and_the_note_says_why(driver: Driver, nvml: FakeNvml) -> None:
    nvml.gpus[1].broken = lost("").broken
    device = open_device("cuda", 1, None)
    assert device.reading().device_used_bytes is None
    assert "the GPU is lost" in device.note


def test_a_limit_is_torchs_fraction_of_the_gpu_and_lifted_inside_exempt(driver: Driver) -> None:
    device = open_device("cuda", 1, 4 * GIB)
    assert device.reading().limit_bytes == 4 * GIB
    with device.exempt():
        pass
    device.set_limit(None)
    allowed = [(int(fraction * 16 * GIB), index) for fraction, index in driver.fractions]
    assert allowed == [(4 * GIB, 1), (16 * GIB, 1), (4 * GIB, 1), (16 * GIB, 1)]
    with pytest.raises(InvalidInput, match="more than Fake H1 has: at most 16"):
        device.set_limit(17 * GIB)
    assert device.reading().limit_bytes == 16 * GIB


def test_an_exemption_within_another_does_not_end_it(driver: Driver) -> None:
    device = open_device("cuda", 1, GIB)
    driver.fractions.clear()
    with device.exempt():
        with device.exempt():
            assert [int(fraction * 16 * GIB) for fraction, _ in driver.fractions] == [16 * GIB]
        device.set_limit(2 * GIB)
        assert [int(fraction * 16 * GIB) for fraction, _ in driver.fractions] == [16 * GIB]
    assert [int(fraction * 16 * GIB) for fraction, _ in driver.fractions] == [16 * GIB, 2 * GIB]


def test_what_an_exemption_has_cached_beyond_the_limit_goes_back(driver: Driver) -> None:
    device = open_device("cuda", 1, GIB)
    with device.exempt():
        driver.reserved = GIB
    assert driver.emptied == 0
    with suppress(KeyError), device.exempt():
        driver.reserved = GIB + MIB
        raise KeyError
    assert driver.emptied == 1


def test_releasable_are_whole_segments_without_a_tensor(driver: Driver) -> None:
    assert open_device("cuda", 1, GIB).releasable() == (400 - 301 - 19) * MIB


def test_room_is_what_the_limit_and_the_other_processes_leave(driver: Driver) -> None:
    device = open_device("cuda", 1, GIB)
    driver.free = 10 * GIB
    assert device.room() == GIB - driver.reserved
    driver.free = 5 * MIB
    assert device.room() == 5 * MIB
    assert device.allowed_bytes == GIB, "torch knows nothing of the others"
    assert open_device("cuda", 1, None).allowed_bytes == 0


@pytest.mark.parametrize("segments", [1, 7, 1001, 4099])
def test_a_limit_of_whole_segments_loses_no_byte_on_the_way_through_a_fraction(driver: Driver, segments: int) -> None:
    driver.properties.total_memory = 79 * GIB + 3 * MIB
    open_device("cuda", 1, limit := segments * 2 * MIB)
    assert int(driver.fractions[-1][0] * driver.properties.total_memory) == limit


def test_peaks_and_cache_are_this_gpus(driver: Driver) -> None:
    device = open_device("cuda", 1, None)
    device.reset_peak()
    device.empty_cache()
    assert (driver.peaks_reset, driver.emptied) == ([1], 1)


def test_without_a_gpu_the_way_out_is_named() -> None:
    with pytest.raises(SetupError, match="use --device cpu"):
        open_device("cuda", 0, None)


def test_a_snapshot_is_torchs_own_with_the_history_between(driver: Driver, tmp_path: Path) -> None:
    cuda.record_allocations(True)
    cuda.write_snapshot(str(tmp_path / "step.pickle"))
    cuda.record_allocations(False)
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()) == SNAPSHOT
    begun, ended = driver.history
    assert begun[:4] == ("all", "all", "python", cuda.MOST_ENTRIES)
    assert ended[0] is None


def test_a_snapshot_that_cannot_be_written_says_what_to_do(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        cuda.write_snapshot(str(tmp_path / "missing" / "step.pickle"))
    (tmp_path / "work.ipynb").write_text("{}")
    with pytest.raises(InvalidInput, match="already exists and is not a snapshot of memory"):
        cuda.write_snapshot(str(tmp_path / "work.ipynb"))
    assert (tmp_path / "work.ipynb").read_text() == "{}"


def block(size: int, requested: int = 0, state: str = "active_allocated", address: int = 0) -> dict[str, Any]:
    """As torch.cuda.memory_snapshot has it."""
    return {"size": size, "requested_size": requested, "state": state, "address": address}


def segment(address: int, *blocks: dict[str, Any], **other: Any) -> dict[str, Any]:
    kinds = {"device": 1, "segment_type": "large", "stream": 0, "segment_pool_id": (0, 0), "is_expandable": False}
    return {"address": address, "blocks": list(blocks), **kinds, **other}


def test_where_everything_lies_is_that_of_torchs_snapshot() -> None:
    weight, small = torch.ones(1000), torch.ones(4)
    at, small_at = weight.untyped_storage().data_ptr(), small.untyped_storage().data_ptr()
    segments = [
        segment(9000, block(4096, 4000, address=at), block(20 * MIB - 4096, state="inactive")),
        segment(100, block(512, 16, address=small_at), block(2 * MIB - 512, state="inactive"), segment_type="small"),
        segment(50, block(2 * MIB, 5), device=0),
        segment(10_000, block(512, 300), block(2 * MIB - 512, state="inactive"), stream=7),
        segment(20_000, block(1024, 900, state="active_pending_free")),
    ]
    found = lying_in(segments, 1, 0, 5216)
    assert found is not None
    in_order = [(row[0], row[1] > 0, row[2]) for row in found.layout.tolist()]
    assert in_order == [
        (512, True, 5),
        (2 * MIB - 512, False, 1),
        (4096, True, 4),
        (20 * MIB - 4096, False, 0),
        (512, True, 4),
        (2 * MIB - 512, True, 0),  # of another stream
        (1024, True, 4),
    ]
    log = TensorLog(torch.device("cpu"), lambda: (5216, 5216), DEFAULT, lambda: found)
    base = log.begin([])
    assert base.layout is found.layout
    assert [log.allocation(one) for one in (small, weight)] == [found.layout[0, 1], found.layout[2, 1]]
    assert log.allocation(weight) == found.layout[2, 1], "as before"
    other = torch.ones(2)
    assert log.allocation(other) not in found.layout[:, 1], "it lies elsewhere"
    assert len(log.begin([weight]).layout) == len(in_order)
    assert len(log.begin([weight, other]).layout) == 0, "a weight that is not there would be counted twice"


@pytest.mark.parametrize(
    "segments",
    [
        [segment(0, block(512, 400), is_expandable=True)],
        [segment(0, block(512, 399))],
        [segment(0, block(512, 400, state="unheard of"))],
        [{"device": 1}],
    ],
    ids=["segments that expand", "other sums", "another state", "other names"],
)
def test_a_snapshot_that_is_not_understood_says_nothing(driver: Driver, segments: Any) -> None:
    driver.requested = 400
    driver.snapshot["segments"] = segments
    assert len(open_device("cuda", 1, None).event_log().begin([]).layout) == 0
