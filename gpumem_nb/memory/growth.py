"""Whether live bytes grow from step to step: cheap enough to be asked after every step."""

from __future__ import annotations

from dataclasses import dataclass

# Steps in a block. The lowest live bytes of consecutive blocks are compared: what comes and goes within a block, such
# as garbage in circles, a batch of another length that is kept until the next one, or Horovod's votes, does not count.
BLOCKS = (1, 2, 4, 16)
RISES = 16  # blocks in a row that end higher than the one before: 1 in 17! for what merely varies
QUIET_STEPS = 2  # after a start or a flip: the optimizer's state appears, buffers are made


@dataclass(slots=True)
class _Scale:
    """Blocks of one length."""

    steps: int
    seen: int = 0
    lowest: int = 0
    before: int | None = None
    rises: int = 0
    began_at: int = 0  # live bytes at the beginning of the rises

    def add(self, level: int) -> None:
        self.lowest = level if self.seen == 0 else min(self.lowest, level)
        self.seen += 1
        if self.seen < self.steps:
            return
        if self.before is not None and self.lowest > self.before:
            self.rises += 1
        else:
            self.rises, self.began_at = 0, self.lowest
        self.before, self.seen = self.lowest, 0


class Growth:
    """Follows the live bytes of one rank at step boundaries.

    Bytes that appear between chunks, where cells run, are no growth; bytes that go there are.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._level = 0
        self._quiet = QUIET_STEPS
        self._scales = [_Scale(steps) for steps in BLOCKS]

    def settle(self) -> None:
        """Something was flipped: the next steps may hold more or less, for good."""
        self._quiet = QUIET_STEPS

    def chunk_begins(self, live: int) -> None:
        """Live bytes before the first step of a chunk."""
        if self._last is not None:
            self._level += min(0, live - self._last)
        self._last = live

    def step_ended(self, live: int) -> None:
        """Live bytes after a step."""
        before, self._last = self._last, live
        if self._quiet or before is None:
            self._quiet = max(0, self._quiet - 1)
            return
        self._level += live - before
        for scale in self._scales:
            scale.add(self._level)

    @property
    def every(self) -> int:
        """In how many steps live bytes grow for sure, over a long stretch of them; 0 while they do not."""
        return next((scale.steps for scale in self._scales if scale.rises >= RISES), 0)

    @property
    def bytes_so_far(self) -> int:
        """By how much they have grown."""
        return max((scale.before - scale.began_at for scale in self._scales if scale.before is not None), default=0)

    @property
    def bytes_per_step(self) -> float:
        """How fast they grow."""
        for scale in self._scales:
            if scale.rises >= RISES and scale.before is not None:
                return (scale.before - scale.began_at) / (scale.rises * scale.steps)
        return 0.0
