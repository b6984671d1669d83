"""Where Ctrl-C raises on a rank, and where it waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gpumem_nb.engine.link.signals import held_back, interruptible, postponed, take_over


@pytest.fixture(autouse=True)
def on_a_rank() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    take_over(SimpleNamespace())
    with held_back():
        yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_raises_where_work_can_be_abandoned() -> None:
    press()
    with pytest.raises(KeyboardInterrupt), interruptible():
        pytest.fail("the interrupt came before")
    with interruptible(), pytest.raises(KeyboardInterrupt):
        press()


def test_an_interrupt_waits_for_the_end_of_what_must_not_be_left_half_way() -> None:
    done = []

    def work() -> None:
        with postponed():
            press()
            done.append("inside")
        done.append("after")

    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["inside"]
        with pytest.raises(KeyboardInterrupt):
            press()


def test_an_interrupt_at_the_very_end_of_what_can_be_abandoned_leaves_the_next_request_whole() -> None:
    part = interruptible()
    part.__enter__()  # and its end is not reached, as when a signal comes in the middle of it
    with held_back():
        press()
    del part


def test_what_is_postponed_where_nothing_can_be_abandoned_waits_on() -> None:
    with postponed():
        press()
    with pytest.raises(KeyboardInterrupt), interruptible():
        pytest.fail("the interrupt came before")


def test_an_error_inside_comes_before_the_interrupt() -> None:
    def fail() -> None:
        with interruptible(), postponed():
            press()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
