"""How many ranks a start without a number starts, and what it says of that."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_nb.cluster import resources
from gpumem_nb.kernel import starting
from gpumem_nb.shared import processes
from gpumem_nb.shared.errors import InvalidInput

GIB = 2**30


def planned(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, free: int = 64 * GIB, **asked: Any
) -> starting.Plan:
    """The plan on a machine with so much."""
    monkeypatch.setattr(resources, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(processes, "cores", lambda: cores)
    monkeypatch.setattr(processes, "available_bytes", lambda: free)
    return starting.plan(asked.pop("n", None), progress=lambda what, done: None, **asked)


@pytest.mark.parametrize(
    ("gpus", "cores", "free", "size", "threads", "said"),
    [
        (0, 2, 64 * GIB, 2, 1, "2 ranks (1 of 2 cores each), the fewest that exchange gradients. No GPU is used,"),
        (0, 1, 64 * GIB, 2, 1, "2 ranks (one core between them), the fewest that exchange gradients. No GPU is used,"),
        (0, 64, 64 * GIB, 2, 32, "2 ranks (32 of 64 cores each), the fewest that exchange gradients. No GPU is used,"),
        (0, 2, GIB // 2, 1, 2, "1 rank (2 of 2 cores each), because memory has no room for more. No GPU is used,"),
        (1, 8, 64 * GIB, 1, 8, "1 rank: one for each GPU."),
        (4, 8, 64 * GIB, 4, 2, "4 ranks: one for each GPU."),
    ],
)
def test_without_a_number_it_is_said_how_many_and_why(
    gpus: int, cores: int, free: int, size: int, threads: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, gpus, cores, free)
    assert (plan.size, plan.threads) == (size, threads)
    assert plan.chosen.startswith(said)
    assert ("For another number: %hvd_start 4" in plan.chosen) == (gpus == 0)


def test_of_a_number_that_was_named_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, 0, 2, n=3).chosen == ""
    assert planned(monkeypatch, 0, 2, hosts="localhost:2").chosen == ""
    with pytest.raises(InvalidInput, match="17 ranks do not fit on this machine"):
        planned(monkeypatch, 0, 2, n=17)


def test_gpus_that_are_not_to_be_used_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, 4, 8, device="cpu")
    assert (plan.size, plan.device) == (2, "cpu")
    assert "No GPU is used" in plan.chosen
