"""From samples to what the charts draw: few points, maxima kept, marks where something happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.messages import Sample
from ..shared.settings import Settings

Array = NDArray[np.float64]
MOST_POINTS = 300
MOST_LINES = 8  # more ranks are drawn as the highest, the median and the lowest of them at each point
MOST_MARKS = 8
_SHORT = {
    "precision": "",
    "checkpointing": "ckpt ",
    "batch_size": "batch ",
    "accumulation_steps": "accum ",
    "optimizer": "",
    "optimizer_impl": "",
    "learning_rate": "lr ",
    "clip_norm": "clip ",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One point for each bucket of steps; peak (bytes), speed (samples/s) and seconds with one row per line."""

    step: Array
    peak: Array
    speed: Array
    seconds: Array
    loss: Array


def series(by_rank: Sequence[Sequence[Sample]]) -> Series:
    """Finished steps, thinned out: the highest peak and the mean of all else within each bucket of equal size."""
    good = [[sample for sample in samples if sample.done] for samples in by_rank]
    length = min(map(len, good), default=0)
    if not length:
        none = np.empty((len(lines(len(good))), 0))
        return Series(np.empty(0), none, none, none, np.empty(0))
    rows = [samples[-length:] for samples in good]

    def table(value: Callable[[Sample], Any]) -> Array:
        return np.array([[value(sample) for sample in samples] for samples in rows], dtype=np.float64)

    step = table(lambda sample: sample.step)[0]
    width = -(-(int(step[-1] - step[0]) + 1) // MOST_POINTS)
    starts = np.flatnonzero(np.diff(step // width, prepend=-1))
    counts = np.diff(starts, append=length)

    def mean(values: Array) -> Array:
        return np.add.reduceat(values, starts, axis=-1) / counts

    losses = table(lambda sample: np.nan if sample.loss is None else sample.loss)
    return Series(
        step=step[starts + counts - 1],
        peak=_few(np.maximum.reduceat(table(lambda sample: sample.live_peak_bytes), starts, axis=-1)),
        speed=_few(mean(table(lambda sample: sample.samples_per_s))),
        seconds=_few(mean(table(lambda sample: sample.step_s))),
        loss=mean(losses.mean(axis=0)),
    )


def lines(ranks: int) -> list[str]:
    """Names of the rows of a :class:`Series`."""
    return [f"rank {rank}" for rank in range(ranks)] if ranks <= MOST_LINES else ["highest rank", "median", "lowest"]


def _few(by_rank: Array) -> Array:
    return by_rank if len(by_rank) <= MOST_LINES else np.quantile(by_rank, [1, 0.5, 0], axis=0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step; ``bad`` for what ended a step."""

    step: int
    text: str
    bad: bool


def marks(by_rank: Sequence[Sequence[Sample]], settings: Callable[[int], Settings | None]) -> list[Mark]:
    """The latest flips and failures, found in the samples: a flip is marked at its first step."""
    found: dict[int, Mark] = {}
    before: Settings | None = None
    for at_once in zip(*by_rank, strict=False):
        first = at_once[0]
        now = settings(first.settings_id)
        flipped = before is not None and now is not None and now is not before
        text = short(before, now) if flipped and before and now else ""
        kinds = {sample.event for sample in at_once if not sample.done}
        if kinds:
            text = " ".join(filter(None, ("OOM" if "oom" in kinds else "failed", text)))
        if text:
            # A step that was discarded keeps the number of the one before it.
            step = first.step + bool(kinds)
            earlier = found.pop(step, None)
            joined = f"{earlier.text} → {text}" if earlier else text
            found[step] = Mark(step, joined, bool(kinds) or bool(earlier and earlier.bad))
        before = now or before
    return list(found.values())[-MOST_MARKS:]


def short(before: Settings, after: Settings) -> str:
    """A flip in a few letters, such as ``bf16, batch 64``."""
    return ", ".join(f"{_SHORT[name]}{value}" for name, value in after.changed_from(before).items())
