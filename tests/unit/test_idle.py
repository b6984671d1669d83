"""When a session that nobody uses stops, with a clock that is moved by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import MagicMock

import pytest

from gpumem_nb.kernel.idle import IdleWatch
from gpumem_nb.kernel.lifecycle import Lifecycle
from gpumem_nb.kernel.loading import Loading
from gpumem_nb.kernel.policy import Policy


@dataclass
class Place:
    """What an idle watch looks at."""

    now_s: float = 100.0
    minutes: float | None = 10.0
    busy: bool = False
    expired: int = 0
    works_while_expiring: bool = False
    watch: IdleWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = IdleWatch(lambda: self.minutes, lambda: self.busy, self.expire, lambda: self.now_s)

    def expire(self) -> None:
        self.expired += 1
        if self.works_while_expiring:
            self.watch.touch()

    def after(self, minutes: float) -> int:
        """How often it has expired once that much time has passed."""
        self.now_s += minutes * 60
        self.watch.look()
        return self.expired


@pytest.fixture
def place() -> Place:
    return Place()


def test_it_expires_after_the_minutes_without_work(place: Place) -> None:
    assert place.after(9.9) == 0
    assert place.after(0.1) == 1


def test_who_works_puts_it_off(place: Place) -> None:
    place.after(9)
    place.watch.touch()
    assert place.after(9) == 0
    place.busy = True
    assert place.after(9) == 0
    place.busy = False
    assert place.after(9) == 0
    assert place.after(1) == 1


def test_what_is_done_at_the_end_itself_is_no_work(place: Place) -> None:
    place.works_while_expiring = True
    assert place.after(10) == 1
    assert place.watch.over


def test_never_is_never_and_can_be_changed_at_any_time(place: Place) -> None:
    place.minutes = None
    assert place.after(10_000) == 0
    assert place.watch.notice() == ""
    place.minutes = 5
    assert place.after(0) == 1


def test_the_end_is_announced_in_the_last_tenth(place: Place) -> None:
    place.minutes = 30
    place.after(26)
    assert place.watch.notice() == ""
    place.after(2)
    assert "stop in 2 minutes (idle_minutes=30)" in place.watch.notice()
    place.after(1.5)
    assert "stop in 30 s" in place.watch.notice()


def test_a_session_with_nothing_loaded_any_more_stops_though_earlier_steps_could_not_be_kept() -> None:
    cluster = MagicMock()
    cluster.training.workload = None  # a load that failed took it away
    life = Lifecycle.__new__(Lifecycle)
    life.cluster, life.policy, life.ended = cluster, Policy(), ""
    life.idle, life.loading = MagicMock(), Loading(cluster)
    life.loading.unkept = "2 steps would be lost."
    life._stop_idle()
    assert life.ended.startswith("stopped after")
    cluster.ranks.stop.assert_called_once()
