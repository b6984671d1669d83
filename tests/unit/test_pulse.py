"""The sign of life that a rank gives, driven by hand: no thread, no other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_nb.engine.link import pulse
from gpumem_nb.shared.answers import Pulse, Waiting
from gpumem_nb.shared.messages import DeviceUse, Reading

LIMIT_S = 5.0
READING = Reading(*([0] * 6))


class Others:
    """The other ranks, as the pulse sees them: waited for since so many seconds, freed or not."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.freed = 0

    def waiting(self) -> Waiting | None:
        return Waiting("all-reduce 'x'", self.waited_s) if self.waited_s else None

    def left(self, since_s: float) -> Waiting | None:
        return None

    def free(self, waited: Waiting) -> None:
        self.freed += 1


class Rank:
    """A pulse of a rank whose parts can be made to fail."""

    def __init__(self) -> None:
        self.others = Others()
        self.sent: list[Pulse] = []
        self.broken: set[str] = set()
        self.thread = pulse.PulseThread(
            publish=lambda message, sent: self._part("publish", self.sent.append, sent),
            collectives=self.others,
            step=lambda: ("the forward part of step 1", 0.0),
            reading=lambda: self._part("reading", lambda: READING),
            use=lambda: self._part("use", lambda: None),
            limit_s=LIMIT_S,
        )

    def _part(self, name: str, work: Any, *arguments: Any) -> Any:
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")
        return work(*arguments)


class Clock:
    """In place of the module ``time``: it stands still, and sleeping takes no time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    return clock


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Rank]:
    """With a request under way that counts as long from the beginning."""
    monkeypatch.setattr(pulse, "PERIOD_S", 0.0)
    with pulse.request("a cell", "the message"):
        yield Rank()


def test_a_beat_says_what_the_rank_does_and_waits_in(rank: Rank) -> None:
    rank.others.waited_s = 2.0
    rank.thread.beat()
    (sent,) = rank.sent
    assert (sent.doing, sent.waiting, sent.reading) == ("a cell", Waiting("all-reduce 'x'", 2.0), READING)
    assert rank.others.freed == 0


def test_a_beat_says_how_long_the_rank_waits_for_others(rank: Rank) -> None:
    rank.thread.beat()
    rank.thread.limit_s = 2 * LIMIT_S
    rank.thread.beat()
    assert [sent.limit_s for sent in rank.sent] == [LIMIT_S, 2 * LIMIT_S]


def test_a_rank_is_freed_at_the_limit(rank: Rank) -> None:
    rank.others.waited_s = LIMIT_S
    rank.thread.beat()
    assert rank.others.freed == 1
    assert rank.sent[0].waiting == Waiting("all-reduce 'x'", LIMIT_S)


def test_time_in_which_the_rank_was_held_up_is_no_waiting(rank: Rank) -> None:
    rank.others.waited_s = LIMIT_S + 60
    rank.thread.beat(late_s=61)
    assert rank.others.freed == 0
    assert rank.sent[0].waiting
    assert rank.sent[0].waiting.seconds == LIMIT_S - 1
    rank.others.waited_s += 2  # as long as before, and awake
    rank.thread.beat()
    assert rank.others.freed == 1


def test_what_held_a_rank_up_before_it_waited_changes_nothing(rank: Rank, clock: Clock) -> None:
    rank.others.waited_s = 0.01
    rank.thread.beat(late_s=60)
    clock.now_s += LIMIT_S + 1
    rank.others.waited_s = LIMIT_S + 1
    rank.thread.beat()
    assert rank.others.freed == 1


@pytest.mark.parametrize("broken", ["reading", "use"])
def test_a_reading_that_fails_is_missing_in_that_pulse_only(rank: Rank, broken: str) -> None:
    rank.broken = {broken}
    rank.thread.beat()
    rank.broken = set()
    rank.thread.beat()
    assert [sent.reading for sent in rank.sent] == [None if broken == "reading" else READING, READING]
    assert [sent.device_use for sent in rank.sent] == [None, None]


@pytest.mark.parametrize("broken", ["reading", "use", "publish"])
def test_ranks_are_freed_at_the_limit_whatever_fails(rank: Rank, broken: str) -> None:
    rank.broken = {broken}
    rank.others.waited_s = LIMIT_S
    if broken == "publish":
        with pytest.raises(RuntimeError, match="publish is broken"):
            rank.thread.beat()
    else:
        rank.thread.beat()
    assert rank.others.freed == 1


def test_the_thread_goes_on_after_a_beat_that_failed(
    rank: Rank, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class EndOfTest(BaseException):
        pass

    beats = iter(range(3 * pulse.NAPS))

    def pause(seconds: float) -> None:
        if next(beats, None) is None:
            raise EndOfTest

    monkeypatch.setattr(clock, "sleep", pause)
    rank.broken = {"publish"}
    rank.others.waited_s = LIMIT_S
    with pytest.raises(EndOfTest):
        rank.thread.run()
    assert rank.others.freed == 3
    assert caplog.text.count("publish is broken") == 3


def test_nothing_is_sent_between_requests(rank: Rank) -> None:
    with pulse.request("", "another"):
        pass
    rank.thread.beat()
    assert rank.sent == []


def test_what_nvml_says_is_sent(rank: Rank) -> None:
    use = DeviceUse(power_w=300.0)
    rank.thread = pulse.PulseThread(
        lambda message, sent: rank.sent.append(sent), rank.others, lambda: ("", 0.0), lambda: READING, lambda: use, 5.0
    )
    rank.thread.beat()
    assert rank.sent[0].device_use is use
