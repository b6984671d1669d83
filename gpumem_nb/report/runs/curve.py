"""What one configuration measured over its steps, in few points however many steps there were."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 128
_MOST_KEPT = 4 * MOST_POINTS  # before they are thinned
_COLUMNS = ("steps", "samples", "losses", "rates", "live_peaks")


class Curve:
    """Points over the steps since the flip; each stands for the steps since the point before it.

    Up to ``MOST_POINTS`` steps have one each. Of more those share one that lie within some per cent of the samples seen
    by then, so early steps stay told apart however long training goes on.

    Attributes:
        steps, samples: done and seen by all ranks together when the point ends, since the flip.
        losses: the mean, over samples and ranks; not a number where it is not known.
        rates: samples/s of all ranks together, the mean over steps.
        live_peaks: the highest live bytes of any rank.
    """

    __slots__ = (*_COLUMNS, "_share")

    def __init__(self) -> None:
        self.steps = array("d")
        self.samples = array("d")
        self.losses = array("d")
        self.rates = array("d")
        self.live_peaks = array("d")
        self._share = 1 / MOST_POINTS  # of the samples seen by then, within which points were joined

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, samples: int, loss: float | None, rate: float, live_peak_bytes: int) -> None:
        """One more step of so many samples."""
        self._append(
            (self.steps[-1] if self.steps else 0) + 1,
            (self.samples[-1] if self.samples else 0) + samples,
            math.nan if loss is None else loss,
            rate,
            live_peak_bytes,
        )
        if len(self) >= _MOST_KEPT:  # not with every step: it takes longer than a point
            self.thin()

    def thin(self) -> None:
        """Keep ``MOST_POINTS`` at most."""
        if len(self) > MOST_POINTS:
            self._join(self._share)
        while len(self) > MOST_POINTS:
            self._share *= 1.25
            self._join(self._share)

    def copy(self) -> Curve:
        """One that changes no more, of ``MOST_POINTS`` at most."""
        other = Curve()
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name)[:])
        other._share = self._share
        other.thin()
        return other

    def mean_loss(self, begin: float, end: float) -> float | None:
        """The mean over the samples from ``begin`` to ``end``, counted since the flip; ``None`` if it is not known."""
        total = before = 0.0
        for seen, loss in zip(self.samples, self.losses, strict=True):
            within = min(seen, end) - max(before, begin)
            if within > 0:
                total += within * loss
            before = seen
        mean = total / (end - begin) if before >= end > begin else math.nan
        return None if math.isnan(mean) else mean

    def as_dict(self) -> dict[str, list[float]]:
        """For json, in nine digits, but for steps and samples: those of two points are never the same."""
        exact = {name: list(getattr(self, name)) for name in _COLUMNS[:2]}
        return exact | {name: [float(f"{value:.9g}") for value in getattr(self, name)] for name in _COLUMNS[2:]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Sequence[Any]]) -> Curve:
        """What :meth:`as_dict` gave; raises ``ValueError``, ``TypeError`` or ``LookupError`` for anything else."""
        curve = cls()
        for values in zip(*(saved[name] for name in _COLUMNS), strict=True):
            steps, samples, loss, rate, live_peak = map(float, values)
            known = all(map(math.isfinite, (steps, samples, rate, live_peak)))
            if not known or len(curve) == _MOST_KEPT or not curve._goes_on_at(steps, samples):
                raise ValueError(values)  # one such point and nothing that is computed of the rows would come out
            curve._append(steps, samples, loss, rate, live_peak)
        return curve

    def _goes_on_at(self, steps: float, samples: float) -> bool:
        """Whether that is after the last point, by both."""
        return steps > (self.steps[-1] if self.steps else 0) and samples > (self.samples[-1] if self.samples else 0)

    def _append(self, *values: float) -> None:
        for name, value in zip(_COLUMNS, values, strict=True):
            getattr(self, name).append(value)

    def _join(self, share: float) -> None:
        """Join points that lie together within this share of the samples seen by then."""
        joined = Curve()
        first = 0
        for last in range(len(self)):
            ends = last + 1 == len(self)
            began = self.samples[first - 1] if first else 0.0
            if ends or self.samples[last + 1] - began > share * self.samples[last + 1]:
                joined._append(*self._as_one(first, last))
                first = last + 1
        for name in _COLUMNS:
            setattr(self, name, getattr(joined, name))

    def _as_one(self, first: int, last: int) -> tuple[float, ...]:
        """The points from the first to the last as one."""
        steps, samples = (
            [_since(ends, place) for place in range(first, last + 1)] for ends in (self.steps, self.samples)
        )
        part = slice(first, last + 1)
        return (
            self.steps[last],
            self.samples[last],
            _mean(self.losses[part], samples),
            _mean(self.rates[part], steps),
            max(self.live_peaks[part]),
        )


def _since(ends: Sequence[float], place: int) -> float:
    return ends[place] - (ends[place - 1] if place else 0.0)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:  # to the last bit
        return values[0]
    return math.fsum(map(float.__mul__, values, weights)) / math.fsum(weights)
