"""Predictions beside what was measured afterwards."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..report.configurations import Tried
from ..report.differences import arrows
from ..report.tables import Report, Table
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes
from .prediction import DOES_NOT_FIT, FITS, Prediction

_Key = tuple[Any, ...]
OOM = "oom"
MOST_MISSED = 0.5  # by which one miss may widen what follows: memory that grows would make all else unknown


@dataclass(frozen=True)
class Asked:
    """A prediction of a model at one version, the settings at that time, and how many configurations had begun."""

    prediction: Prediction
    model_version: int
    settings: Settings
    begun: int


@dataclass(frozen=True)
class Scored:
    """A prediction and the configuration that it was about, which was tried afterwards; ``flip`` says what it was."""

    flip: str
    predicted: Prediction
    came: Tried

    @property
    def error(self) -> float | None:
        """Return how far above the measured live peak the prediction was, as a share of it.

        ``None`` if no step was done, or the prediction is a lower bound.
        """
        peak, said = self.came.peak_bytes, self.predicted
        return None if not peak or said.lower_bound else said.live_peak_bytes / peak - 1

    @property
    def samples_per_s(self) -> float | None:
        """Return the prediction for exactly these settings: others with the same memory may differ in speed."""
        return self.predicted.samples_per_s if self.exact else None

    @property
    def exact(self) -> bool:
        """Return whether it was about these very settings, and not only about the same memory."""
        return self.predicted.settings == self.came.settings

    @property
    def right(self) -> bool:
        """Return whether the verdict was: ``tight`` may be both."""
        wrong = FITS if self.came.outcome == OOM else DOES_NOT_FIT
        return self.predicted.verdict != wrong

    @property
    def missed(self) -> float:
        """Return the share by which memory missed the prediction beyond its error; else 0. Negative: less.

        Of what was said to fit and ran out of memory the least that this can mean.
        """
        said, peak = self.predicted, self.came.peak_bytes
        if not said.reserved_peak_bytes or not said.live_peak_bytes:
            return 0.0
        if said.verdict == FITS and self.came.outcome == OOM:
            return (said.limit_bytes or 0) / said.reserved_peak_bytes - 1
        off = peak / said.live_peak_bytes - 1 if peak else 0.0
        return off if abs(off) > said.high_bytes / said.reserved_peak_bytes - 1 else 0.0


class Scoreboard(Report):
    """Every prediction of this session whose settings were tried afterwards, in the order in which they were made."""

    def __init__(self, scored: Sequence[Scored]) -> None:
        self.scored = tuple(scored)

    def missed(self, model_version: int) -> tuple[float, float]:
        """Return the largest shares by which a model's memory was below and above predictions, beyond their errors."""
        shares = [0.0, *(one.missed for one in self.scored if one.came.model_version == model_version)]
        return max(-MOST_MISSED, min(shares)), min(MOST_MISSED, max(shares))

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each prediction."""
        return [
            {
                "flip": one.flip,
                "verdict": one.predicted.verdict,
                "outcome": one.came.outcome,
                "right": one.right,
                "predicted_bytes": one.predicted.live_peak_bytes,
                "came_bytes": one.came.peak_bytes,
                "error": one.error,
            }
            for one in self.scored
        ]

    @property
    def shown(self) -> list[Table | str]:
        """A table, if there is anything in it."""
        return [self._table if self.scored else _NONE]

    @property
    def _table(self) -> Table:
        rows = tuple(
            (
                one.flip,
                one.predicted.verdict,
                one.came.outcome,
                "yes" if one.right else "no",
                one.predicted.in_words(one.predicted.live_peak_bytes),
                format_bytes(one.came.peak_bytes),
                _percent(one.error),
            )
            for one in self.scored
        )
        errors = [abs(one.error) for one in self.scored if one.error is not None]
        median = f", {_percent(statistics.median(errors))} off in the median" if errors else ""
        title = f"{sum(one.right for one in self.scored)} of {len(rows)} verdicts right{median}"
        headings = ("flip", "verdict", "outcome", "right", "live peak, predicted", "came", "off")
        return Table(title, headings, rows, frozenset({"flip", "verdict", "outcome", "right"}))


_NONE = (
    "Nothing was predicted yet whose settings were tried afterwards. Predict a flip with %hvd_predict, then make it."
)


def score(asked: Sequence[Asked], tried: Sequence[Tried]) -> Scoreboard:
    """Return which of the configurations tried, in their order, had been predicted.

    Of several predictions the first of the very settings counts, else the first of settings that need the same memory.
    """
    about = defaultdict[_Key, list[tuple[int, Tried]]](list)
    for place, came in enumerate(list(tried)):  # another thread may add to both
        if came.steps or came.outcome == OOM:
            about[_key(came.model_version, came.settings)].append((place, came))
    scored = dict[tuple[int, int], Scored]()
    for one in list(asked):
        of_it = about.get(_key(one.model_version, one.prediction.settings), [])
        met = next((came for place, came in of_it if place >= one.begun), None)
        if met is not None:
            flip = arrows(one.settings, one.prediction.settings) or "as it is"
            name = met.settings_id, met.part
            this, first = Scored(flip, one.prediction, met), scored.get(name)
            if first is None or (this.exact and not first.exact):
                scored[name] = this
    return Scoreboard([scored[name] for name in sorted(scored)])


def foretold(asked: Sequence[Asked], tried: Sequence[Tried], came: Tried) -> Prediction | None:
    """Return what was predicted for the configuration that is tried now, before it was tried first."""
    wanted = _key(came.model_version, came.settings)
    of_it = [one for one in list(asked) if _key(one.model_version, one.prediction.settings) == wanted]
    scored = score(of_it, tried).scored
    return scored[-1].predicted if scored else None


def _key(model_version: int, settings: Settings) -> _Key:
    """Return the same for a prediction and a configuration of the same model that take the same memory."""
    return model_version, *(getattr(settings, name) for name, knob in KNOBS.items() if knob.moves)


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %".replace("-", "−")
