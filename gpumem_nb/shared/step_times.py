"""The parts of a step's time, in the order in which they come, and what each of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

DATA = "data"
COPY = "copy"
FORWARD = "forward"
BACKWARD = "backward"
REDUCTION = "reduction"
UPDATE = "update"
TOOLKIT = "toolkit"

MEANING = {
    DATA: "waiting for the next micro-batch",
    COPY: "moving micro-batches to the device",
    FORWARD: "the model and the loss",
    BACKWARD: "gradients; with checkpointing what is computed again, too",
    REDUCTION: "waiting for averaged gradients, where backward does not go on meanwhile, and for ranks that are slower",
    UPDATE: "clipping and the optimizer",
    TOOLKIT: "this toolkit's own share: votes, accounting, copies for undoing",
}
PARTS = tuple(MEANING)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The parts of one step's time on one rank.

    Attributes:
        seconds: of each of ``PARTS``. They sum to the step, on GPUs to what the device took for it.
        hidden_s: in how much of backward gradients were on their way already, at most: that they have arrived is
            noticed with the next gradient, on GPUs after the process has sent all. ``None`` where it is not known.
        data_cpu_s: of the wait for data, in how much the rank itself computed; in the rest it waited, for a disk or for
            its workers.
        queued_s: in how much of the step the rank was ready to go on and had no core to go on with, because others used
            it. ``None`` where the system does not tell.
        of_device: whether the parts are times of a GPU, beside which the process may run ahead.
    """

    seconds: tuple[float, ...]
    hidden_s: float | None
    data_cpu_s: float = 0.0
    queued_s: float | None = None
    of_device: bool = False

    @classmethod
    def of(
        cls,
        seconds: Mapping[str, float],
        hidden_s: float | None,
        data_cpu_s: float = 0.0,
        queued_s: float | None = None,
        of_device: bool = False,
    ) -> StepTimes:
        """From the seconds of some parts; the others took none."""
        return cls(tuple(seconds.get(part, 0.0) for part in PARTS), hidden_s, data_cpu_s, queued_s, of_device)

    def __getitem__(self, part: str) -> float:
        """Seconds of a part."""
        return self.seconds[PARTS.index(part)]

    def without(self, *parts: str) -> StepTimes:
        """Return the same step as if these parts took no time."""
        seconds = tuple(0.0 if part in parts else took for part, took in zip(PARTS, self.seconds, strict=True))
        return replace(self, seconds=seconds)

    def with_update(self, seconds: float) -> StepTimes:
        """Return the same step with an update that takes so long."""
        parts = zip(PARTS, self.seconds, strict=True)
        return replace(self, seconds=tuple(seconds if part == UPDATE else took for part, took in parts))

    @property
    def columns(self) -> dict[str, float | None]:
        """Seconds by the names of columns: ``data_s``, … and ``hidden_s``, ``data_cpu_s`` and ``queued_s``."""
        others = {"hidden_s": self.hidden_s, "data_cpu_s": self.data_cpu_s, "queued_s": self.queued_s}
        return {f"{part}_s": seconds for part, seconds in zip(PARTS, self.seconds, strict=True)} | others

    @property
    def hidden_share(self) -> float | None:
        """Of the time in which gradients were on their way or waited for, the share that backward hid."""
        travelled_s = None if self.hidden_s is None else self.hidden_s + self[REDUCTION]
        return self.hidden_s / travelled_s if travelled_s and self.hidden_s is not None else None

    @property
    def starved_share(self) -> float | None:
        """The share of the step in which the rank was ready and had no core; ``None`` on GPUs, which go on then."""
        if self.queued_s is None or self.of_device:
            return None
        return self.queued_s / (self.total_s or 1)

    @property
    def total_s(self) -> float:
        """All parts together."""
        return sum(self.seconds)


UNKNOWN = StepTimes((math.nan,) * len(PARTS), None)


@dataclass(frozen=True, slots=True)
class Lap:
    """A part of one step, or gradients on their way, in seconds by a clock of the rank's host.

    ``name`` is the part, or how many bytes are on their way; ``bucket`` is the number that these have on each rank.
    """

    name: str
    began_s: float
    ended_s: float
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class StepLanes:
    """One step of one rank as it happened.

    Attributes:
        rank: whose.
        step: its number.
        parts: without gaps.
        transfers: gradients on their way; they may overlap.
    """

    rank: int
    step: int
    parts: tuple[Lap, ...]
    transfers: tuple[Lap, ...]

    def moved(self, by_s: float) -> StepLanes:
        """Return the same, so many seconds later."""
        later = (tuple(replace(lap, began_s=lap.began_s + by_s, ended_s=lap.ended_s + by_s) for lap in laps)
                 for laps in (self.parts, self.transfers))  # fmt: skip
        return StepLanes(self.rank, self.step, *later)
