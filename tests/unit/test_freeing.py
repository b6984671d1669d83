"""A rank is freed from the collective that it waits in, and from no other."""

from __future__ import annotations

import threading
import time

import pytest

from gpumem_nb.engine.link import collectives
from gpumem_nb.internals import horovod_internals
from gpumem_nb.shared.answers import Waiting
from tests.timing import HANG_S

WAITED = Waiting("all-reduce 'x'", 5.0)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once Horovod was told to end."""
    event = threading.Event()
    monkeypatch.setattr(horovod_internals, "end_threads", event.set)
    for name in ("_freeing", "_freed_from", "_waiting"):
        monkeypatch.setattr(collectives, name, None)
    return event


def waits(monkeypatch: pytest.MonkeyPatch, collective: str, seconds: float) -> None:
    monkeypatch.setattr(collectives, "_waiting", (collective, time.monotonic() - seconds))


def test_a_rank_that_still_waits_is_freed(freed: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    waits(monkeypatch, WAITED.collective, WAITED.seconds + 60)  # some of which it was held up
    collectives.free(WAITED)
    assert freed.wait(HANG_S)


@pytest.mark.parametrize(
    ("collective", "seconds"), [("all-reduce 'y'", 60.0), (WAITED.collective, 0.1)], ids=["another", "begun anew"]
)
def test_a_rank_that_was_freed_by_another_meanwhile_is_left_alone(
    collective: str, seconds: float, freed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, collective, seconds)
    collectives.free(WAITED)
    assert collectives._freeing is None
    assert not freed.is_set()


def test_a_rank_that_waits_for_nothing_is_left_alone(freed: threading.Event) -> None:
    collectives.free(WAITED)
    assert collectives._freeing is None
