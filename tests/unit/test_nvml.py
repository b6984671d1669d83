"""What is read of a device, and why something is not, against a fake NVML with GPUs of every sort."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pynvml
import pytest

from gpumem_nb.memory.cuda import Nvml
from gpumem_nb.shared import gpus
from gpumem_nb.shared.messages import DeviceUse

from .fake_nvml import GIB, MIB, FakeNvml, Gpu, bare, lost

ME = os.getpid()
EVERYTHING = {
    "used_bytes",
    "total_bytes",
    "own_bytes",
    "other_bytes",
    "utilisation_percent",
    "temperature_c",
    "power_w",
    "clock_mhz",
}


@pytest.fixture(scope="module")
def one_gone() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(scope="module")
def one_alive() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch, one_alive: int) -> FakeNvml:
    part = Gpu("MIG-11aa", used=GIB, total=5 * GIB, compute={ME: 700 * MIB, one_alive: 200 * MIB})
    fake = FakeNvml(
        [
            lost("GPU-dead"),
            Gpu("GPU-aaaa", compute={ME: GIB, one_alive: 512 * MIB}, graphics={1: 100 * MIB}),
            Gpu("GPU-bbbb", split=True, parts=[None, part]),
            Gpu("GPU-cccc", split=True, parts=[Gpu("MIG-22aa"), Gpu("MIG-22bb", used=2 * GIB)]),
            bare("GPU-dddd"),
            Gpu("GPU-eeee", compute={4_100_001: 2 * GIB, 4_100_002: GIB}),
        ]
    )
    fake.install(monkeypatch)
    monkeypatch.setattr(gpus, "sees_all_processes", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def use(uuid: str, reserved: int = 0) -> DeviceUse:
    return Nvml(uuid).use(reserved)


def test_a_gpu_shared_with_other_processes_is_read_in_full() -> None:
    assert use("GPU-aaaa", reserved=600 * MIB) == DeviceUse(
        used_bytes=3 * GIB,
        total_bytes=16 * GIB,
        own_bytes=GIB,
        other_bytes=612 * MIB,
        utilisation_percent=37,
        temperature_c=61,
        power_w=251.43,
        clock_mhz=1410,
        missing={},
    )


@pytest.mark.parametrize("visible", ["0", "1,2", "GPU-aaaa", "GPU-aa,GPU-bbbb"])
@pytest.mark.parametrize("uuid", ["aaaa", "GPU-aaaa"])
def test_a_gpu_is_found_by_what_cuda_calls_it_whatever_is_visible(
    uuid: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert use(uuid).own_bytes == GIB


def test_a_process_in_both_of_nvmls_lists_is_counted_once(nvml: FakeNvml) -> None:
    nvml.gpus[1].graphics = {ME: GIB, 1: 100 * MIB}
    assert (use("aaaa").own_bytes, use("aaaa").other_bytes) == (GIB, 612 * MIB)


# MIG ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uuid", "visible"),
    [
        ("bbbb", "MIG-11aa"),
        ("bbbb", "MIG-11"),
        ("11aa", "MIG-11aa,MIG-22aa"),
        ("11aa", ""),
        ("bbbb", ""),
        ("bbbb", "2"),
    ],
)
def test_of_a_mig_instance_its_own_bytes_are_read(uuid: str, visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    now = use(uuid)
    assert (now.used_bytes, now.total_bytes, now.own_bytes, now.other_bytes) == (GIB, 5 * GIB, 700 * MIB, 200 * MIB)


def test_what_nvml_knows_of_the_whole_gpu_only_is_said_to_be_so() -> None:
    now = use("11aa")
    assert now.utilisation_percent is None
    assert now.missing == {"utilisation_percent": "NVML measures the utilisation of a whole GPU, not of a MIG instance"}
    assert (now.temperature_c, now.power_w, now.clock_mhz) == (61, 251.43, 1410)


def test_of_several_instances_none_is_taken_for_ours_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Nvml("cccc")
    assert "name one of its instances in CUDA_VISIBLE_DEVICES" in reader.note
    assert reader.use(0) == DeviceUse(missing=reader.use(0).missing)
    assert set(reader.use(0).missing) == EVERYTHING
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-22bb")
    assert use("cccc").used_bytes == 2 * GIB


def test_a_beginning_that_fits_two_instances_names_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-22")
    assert "2 devices are called MIG-22…" in Nvml("cccc").note


# What cannot be read ----------------------------------------------------------------------------------------------


def test_what_a_gpu_does_not_report_is_none_with_the_reason() -> None:
    now = use("dddd")
    assert (now.used_bytes, now.total_bytes) == (3 * GIB, 16 * GIB)
    assert set(now.missing) == EVERYTHING - {"used_bytes", "total_bytes"}
    assert set(now.missing.values()) == {"this GPU does not report it"}
    assert [getattr(now, name) for name in now.missing] == [None] * len(now.missing)


def test_a_lost_gpu_says_so_and_hides_no_other() -> None:
    reader = Nvml("dead")
    assert "the GPU is lost" in reader.note
    assert set(reader.use(0).missing) == EVERYTHING
    assert use("aaaa").used_bytes == 3 * GIB


def test_a_gpu_lost_later_reads_nothing_from_then_on(nvml: FakeNvml) -> None:
    reader = Nvml("aaaa")
    assert reader.use(0).missing == {}
    nvml.gpus[1].broken = lost("").broken
    now = reader.use(0)
    assert now == DeviceUse(missing=dict.fromkeys(EVERYTHING, "the GPU is lost: it no longer answers the driver"))


def test_in_a_container_with_foreign_pids_neither_share_is_guessed() -> None:
    now = use("eeee", reserved=GIB)
    assert (now.used_bytes, now.own_bytes, now.other_bytes) == (3 * GIB, None, None)
    assert set(now.missing) == {"own_bytes", "other_bytes"}
    assert "inside a container it knows processes by other numbers" in now.missing["own_bytes"]


def test_a_foreign_process_of_our_number_is_not_taken_for_us(nvml: FakeNvml) -> None:
    nvml.gpus[5].compute = {ME: 100 * MIB, 7: 2 * GIB}
    now = use("eeee", reserved=GIB)
    assert (now.own_bytes, now.other_bytes) == (None, None)
    assert "another one of that number, outside this container" in now.missing["own_bytes"]


def test_in_a_container_with_its_own_numbers_the_others_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "sees_all_processes", lambda: False)
    now = use("aaaa")
    assert (now.own_bytes, now.other_bytes) == (GIB, None)
    assert now.missing == {"other_bytes": "inside a container NVML may not list the processes outside it"}


def test_a_process_that_holds_nothing_is_one_whose_bytes_are_not_told(nvml: FakeNvml) -> None:
    nvml.gpus[1].compute = {ME: 0}
    now = use("aaaa")
    assert (now.own_bytes, now.other_bytes) == (None, None)
    assert "does not tell how much each process holds" in now.missing["own_bytes"]


@pytest.mark.parametrize(("link", "all_seen"), [("pid:[4026531836]", True), ("pid:[4026532281]", False), (None, False)])
def test_a_containers_process_numbers_are_told_from_the_hosts(
    link: str | None, all_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readlink(path: str) -> str:
        if link is None:
            raise PermissionError(path)
        return link

    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", readlink)
    assert gpus.sees_all_processes() is all_seen


def test_a_process_that_ended_meanwhile_holds_nothing_more(nvml: FakeNvml, one_gone: int) -> None:
    nvml.gpus[1].compute[one_gone] = None
    assert use("aaaa").other_bytes == 612 * MIB


def test_bytes_that_nvml_keeps_back_are_not_taken_for_none(nvml: FakeNvml, one_alive: int) -> None:
    nvml.gpus[1].compute[one_alive] = None
    now = use("aaaa")
    assert (now.own_bytes, now.other_bytes) == (GIB, None)
    assert now.missing == {"other_bytes": f"the driver does not tell how much process {one_alive} holds"}
    nvml.gpus[1].compute[ME] = None
    assert set(use("aaaa").missing) == {"own_bytes", "other_bytes"}


@pytest.mark.parametrize("error", [pynvml.NVMLError_NoPermission, pynvml.NVMLLibraryMismatchError])
def test_a_refused_list_of_processes_leaves_the_rest_readable(nvml: FakeNvml, error: type[Exception]) -> None:
    nvml.gpus[1].broken = {"nvmlDeviceGetComputeRunningProcesses": error}
    now = use("aaaa")
    assert (now.used_bytes, now.clock_mhz) == (3 * GIB, 1410)
    assert set(now.missing) == {"own_bytes", "other_bytes"}


def test_a_gpu_that_cannot_draw_has_nobody_drawing(nvml: FakeNvml) -> None:
    nvml.gpus[1].broken = {"nvmlDeviceGetGraphicsRunningProcesses": pynvml.NVMLError_NotSupported}
    assert use("aaaa").other_bytes == 512 * MIB


def test_without_a_driver_everything_is_missing_and_the_note_says_why(nvml: FakeNvml) -> None:
    nvml.broken = pynvml.NVMLError_LibraryNotFound
    reader = Nvml("aaaa")
    assert reader.note == "Device bytes are n/a: NVML cannot read this GPU (there is no NVIDIA driver here)."
    assert reader.driver == ""
    assert set(reader.use(0).missing) == EVERYTHING


def test_an_unknown_gpu_is_not_read_and_says_why() -> None:
    assert Nvml("ffff").driver, "known all the same"
    assert Nvml("ffff").note == "Device bytes are n/a: NVML cannot read this GPU (NVML says Not Found)."
