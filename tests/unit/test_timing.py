"""Promises in seconds are held against what the machine could give."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests import timing
from tests.timing import PATIENCE, in_time, paused_s


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first tier, too."""
    monkeypatch.setenv(PATIENCE, "1")


def test_no_time_passes_while_the_machine_is_held_up() -> None:
    began_s = time.monotonic()
    os.kill(timing._watch.pid, signal.SIGSTOP)  # as if all processes were
    time.sleep(1.0)
    os.kill(timing._watch.pid, signal.SIGCONT)
    assert paused_s(began_s) > 0.9
    assert in_time(time.monotonic() - began_s, 0.5)
    assert paused_s(time.monotonic()) == 0


def test_what_takes_too_long_is_too_long() -> None:
    assert not in_time(1000.0, 1.0)


def test_the_first_tier_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "slowness", lambda: 1.0)
    assert not in_time(1000.0, 400.0)
    monkeypatch.setenv(PATIENCE, "4")
    assert in_time(1000.0, 400.0)
