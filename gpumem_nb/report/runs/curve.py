"""The curve of one configuration over its steps, in few points however many steps there were."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
        self.steps, self.samples, self.losses, self.rates, self.live_peaks = (array("d") for _ in _COLUMNS)
        self._share = 1 / MOST_POINTS  # of the samples seen by then, within which points were joined

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, samples: int, loss: float | None, rate: float, live_peak_bytes: int) -> None:
        """One more step of so many samples."""
        steps, seen = (self.steps[-1], self.samples[-1]) if self.steps else (0, 0)
        self._append(steps + 1, seen + samples, math.nan if loss is None else loss, rate, live_peak_bytes)
        if len(self) >= _MOST_KEPT:  # not with every step: it takes longer than a point
            self.thin()

    def thin(self) -> None:
        """Keep ``MOST_POINTS`` at most."""
        if len(self) > MOST_POINTS:
            self._join()
        while len(self) > MOST_POINTS:
            self._share *= 1.25
            self._join()

    def copy(self) -> Curve:
        """Return one that changes no more, of ``MOST_POINTS`` at most."""
        other = Curve()
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name)[:])
        other._share = self._share
        other.thin()
        return other

    def mean_loss(self, begin: float, end: float) -> float | None:
        """Return the mean over the samples from ``begin`` to ``end``, counted since the flip; ``None`` if not known."""
        within = [min(seen, end) - max(before, begin) for before, seen in pairwise([0.0, *self.samples])]
        total = sum(samples * loss for samples, loss in zip(within, self.losses, strict=True) if samples > 0)
        mean = total / (end - begin) if len(self) and self.samples[-1] >= end > begin else math.nan
        return None if math.isnan(mean) else mean

    def as_dict(self) -> dict[str, list[float]]:
        """For json, in nine digits, but for steps and samples: those of two points are never the same."""
        exact = {name: list(getattr(self, name)) for name in _COLUMNS[:2]}
        return exact | {name: [float(f"{value:.9g}") for value in getattr(self, name)] for name in _COLUMNS[2:]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Sequence[Any]]) -> Curve:
        """Read what :meth:`as_dict` gave; raise ``ValueError``, ``TypeError`` or ``LookupError`` for anything else."""
        curve, last = cls(), (0.0, 0.0)
        for values in zip(*(saved[name] for name in _COLUMNS), strict=True):
            steps, samples, loss, rate, live_peak = map(float, values)
            known = all(map(math.isfinite, (steps, samples, rate, live_peak)))
            if not known or len(curve) == _MOST_KEPT or steps <= last[0] or samples <= last[1]:
                raise ValueError(values)  # one such point and nothing that is computed of the rows would come out
            curve._append(steps, samples, loss, rate, live_peak)
            last = steps, samples
        return curve

    def _append(self, *values: float) -> None:
        for name, value in zip(_COLUMNS, values, strict=True):
            getattr(self, name).append(value)

    def _join(self) -> None:
        """Join points that lie together within a share of the samples seen by then."""
        joined, first = Curve(), 0
        steps, samples = ([end - begin for begin, end in pairwise([0.0, *ends])] for ends in (self.steps, self.samples))
        for last in range(len(self)):
            began = self.samples[first - 1] if first else 0.0
            if last + 1 == len(self) or self.samples[last + 1] - began > self._share * self.samples[last + 1]:
                part = slice(first, last + 1)
                loss, rate = _mean(self.losses[part], samples[part]), _mean(self.rates[part], steps[part])
                joined._append(self.steps[last], self.samples[last], loss, rate, max(self.live_peaks[part]))
                first = last + 1
        for name in _COLUMNS:
            setattr(self, name, getattr(joined, name))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:  # to the last bit
        return values[0]
    return math.fsum(map(float.__mul__, values, weights)) / math.fsum(weights)
