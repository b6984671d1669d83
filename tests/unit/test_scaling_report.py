"""What scaling says of steps whose times are known."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_nb.report.scaling import NetworkReport, Scaled, ScalingReport
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.step_times import StepTimes

MIB = 2**20
# Links of about 1 GiB/s: on two ranks they carry each byte once.
NETWORK = NetworkReport(2, {1024: 0.002, 64 * MIB: 0.002 + 64 / 1024})


def steps(ranks: int, computing_s: float, reduction_s: float, count: int = 6) -> Scaled:
    times = StepTimes.of({"forward": computing_s / 2, "backward": computing_s / 2, "reduction": reduction_s}, 0.0)
    return Scaled(ranks, ((times,) * count,) * ranks, 32 * ranks)


def test_efficiency_and_losses_are_those_of_the_steps() -> None:
    report = ScalingReport((steps(1, 0.1, 0.0), steps(2, 0.15, 0.05)), NETWORK, MIB, (), 1)
    assert [one.samples_per_s for one in report.measured] == pytest.approx([320, 320])
    assert report.efficiency(2) == pytest.approx(0.5)
    assert report.lost(report.measured[1]) == pytest.approx({"slower computing": 0.25, "reduction": 0.25})
    assert report.lost(report.measured[0]) == {}
    assert "slower computing 25%, reduction 25%" in str(report)
    assert list(report.frame()["samples_per_s"]) == pytest.approx([320, 320])


@pytest.mark.parametrize("ranks", [0, 2.5, True, "4"])
def test_numbers_of_ranks_that_cannot_be_are_refused(ranks: Any) -> None:
    report = ScalingReport((steps(1, 0.1, 0.0), steps(2, 0.1, 0.0)), NETWORK, MIB, (), 1)
    for asked in (report.forecast, report.efficiency):
        with pytest.raises(InvalidInput, match="ranks cannot be forecast: write a whole number of at least 1"):
            asked(ranks)


def test_ranks_that_share_cores_compute_more_slowly_and_those_with_gpus_do_not() -> None:
    measured = (steps(1, 0.1, 0.0), steps(2, 0.1, 0.0))
    virtual = ScalingReport(measured, NETWORK, MIB, hosts=((2, 2),), threads=1)
    assert virtual.forecast(8)[0] == pytest.approx(8 * 32 / 0.4), "eight threads on two cores"
    real = ScalingReport(measured, NETWORK, MIB, hosts=(), threads=1)
    assert real.forecast(8)[0] == pytest.approx(8 * 32 / 0.1)
    assert real.forecast(8)[1] >= 0.1
    two_hosts = ScalingReport((steps(1, 0.1, 0.0), steps(3, 0.2, 0.0)), NETWORK, MIB, hosts=((1, 2), (1, 2)), threads=1)
    assert two_hosts.forecast(4)[0] == pytest.approx(4 * 32 / 0.2), "the fourth joins one that had a core for itself"
    assert two_hosts.forecast(8)[0] == pytest.approx(8 * 32 / 0.4)


def test_the_reduction_grows_as_a_ring_does() -> None:
    assert NETWORK.bus_bytes_per_s(64 * MIB) == pytest.approx(64 * MIB / (0.002 + 64 / 1024))
    assert NETWORK.predicted_s(0, 4) == pytest.approx(2 * NETWORK.latency_s)
    assert NETWORK.predicted_s(64 * MIB, 1) == 0
    assert NETWORK.predicted_s(64 * MIB, 2) == pytest.approx(NETWORK.seconds[64 * MIB])
    on_two, on_four = (NETWORK.predicted_s(64 * MIB, ranks) for ranks in (2, 4))
    assert on_four - 2 * NETWORK.latency_s == pytest.approx(1.5 * (on_two - NETWORK.latency_s))
    report = ScalingReport((steps(1, 0.1, 0.0), steps(2, 0.1, 0.02)), NETWORK, 64 * MIB, (), 1)
    assert report.forecast(4)[0] == pytest.approx(4 * 32 / (0.1 + 0.02 * on_four / on_two))
    assert "8  " in str(report)
    assert "a forecast" in str(report)


def test_the_network_s_table_has_its_two_numbers() -> None:
    text = str(NETWORK)
    assert "All-reduces of 2 ranks" in text
    assert "Latency 2 ms" in text
    assert "64.0 MiB" in text
