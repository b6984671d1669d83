"""Processes that can be told apart from all others: by pid and the moment they were started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STOPPED = "T"
_ENDED = "ZXx"  # a zombie has ended: only its parent has not asked how yet, and in a container it may never ask


class Identity(NamedTuple):
    """A process beyond doubt. ``started`` is in clock ticks after boot, which no change of the clock can move."""

    pid: int
    started: int

    @property
    def state(self) -> str:
        """The letter that Linux has for what it does, such as ``R``, or :data:`STOPPED`; empty when it has ended."""
        started, state = _look(self.pid)
        return state if started == self.started and state not in _ENDED else ""

    @property
    def shell(self) -> str:
        """Return the prefix of a shell command that reaches it: empty on this machine."""
        return ""

    @property
    def runs(self) -> bool:
        """Return whether it has not ended."""
        return bool(self.state)

    def signal(self, number: int) -> bool:
        """Send it a signal, and return whether it was there to get it."""
        if not self.runs:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def identify(pid: int) -> Identity | None:
    """Return the process that has this pid now; ``None`` if there is none."""
    started, state = _look(pid)
    return Identity(pid, started) if state and state not in _ENDED else None


def marked(mark: str) -> Iterator[Identity]:
    """This user's processes that carry a word in their environment, which goes down to everything that they start."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        who = identify(int(folder.name))
        try:
            environment = (folder / "environ").read_bytes() if who else b""
        except OSError:  # another user's, or gone
            continue
        if who and mark.encode() in environment:
            yield who


def _look(pid: int) -> tuple[int, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0, ""
    words = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return int(words[19]), words[0]
