"""Who else computes on this machine's GPUs, as told before ranks start and in %hvd_status, against a fake NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pynvml
import pytest

from gpumem_nb.cluster.resources import gpus_in_use, visible_gpus

from .fake_nvml import GIB, FakeNvml, Gpu, lost

OTHER = os.getppid()
UNSEEN = 4_100_001  # above the largest pid that Linux gives by default


@pytest.fixture
def rank() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(
        [
            lost("GPU-dead"),
            Gpu("GPU-aaaa", compute={OTHER: GIB}, graphics={1: GIB}),
            Gpu("GPU-bbbb"),
            Gpu("GPU-cccc", split=True, parts=[Gpu("MIG-11aa"), Gpu("MIG-11bb", compute={OTHER: None})]),
        ]
    )
    fake.install(monkeypatch)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return fake


ON_AAAA = f"GPU 1 is in use by process {OTHER}"
ON_CCCC = f"GPU 3, MIG instance 1 is in use by process {OTHER}"


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("0,2", 2), ("1, -1, 2", 1), ("3,4", 1), ("GPU-aaaa", 1), ("NoDevFiles", 0), ("1,none", 1)],
)
def test_ranks_see_the_gpus_before_the_first_entry_that_names_none(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (visible_gpus(), nvml.opened) == (count, 0)


def test_gpus_and_instances_that_others_compute_on_are_named_beside_a_lost_one(nvml: FakeNvml) -> None:
    assert gpus_in_use() == [ON_AAAA, ON_CCCC]
    assert nvml.opened == 0


def test_this_kernels_ranks_are_no_others(nvml: FakeNvml, rank: int) -> None:
    nvml.gpus[1].compute = {rank: GIB}
    assert gpus_in_use() == [ON_CCCC]
    nvml.gpus[1].compute[OTHER] = GIB
    assert gpus_in_use() == [ON_AAAA, ON_CCCC]


@pytest.mark.parametrize(
    ("visible", "order", "named"),
    [
        ("", None, []),
        ("GPU-bb", None, []),
        ("GPU-aa,MIG-11b", None, [ON_AAAA, ON_CCCC]),
        ("MIG-11a", None, []),
        ("2", "PCI_BUS_ID", []),
        ("3", "PCI_BUS_ID", [ON_CCCC]),
        ("2", None, [ON_AAAA, ON_CCCC]),  # in CUDA's own order any of them may be number 2
    ],
)
def test_gpus_that_ranks_will_not_see_are_of_no_interest(
    visible: str, order: str | None, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert gpus_in_use() == named


def test_a_process_beyond_this_container_is_told_as_such(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive=False: [])  # other tests leave helpers
    nvml.gpus[1:] = [Gpu("GPU-aaaa", compute={UNSEEN: GIB})]
    assert gpus_in_use() == ["GPU 1 is in use by a process that cannot be seen from here"]


def test_with_ranks_an_unseen_process_may_be_one_of_them(nvml: FakeNvml, rank: int) -> None:
    nvml.gpus[1:] = [Gpu("GPU-aaaa", compute={UNSEEN: GIB})]
    assert gpus_in_use() == []


def test_one_gpu_that_refuses_hides_no_other(nvml: FakeNvml) -> None:
    nvml.gpus[1].broken = {"nvmlDeviceGetComputeRunningProcesses": pynvml.NVMLError_NoPermission}
    assert gpus_in_use() == [ON_CCCC]


@pytest.mark.parametrize("error", [pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded])
def test_without_a_driver_no_gpu_is_in_use_nor_seen_though_one_is_named(
    nvml: FakeNvml, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.broken = error
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (gpus_in_use(), visible_gpus()) == ([], 0)
