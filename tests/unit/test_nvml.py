"""Which GPU's bytes are read, against a fake NVML: two GPUs, the second split by MIG."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpumem_nb.memory.cuda import nvml_reader


class FakeError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML by uuid only: whoever asks by index asks for the wrong GPU."""

    NVMLError = FakeError
    NVML_DEVICE_MIG_ENABLE = 1
    USED = {"GPU-aaaa": 100, "GPU-bbbb": 999, "MIG-cccc": 7}  # noqa: RUF012

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.USED:
            raise FakeError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle.startswith("MIG"):
            raise FakeError("Invalid Argument")
        return (1, 1) if handle == "GPU-bbbb" else (0, 0)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.USED[handle])


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize("uuid", ["aaaa", "GPU-aaaa"])
def test_a_gpu_is_found_by_its_uuid_whatever_its_number(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    used, note = nvml_reader(uuid)
    assert (used(), note) == (100, "")


def test_a_mig_instance_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc")
    used, note = nvml_reader("bbbb")
    assert (used(), note) == (7, "")


def test_a_mig_uuid_from_cuda_is_found_too() -> None:
    used, _ = nvml_reader("cccc")
    assert used() == 7


def test_a_split_gpu_without_a_named_instance_is_not_read() -> None:
    used, note = nvml_reader("bbbb")
    assert used() is None
    assert "split by MIG" in note


def test_an_unknown_gpu_is_not_read_and_says_why() -> None:
    used, note = nvml_reader("dddd")
    assert used() is None
    assert "n/a: NVML cannot read this GPU (Not Found)" in note


def test_a_gpu_that_fails_later_reads_nothing(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    used, _ = nvml_reader("aaaa")

    def lost(handle: str) -> SimpleNamespace:
        raise FakeError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lost)
    assert used() is None


def test_without_the_package_the_note_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    used, note = nvml_reader("aaaa")
    assert used() is None
    assert "nvidia-ml-py" in note
