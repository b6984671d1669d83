"""A reading of a device is one line in one table: nothing else has to know its name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pynvml
import pytest

from gpumem_nb.memory.cuda import Nvml
from gpumem_nb.report.memory import MemoryReport, RankMemory
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.messages import DeviceUse
from gpumem_nb.shared.readings import METRICS, Metric, register
from tests.ledgers import info, reading

from .fake_nvml import GIB, FakeNvml, Gpu, bare

FAN = Metric("fan_percent", "fan", "%", "of its highest speed", lambda _, gpu: pynvml.nvmlDeviceGetFanSpeed(gpu))


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml([Gpu("GPU-aaaa", compute={os.getpid(): GIB}), bare("GPU-bbbb")])
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def fan() -> Iterator[None]:
    register(FAN)
    yield
    METRICS.pop(FAN.name, None)


def report(*uses: DeviceUse) -> MemoryReport:
    return MemoryReport(
        tuple(RankMemory(info(rank, virtual=False), reading(), device_use=use) for rank, use in enumerate(uses))
    )


def shown(of: MemoryReport) -> list[list[str]]:
    """The table of devices as words, headings first."""
    lines = str(of).split("The devices, as NVML sees them\n")[1].split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


def test_a_throw_away_reading_works_everywhere(nvml: FakeNvml) -> None:
    register(Metric("fan_percent", "fan", "%", "its speed", lambda device, gpu: pynvml.nvmlDeviceGetFanSpeed(gpu)))
    try:
        cooled, other = Nvml("aaaa").use(0), Nvml("bbbb").use(0)
        assert (cooled.fan_percent, other.fan_percent) == (44, None)
        assert other.missing["fan_percent"] == "this GPU does not report it"
        both = report(cooled, other)
        headings, first, second = shown(both)
        assert (headings[-1], first[-2:], second[-1]) == ("fan", ["44", "%"], "n/a")
        assert "clock, fan of rank 1: this GPU does not report it." in str(both)
        html = both._repr_html_()
        assert " title='its speed' " in html
        assert html.count(">44 %</td>") == 1
        assert "clock, fan of rank 1: this GPU does not report it." in html
        assert list(both.frame()["fan_percent"].astype(object).fillna(-1)) == [44, -1]
    finally:
        del METRICS["fan_percent"]
    assert "fan" not in str(report(Nvml("aaaa").use(0)))


def test_what_only_the_notebook_can_name_is_not_available(fan: None) -> None:
    sent = DeviceUse(power_w=300.0)
    assert sent.fan_percent is None
    assert shown(report(sent))[1][-1] == "n/a"
    assert not any("fan" in sentence for sentence in report(sent).sentences)


def test_what_only_a_rank_can_name_is_not_shown(fan: None) -> None:
    sent = pickle.dumps(DeviceUse(fan_percent=44))
    del METRICS["fan_percent"]
    received = pickle.loads(sent)
    assert "fan" not in str(report(received))
    assert "fan_percent" not in report(received).frame()
    with pytest.raises(AttributeError, match="no attribute 'fan_percent'"):
        received.fan_percent  # noqa: B018


def test_a_use_travels_whole_and_small_and_equals_what_was_sent() -> None:
    use = Nvml("aaaa").use(0)
    assert pickle.loads(pickle.dumps(use)) == use
    assert use != Nvml("bbbb").use(0)
    assert len(pickle.dumps(use)) < 500
    assert DeviceUse(power_w=None) == DeviceUse()
    assert use.as_dict()["clock_mhz"] == 1410
    assert list(use.as_dict()) == list(METRICS)


def test_a_name_is_given_once() -> None:
    with pytest.raises(InvalidInput, match="There is a reading 'power_w' already"):
        register(METRICS["power_w"])
