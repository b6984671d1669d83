"""Chunks in flight: those that ranks were sent and have not answered, and how long the next one may be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from ...cluster.calls import Call
from ...cluster.ranks import Posted, Ranks
from ...shared.errors import ClusterDied, GpumemError
from ...shared.messages import Chunk

CHUNK_S = 1.0
MOST_CHUNK_STEPS = 1000
MOST_IN_FLIGHT = 2
"""The next chunk lies at the ranks when they end one, so that they never wait for the kernel."""
AHEAD_BELOW_S = 1.0
"""Steps that take longer are sent one at a time: a request would wait for two of them, and asking takes 10 ms."""


class Pace:
    """The number of steps in a chunk: few after a flip, when you look closely, then more, which cost less."""

    def __init__(self) -> None:
        self._known: tuple[int, int, float] = (0, 1, math.inf)

    def learn(self, chunk: Chunk, slowest_s: float) -> None:
        """A chunk was done; its slowest rank took ``slowest_s`` seconds for the last step."""
        steps = max(1, min(2 * chunk.steps, MOST_CHUNK_STEPS, int(CHUNK_S / slowest_s)))
        self._known = (chunk.settings_id, steps, slowest_s)

    def steps(self, settings_id: int) -> int:
        """Of the next chunk."""
        known_id, steps, _ = self._known
        return steps if settings_id == known_id else 1

    def most_in_flight(self, settings_id: int) -> int:
        """Chunks that may be at the ranks at once."""
        known_id, _, step_s = self._known
        return MOST_IN_FLIGHT if settings_id == known_id and step_s < AHEAD_BELOW_S else 1


class InFlight:
    """The chunks under way, oldest first. Used under the training lock.

    Attributes:
        nudges: how often the ranks were asked to end the chunk under way.

    Args:
        news: called, on any thread, each time a rank has answered.
    """

    def __init__(self, ranks: Ranks, news: Callable[[], None]) -> None:
        self._ranks = ranks
        self._news = news
        self._chunks: deque[tuple[Chunk, Call]] = deque()
        self._given_up: list[Call] = []
        self._alone: Call | None = None
        self.nudges = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def steps(self) -> int:
        """Steps of all chunks under way."""
        return sum(chunk.steps for chunk, _ in self._chunks)

    @property
    def leftover(self) -> Call | None:
        """A chunk given up on that some rank has yet to answer: its reductions would meet those of another chunk."""
        return next((call for call in self._given_up if call.pending()), None)

    @property
    def calls(self) -> list[Call]:
        """All that is waited for, oldest first."""
        return [*(call for call in self._given_up if call.pending()), *(call for _, call in self._chunks)]

    @property
    def oldest(self) -> Call | None:
        """Return what is waited for first."""
        return next(iter(self.calls), None)

    def free(self, most: int) -> bool:
        """Return whether one more chunk may be sent while there are fewer than ``most``."""
        asked_alone = self._alone is not None and bool(self._alone.pending())
        return self.leftover is None and not asked_alone and len(self._chunks) < most

    def send(self, chunk: Chunk, function: str = "run_chunk", *arguments: Any) -> Call:
        """Send a chunk to ranks that are joined, or another request that takes its turn."""
        call = self._ranks.post(function, *(arguments or (chunk,)))
        call.when_done(self._news)
        self._chunks.append((chunk, call))
        return call

    def holds(self, call: Call) -> bool:
        """Return whether this is a chunk under way."""
        return any(known is call for _, known in self._chunks)

    def ask_alone(self, posted: Posted, function: str, *arguments: Any) -> Call:
        """Ask ranks that are joined something; no chunk is sent until all have answered.

        Ranks that went on training would wait in the next reduction for one that takes long to answer.
        """
        self._alone = self._ranks.post(function, *arguments, posted=posted)
        self._alone.when_done(self._news)
        return self._alone

    def nudge_due(self) -> bool:
        """Return whether the chunks under way would run on for more than a step; counts the nudge that is then sent."""
        if not any(chunk.steps > 1 and chunk.nudges == self.nudges for chunk, _ in self._chunks):
            return False
        self.nudges += 1
        return True

    def left_before_it_began(self, chunk: Chunk) -> None:
        """Ranks had no steps for a chunk, because they had been nudged more often than was counted when it was made.

        Other programs may send that signal too. Chunks that are made from now on are newer than any nudge.
        """
        if chunk.steps and chunk.nudges == self.nudges:
            self.nudges += 1

    def answered(self) -> tuple[Chunk, list[Any]] | None:
        """Return the oldest chunk and its replies in rank order, once all have come; raises the first error at once."""
        if not self._chunks:
            return None
        chunk, call = self._chunks[0]
        if error := call.first_error():
            raise error if isinstance(error, GpumemError) else ClusterDied(str(error))
        return None if call.pending() else (chunk, call.get())

    def take(self) -> Call:
        """Return the oldest chunk, which all ranks have answered, is under way no more."""
        return self._chunks.popleft()[1]

    def give_up(self, forget: bool) -> bool:
        """Expect no answers any more; says whether some ranks still work on what was sent.

        Nothing is sent until they have answered it after all, unless they are gone (``forget``).
        """
        left = [*self._given_up, *(call for _, call in self._chunks)]
        self._given_up = [] if forget else [call for call in left if call.pending()]
        self._chunks.clear()
        return bool(self._given_up)
