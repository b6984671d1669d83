"""How long settings would take that were not measured, from those that were: each knob's part multiplies the time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...shared.knobs import KNOBS
from ...shared.settings import Settings
from .space import SPLIT

_DOUBT = 0.02  # how little a value that was not measured is held to do, beside what measurements say


class Effects:
    """A model of samples/s: ``log`` of it is a sum with one summand for each knob's value.

    Of the micro-batch it is a parabola in ``log2(batch_size)``: small ones waste time on calling operators, and what
    large ones gain comes to an end. It is fitted by least squares, with a small penalty (ridge regression), so that
    values of which nothing is known count as those of ``start``.

    Args:
        start: what others are compared with.
        knobs: that differ.
        measured: samples/s by settings.
    """

    def __init__(self, start: Settings, knobs: Sequence[str], measured: Mapping[Settings, float]) -> None:
        self._start = start
        self._columns = [
            (name, value)
            for name in knobs
            if name not in SPLIT
            for value in KNOBS[name].choices
            if value != getattr(start, name)
        ]
        rows = np.array([self._row(settings) for settings in measured], dtype=float)
        rates = np.log(np.array(list(measured.values()), dtype=float))
        penalty = _DOUBT * np.eye(rows.shape[1])
        penalty[0, 0] = 0.0
        self._summands = np.linalg.solve(rows.T @ rows + penalty, rows.T @ rates)

    def samples_per_s(self, settings: Settings) -> float:
        """What the model expects."""
        return math.exp(float(np.dot(self._row(settings), self._summands)))

    def _row(self, settings: Settings) -> list[float]:
        doublings = math.log2(settings.batch_size / self._start.batch_size)
        return [1.0, doublings, doublings**2, *(getattr(settings, name) == value for name, value in self._columns)]
