"""Detection of live bytes that grow from step to step: cheap enough to be asked after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Steps in a block, and how many blocks in a row must be higher than the one before. The lowest live bytes of blocks are
# compared: what comes and goes within one does not count, such as garbage in circles, or a batch of another length that
# is kept until the next. From four steps on blocks may also be equal in between: then a single number that each step
# keeps (4 bytes) shows through the votes (16 bytes) that Horovod's thread lets go of sooner or later.
BLOCKS = {1: 22, 2: 13, 4: 5, 16: 7}
MAY_BE_EQUAL = 4
SLOWEST = 0.4  # of its pace at first: a cache that fills gets slower
QUIET_STEPS = 2  # after a start or a flip: the optimizer's state appears, buffers are made
# Growth in each step: but for a step at whose end garbage went. What lived some steps longer, as gradients may that the
# reduction's thread still holds, makes one step grow by more and a later one by as much less, which is no exception:
# together they have grown by as much as each step does.
STEADY_STEPS, EXCEPTIONS = 38, 2
LATE_STEPS = 3


@dataclass(slots=True)
class _Scale:
    """Blocks of one length."""

    steps: int
    wanted: int
    seen: int = 0
    lowest: int = 0
    before: int = 0
    rises: int = -1
    ties: int = 0
    began_at: int = 0  # live bytes before the first of the rises
    half_at: int = 0  # and after half of those wanted

    def add(self, level: int) -> None:
        self.lowest = level if self.seen == 0 else min(self.lowest, level)
        self.seen += 1
        if self.seen < self.steps:
            return
        self.seen = 0
        if self.rises >= 0 and self.lowest > self.before:
            self.rises += 1
            if self.rises == self.wanted // 2:
                self.half_at = self.lowest
        elif self.lowest == self.before and self.steps >= MAY_BE_EQUAL and self.ties < self.rises:
            self.ties += 1
        else:
            self.rises, self.ties, self.began_at = 0, 0, self.lowest
        self.before = self.lowest

    @property
    def grows(self) -> bool:
        if self.rises < self.wanted:
            return False
        half = self.wanted // 2
        at_first = (self.half_at - self.began_at) / half
        since = (self.before - self.half_at) / (self.rises - half)
        return since >= SLOWEST * at_first

    @property
    def pace(self) -> float:
        return (self.before - self.began_at) / ((self.rises + self.ties) * self.steps)


class Growth:
    """Follows the live bytes of one rank at step boundaries.

    Bytes that appear between chunks, where cells run, are no growth; bytes that go there are.

    Attributes:
        level: by how many bytes steps have grown or shrunk what is live, all together.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self.level = 0
        self._quiet = QUIET_STEPS
        self._scales = [_Scale(steps, wanted) for steps, wanted in BLOCKS.items()]
        self._grown: deque[int] = deque(maxlen=STEADY_STEPS + LATE_STEPS)  # by how much in each of the last steps

    def settle(self) -> None:
        """Something was flipped: the next steps may hold more or less, for good."""
        self._quiet = QUIET_STEPS

    def chunk_begins(self, live: int) -> None:
        """Live bytes before the first step of a chunk."""
        if self._last is not None:
            self.level += min(0, live - self._last)
        self._last = live

    def step_ended(self, live: int) -> None:
        """Live bytes after a step."""
        before, self._last = self._last, live
        if self._quiet or before is None:
            self._quiet = max(0, self._quiet - 1)
            return
        self.level += live - before
        self._grown.append(live - before)
        for scale in self._scales:
            scale.add(self.level)

    @property
    def every(self) -> int:
        """In how many steps live bytes grow for sure, for a long time now; 0 while they do not."""
        return next((scale.steps for scale in self._scales if scale.grows), 0)

    @property
    def in_each_step(self) -> bool:
        """Return whether live bytes grew in each step of late."""
        if len(self._grown) < STEADY_STEPS:
            return False
        grown, usual = list(self._grown), median(self._grown)
        before = len(grown) - STEADY_STEPS
        exceptions = sum(not _grew(grown[: before + index + 1], usual) for index in range(STEADY_STEPS))
        return exceptions <= EXCEPTIONS

    @property
    def bytes_so_far(self) -> int:
        """Return by how much they have grown."""
        return max(scale.before - scale.began_at for scale in self._scales)

    @property
    def bytes_per_step(self) -> float:
        """Return how fast they grow; 0 while they do not."""
        return next((scale.pace for scale in self._scales if scale.grows), 0.0)


def _grew(steps: Sequence[int], usual: float) -> bool:
    """Return whether the last of these steps grew, or fell only by what had lived longer than the step that made it."""
    now = steps[-1]
    together = (sum(steps[-1 - late :]) - (late + 0.5) * usual for late in range(1, LATE_STEPS + 1))
    return now > 0 or (now < 0 and max(together) >= 0)
