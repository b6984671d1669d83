"""The result of tuning: the fastest settings that fit, why they are, and everything that was looked at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...report.differences import arrows, changes, mathematics, short, typed
from ...report.instead import Instead
from ...report.tables import Report, Table
from ...shared.errors import WorkloadError
from ...shared.knobs import CHANGES
from ...shared.settings import Settings
from ...shared.units import format_bytes, format_rate
from ...shared.workload import Splits
from .record import Candidate, contenders, fastest, pareto, speed_of
from .search import WORTH
from .space import SPLIT, Space

PRESENT = "as it is"
_LATE = 1.1  # times what was given: that is told
_ROWS = 12  # of a table in words; the frame has all


@dataclass(frozen=True, repr=False)
class TuneResult(Report):
    """The fastest settings that fit every rank, and everything that was looked at.

    Attributes:
        present: the settings of the moment when tuning began.
        space: what there was to choose from.
        looked_at: what was predicted or measured, in that order.
        budget_bytes: what may be reserved on a rank; ``None`` without a limit.
        ranks: how many train.
        seconds: what tuning took.
        given_s: what it was asked to take at most.
        longest_s: what the longest of its trials took, which are not left half way.
        stopped: why it ended early, in a sentence; empty if it came to its end.
        refused: what no step was possible under, and why.
        splits: what is known of training its micro-batches in parts.
        instead: what to train with in place of the present settings, where these do not fit.
    """

    present: Settings
    space: Space
    looked_at: tuple[Candidate, ...]
    budget_bytes: int | None
    ranks: int
    seconds: float
    given_s: float
    longest_s: float
    stopped: str
    refused: Mapping[Settings, str]
    splits: Splits
    _set: Callable[[dict[str, Any]], object] = field(repr=False, compare=False)
    instead: Instead | None = None

    @property
    def measured(self) -> tuple[Candidate, ...]:
        """Return what fits and was measured, the fastest first."""
        return tuple(sorted((one for one in self.looked_at if one.usable), key=speed_of, reverse=True))

    @property
    def now(self) -> Candidate | None:
        """The present settings, with the global batch that was asked for; ``None`` if they were not measured."""
        return next((one for one in self.measured if one.settings == self.space.start), None)

    @property
    def best(self) -> Candidate | None:
        """The fastest that fit; ``None`` where nothing was measured.

        If nothing is clearly faster it is :attr:`now`, or if that is tight and others are not, the fastest of these.
        What is tight is no answer while something with room was measured, unless it is what runs already.
        """
        roomy = [one for one in self.measured if not one.tight]
        now = self.now
        usual = now if now and (not now.tight or not roomy) else fastest(roomy)
        best = fastest(contenders(self.measured, self.space.start))
        return best if usual is None or best is None or _clearly_faster(best, usual) else usual

    def pareto(self) -> tuple[Candidate, ...]:
        """Return the measured settings that no other beats in both memory and samples/s, from the least memory on."""
        return tuple(pareto(self.measured))

    def apply(self) -> None:
        """Change to the best settings, from the next chunk on; knobs that were not tuned stay as they are by then.

        Tuned knobs get the measured values, even if you changed them meanwhile.

        Raises:
            WorkloadError: there are none.
            InvalidInput: they cannot be used by now, or something else is loaded.
        """
        if self.best is None:
            raise WorkloadError(f"There is nothing to apply. {self.why}")
        best = self.best.settings
        self._set({name: getattr(best, name) for name in self.space.knobs} | best.changed_from(self.present))

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for everything that was looked at: what was measured on top, fastest first.

        At its end is what no step was possible under; ``failed`` says why.
        """
        best, front = self.best, self.pareto()
        looked_at = [
            {
                "flip": self.flip(one),
                **{name: getattr(one.settings, name) for name in self.space.knobs},
                **one.predicted.columns,
                "samples_per_s": one.samples_per_s,
                "samples_per_s_error": one.error,
                "turns": len(one.rates),
                "fits": one.fits,
                "pareto": one in front,
                "best": one is best,
                "mathematics": changes(self.present, one.settings, self.splits),
                "failed": one.failed,
            }
            for one in self._rows
        ]
        refused = [
            {
                "flip": arrows(self.present, settings) or PRESENT,
                **{name: getattr(settings, name) for name in self.space.knobs},
                **dict.fromkeys(("fits", "pareto", "best"), False),
                "turns": 0,
                "mathematics": changes(self.present, settings, self.splits),
                "failed": why,
            }
            for settings, why in self.refused.items()
        ]
        return looked_at + refused

    def flip(self, one: Candidate) -> str:
        """Return what is changed from the present settings, in words."""
        return arrows(self.present, one.settings) or PRESENT

    @property
    def why(self) -> str:
        """Return what was found and why, in sentences."""
        return " ".join(filter(None, [self._found, self.stopped]))

    @property
    def line(self) -> str:
        """Return what was found in one short line."""
        best, now = self.best, self.now
        if best is None:
            return "Tuned: nothing that fits was found."
        if best is now or not self.typed:
            return "Tuned: nothing clearly faster fits."
        rate = f"{speed_of(best) / speed_of(now):.1f} × faster" if now else f"{format_rate(speed_of(best))} samples/s"
        return f"Tuned: {self.typed}, {rate}."

    @property
    def _found(self) -> str:
        best, now = self.best, self.now
        if best is None:
            return self._nothing
        reserved = f"{format_bytes(best.predicted.reserved_peak_bytes)} reserved{self._limit}"
        rate = f"{_rate(best)} samples/s with {reserved}"
        of_batch = " with that global batch" if self.space.start != self.present else ""
        present = f"the present settings{of_batch}"
        why_not = f"; {present} {self._why_not_now.rstrip('.')}" if now is None and self._why_not_now else ""
        if len(self.measured) == 1:
            only = (f"{self.flip(best)}: {rate}{why_not}.", self._does(best), self._only_one, self._tight(best))
            return " ".join(filter(None, only))
        if best is now:
            return " ".join(filter(None, [self._none_faster(best, rate), self._tight(best), self._too_tight(best)]))
        said = f"{self.flip(best)}: {rate}"
        if now:
            said += f", {speed_of(best) / speed_of(now):.2f} × the {_rate(now)} of {present}"
            if now.tight:
                said += f", which are tight: up to {format_bytes(now.predicted.high_bytes)} are possible"
        said += f"{why_not}. {self._does(best)}"
        few = now is not None and math.isnan(best.error + now.error) and not self.stopped
        chance = f"Of so few turns that may be chance. {self._more_time}" if few else ""
        instead = self.instead.reason(self.present) if self.instead and now is None else ""
        notes = (instead, chance, self._tight(best), self._too_tight(best), self._parts(best), self._larger(best))
        return " ".join(filter(None, [said, *notes]))

    def _does(self, best: Candidate) -> str:
        """Return what it does to the mathematics; empty where nothing is changed."""
        changed = best.settings != self.present
        return f"It {mathematics(self.present, best.settings, self.splits)}." if changed else ""

    @property
    def _only_one(self) -> str:
        """Return why nothing else was measured."""
        left = len(self.space.candidates) - len(self.looked_at) - len(self.refused)
        others = f"{left} more were not tried" if left else "no other one fits and could be measured"
        if len(self.space.candidates) == 1:
            others = "there is nothing else to choose from"
        more = f" {self._more_time}" if left and not self.stopped else ""
        return f"It is the only one that was measured: {others}.{more}"

    def _none_faster(self, best: Candidate, rate: str) -> str:
        """Return what there is to say where all is compared with the best; another global batch is a change, too."""
        said = f"Of what was measured, the present settings are the fastest that fit: {rate}."
        if does := self._does(best):
            said = f"{self.flip(best)}: {rate}. {does} Of what was measured, that is the fastest that fits."
        others = f"{len(self.measured) - 1} others that were measured"
        return f"{said} None of {'the others that have room' if self._too_tight(best) else others} is clearly faster."

    @property
    def _why_not_now(self) -> str:
        """Return why the present settings were not measured; empty if there was no time."""
        start = self.space.start
        if start in self.refused:
            return f"could not be tried: {self.refused[start]}"
        one = next((one for one in self.looked_at if one.settings == start), None)
        if one and one.failed:
            return f"could not be tried: {one.failed}"
        return "do not fit" if one and not one.fits else ""

    def _parts(self, best: Candidate) -> str:
        """Return what each knob has to do with it."""
        start, rates = self.space.start, {one.settings: speed_of(one) for one in self.measured}
        changed = best.settings.changed_from(start)
        split = {name: value for name, value in changed.items() if name in SPLIT}
        parts = [{name: value} for name, value in changed.items() if name not in SPLIT] + ([split] if split else [])
        if len(parts) < 2:
            return ""
        each = []
        for part in parts:
            back = {name: getattr(start, name) for name in part}
            with_it = [one for one in rates if all(getattr(one, name) == value for name, value in part.items())]
            alike = [(one, one.replace(**back)) for one in with_it]
            times = [rates[one] / rates[without] for one, without in alike if without in rates]
            if times and statistics.median(times) >= WORTH:
                each.append(f"{statistics.median(times):.2f} × by {typed(start, start.replace(**part))}")
        return f"Where that alone was changed: {', '.join(each)}." if each else ""

    def _tight(self, best: Candidate) -> str:
        """That there is little room."""
        return f"That is tight: up to {format_bytes(best.predicted.high_bytes)} are possible." if best.tight else ""

    def _too_tight(self, best: Candidate) -> str:
        """Return what would have been faster, had it more room."""
        faster = [one for one in self.measured if one.tight and one is not best and _clearly_faster(one, best)]
        if not faster:
            return ""
        most = format_bytes(faster[0].predicted.high_bytes)
        flip = self.flip(faster[0])
        return f"Faster, but too tight to count on: {flip}, {_rate(faster[0])} samples/s, with up to {most} possible."

    def _larger(self, best: Candidate) -> str:
        """Return why the micro-batch is not larger."""
        larger = [one for one in self.looked_at if one.settings in self.space.other_splits(best.settings)]
        too_large = [one for one in larger if not one.fits and one.settings.batch_size > best.settings.batch_size]
        if not too_large:
            return ""
        next_one = min(too_large, key=lambda one: one.settings.batch_size)
        needs = next_one.predicted.in_words(next_one.predicted.high_bytes)
        return f"Micro-batches of {next_one.settings.batch_size} may need {needs}{self._limit}."

    @property
    def _nothing(self) -> str:
        """Return what there is to say where nothing was measured."""
        known = len(self.looked_at) + len(self.refused)
        if any(one.fits for one in self.looked_at) or not self.looked_at:
            reasons = [*(one.failed for one in self.looked_at if one.failed), *self.refused.values()]
            why = f": {reasons[0].rstrip('.')}" if reasons else ""
            return f"Nothing was measured in {self.seconds:.0f} s{why}."
        least = min(self.looked_at, key=lambda one: (one.predicted.lower_bound, one.predicted.high_bytes))
        limit, needs = format_bytes(self.budget_bytes), least.predicted.in_words(least.predicted.high_bytes)
        settings = typed(self.present, least.settings) or "the present settings"
        if known < len(self.space.candidates):
            return (
                f"None of {known} of {len(self.space.candidates)} settings that were looked at in {self.seconds:.0f} s "
                f"fits {limit}; the least of them is {needs}, with {settings}. {self._more_time}"
            )
        helps = f" {self.instead.words(self.present)}" if self.instead else ""
        return f"Nothing fits {limit}: the least is {needs}, the error included, with {settings}.{helps}"

    @property
    def _more_time(self) -> str:
        return f"Give it more time: %hvd_tune --seconds {max(60, round(4 * self.seconds))}."

    @property
    def _limit(self) -> str:
        return f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""

    @property
    def _rows(self) -> list[Candidate]:
        measured = self.measured
        others = [one for one in self.looked_at if one not in measured]
        # Of what ran out of memory it is not known how much it needs: last.
        needs = [(one.predicted.lower_bound, one.predicted.reserved_peak_bytes) for one in others]
        return [*measured, *(one for _, one in sorted(zip(needs, others, strict=True), key=lambda pair: pair[0]))]

    @property
    def shown(self) -> list[Table | str]:
        """Return why these settings, then all that was looked at."""
        return [self.why, *([self._table] if self.looked_at else []), *self._notes]

    @property
    def typed(self) -> str:
        """The best settings as they are typed after ``%hvd_set``; empty where there is nothing to change."""
        return typed(self.present, self.best.settings) if self.best else ""

    @property
    def _table(self) -> Table:
        best, front = self.best, self.pareto()
        signs = {id(one): "Pareto" for one in front}
        if best:
            signs[id(best)] = "best"
        other = any(changes(self.present, one.settings, self.splits) == CHANGES for one in self.looked_at)
        rows = tuple(
            (
                short(self.present, one.settings) or PRESENT,
                signs.get(id(one), one.failed and "failed"),
                _rate(one),
                one.predicted.in_words(one.predicted.reserved_peak_bytes),
                _fit(one),
                str(len(one.rates)),
                *([changes(self.present, one.settings, self.splits)] if other else []),
            )
            for one in self._rows[:_ROWS]
        )
        headings = ("flip", "", "samples/s", "reserved", "fits", "turns", *(["mathematics"] if other else []))
        limit = f" (limit {format_bytes(self.budget_bytes)})" if self.budget_bytes else ""
        return Table(f"Tuning{limit}", headings, rows, frozenset({"flip", "", "fits", "mathematics"}))

    @property
    def _notes(self) -> list[str]:
        more = len(self.looked_at) - _ROWS
        settings = self.space.start
        late = f", for {self.given_s:g} s that were given: one trial took up to {self.longest_s:.1f} s"
        took = f"{self.seconds:.0f} s{late if self.seconds > _LATE * self.given_s else ''}"
        return [
            f"Global batch {settings.samples_per_rank * self.ranks}; {len(self.measured)} of "
            f"{len(self.space.candidates)} combinations were measured by steps that were undone, in "
            f"{took}; ± is the standard error." + (f" {more} more: .frame()." if more > 0 else ""),
            *self._left_out,
        ]

    @property
    def _left_out(self) -> list[str]:
        """Knobs that have no other value, and what no step was possible under: a sentence for each reason."""
        said = [f"Left out: {why}." for why in self.space.idle]
        for why in dict.fromkeys(self.refused.values()):
            settings = [one for one, reason in self.refused.items() if reason == why]
            others = f" and {len(settings) - 1} more" if len(settings) > 1 else ""
            said.append(f"Left out: {arrows(self.present, settings[0]) or PRESENT}{others}: {why.rstrip('.')}.")
        return said


def _clearly_faster(one: Candidate, other: Candidate) -> bool:
    least = max((WORTH - 1) * speed_of(other), math.hypot(one.doubt, other.doubt))
    return speed_of(one) - speed_of(other) > least


def _fit(one: Candidate) -> str:
    said = one.predicted
    if one.tight or one.fits:
        return "tight" if one.tight else "yes"
    return "no" if said.lower_bound else f"no: up to {format_bytes(said.high_bytes)}"


def _rate(one: Candidate) -> str:
    if one.samples_per_s is None:
        return "n/a"
    error = "" if math.isnan(one.error) else f" ± {format_rate(one.error)}"
    return f"{format_rate(one.samples_per_s)}{error}"
