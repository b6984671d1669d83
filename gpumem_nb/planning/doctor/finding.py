"""The doctor's findings: the problem, its fix, what the fix saves and costs; and all of them, the worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ...report.bottleneck import Changes
from ...report.differences import NOT_KNOWN, changes, mathematics, typed
from ...report.tables import marked, notes_html
from ...shared.knobs import CHANGES
from ...shared.settings import Settings
from ...shared.units import format_bytes, format_rate
from ...shared.workload import Splits
from ..prediction import Prediction
from .explained import unfolding

PAGE = "gpumem_nb/planning/doctor/findings.md"

STOPS, WRONG, MEMORY, TIME = range(4)
"""Worst first: what stops training, what is wrong with it, memory that could be saved, time that could."""

FIT, ROOM, LESS, FASTER, ANYWAY = "fit", "room", "less", "faster", "anyway"
"""What a flip must bring to be offered: settings that fit, or that leave room besides, less memory, more samples/s, or
nothing that can be told."""

Numbers = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of knobs that fixes a problem.

    Attributes:
        before: the settings from which it was predicted.
        after: those that it leads to.
        changes: the knobs as they are set.
        was: what the present settings need, as predicted.
        will: what it leads to needs.
        now_per_s: the samples/s of now.
        splits: what is known of training its micro-batches in parts.
    """

    before: Settings
    after: Settings
    changes: Changes
    was: Prediction | None = None
    will: Prediction | None = None
    now_per_s: float | None = None
    splits: Splits = NOT_KNOWN

    @property
    def typed(self) -> str:
        """The knobs as they are typed after ``%hvd_set``."""
        return typed(self.before, self.after)

    @property
    def saves_bytes(self) -> int | None:
        """Of the live peak, on the rank with least room; negative for what it takes more; ``None`` if not known."""
        if self.was is None or self.will is None or self.was.lower_bound or self.will.lower_bound:
            return None
        return self.was.live_peak_bytes - self.will.live_peak_bytes

    @property
    def gains_samples_per_s(self) -> float | None:
        """Of all ranks; negative for what it costs."""
        after = self.will.samples_per_s if self.will else None
        return None if self.now_per_s is None or after is None else after - self.now_per_s

    @property
    def changes_mathematics(self) -> bool:
        """Return whether training goes another way with it."""
        return changes(self.before, self.after, self.splits) == CHANGES

    @property
    def mathematics(self) -> str:
        """Return what it does to the mathematics, in words."""
        return mathematics(self.before, self.after, self.splits)

    @property
    def brings(self) -> str:
        """Return what it saves and costs, as predicted, in words."""
        saves, gains = self.saves_bytes, self.gains_samples_per_s
        if self.will is None:
            return "what it needs was not predicted"
        fits = "" if self.will.limit_bytes is None else f"{self.will.verdict}, "
        memory = f"live peak {self.will.in_words(self.will.live_peak_bytes)}"
        if saves:
            memory += f" ({format_bytes(abs(saves))} {'less' if saves > 0 else 'more'})"
        if gains is None:
            return f"predicted: {fits}{memory}, samples/s n/a"
        speed = f"{format_rate(self.will.samples_per_s)} samples/s ({'+' if gains >= 0 else '−'}{_rate(gains)})"
        return f"predicted: {fits}{memory}, {speed}{' if workers keep up' if self.after.num_workers else ''}"

    @property
    def numbers(self) -> dict[str, Any]:
        """The same as columns of a table."""
        return {
            "flip": self.typed,
            "saves_bytes": self.saves_bytes,
            "gains_samples_per_s": self.gains_samples_per_s,
            "mathematics": changes(self.before, self.after, self.splits),
        }


def _rate(value: float) -> str:
    return f"{abs(value):.0f}" if abs(value) >= 10 else f"{abs(value):.1f}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth a word.

    Attributes:
        cause: in a few words, for programs.
        title: a plain sentence, for people; also the heading on the page that explains it.
        level: ``STOPS``, ``WRONG``, ``MEMORY`` or ``TIME``.
        weight: by which the worst of a level comes first: bytes that could be saved, or the share of time.
        sentence: what was found.
        evidence: numbers of this session by name; ``…_bytes`` in bytes, ``share…`` between 0 and 1.
        do: what to do where no knob fixes it, or besides.
        candidates: changes of knobs that may fix it, the mildest first.
        wants: what such a change must bring to be offered.
        flip: the one that is offered.
    """

    cause: str
    title: str
    level: int
    weight: float
    sentence: str
    evidence: Numbers
    do: str = ""
    candidates: tuple[Changes, ...] = field(default=(), repr=False)
    wants: str = ANYWAY
    flip: Flip | None = None

    @property
    def page(self) -> str:
        """Return where it is explained: the file, and the heading in it."""
        words = "".join(letter for letter in self.title.lower() if letter.isalnum() or letter in " -")
        return f"{PAGE}#{words.replace(' ', '-')}"

    @property
    def order(self) -> tuple[float, ...]:
        """Return the sort key of findings, the worst first: memory by the predicted saving, as far as known."""
        saves = self.flip.saves_bytes if self.flip else None
        weight = saves if self.level == MEMORY and saves is not None and self.wants == LESS else self.weight
        return self.level, -weight

    @property
    def measured(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{_name(name)} {_value(name, value)}" for name, value in self.evidence.items())

    @property
    def helps(self) -> str:
        """Return what to do, in words."""
        flip = self.flip
        said = f"%hvd_set {flip.typed}: {flip.brings}; {flip.mathematics}." if flip else ""
        return " ".join(filter(None, (said, self.do)))


def _name(name: str) -> str:
    return name.removesuffix("_bytes").replace("_per_s", "/s").replace("_", " ")


def _value(name: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return "n/a" if value is None else value
    if name.endswith("_bytes"):
        return format_bytes(round(value))
    if name.startswith("share"):
        return f"{100 * value:.0f} %"
    if name.endswith("_per_s"):
        return format_rate(value)
    return f"{round(value):,}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.4g}"


LEVELS = {STOPS: "stops training", WRONG: "wrong", MEMORY: "memory", TIME: "time"}
NOTHING_SEEN = "Nothing was found in what could be looked at:"
NOTHING = "Nothing found: memory, time, mathematics and surroundings of this session are as they should be."
_CARD = (
    "border-left: 5px solid {colour}; padding: 2px 10px; margin: 6px 0; color: var(--jp-ui-font-color1, inherit); "
    "background: var(--jp-layout-color2, transparent)"
)
_QUIET = "color: var(--jp-ui-font-color2, inherit)"
# Okabe and Ito's palette, as the panel's; the level is told in words too.
COLOURS = {STOPS: "#D55E00", WRONG: "#D55E00", MEMORY: "#E69F00", TIME: "#0072B2"}


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a session as it is.

    Attributes:
        findings: what stops training comes first, then what is wrong with it, then memory that could be saved (most
            bytes first), then time (the largest share of a step first).
        notes: what could not be looked at, and why.
        came: what the latest flip did, beside what had been predicted of it; empty if it was not predicted.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    came: str = ""

    @property
    def headline(self) -> str:
        """Return how much was found, in words."""
        count = len(self.findings)
        return (
            f"{count} finding{'s, the worst first' if count > 1 else ''}:"
            if count
            else NOTHING_SEEN
            if self.notes
            else NOTHING
        )

    @property
    def summary(self) -> str:
        """Return what was found, and the flips that would fix it, in a sentence each."""
        said = [f"{one.title}{f' (%hvd_set {one.flip.typed})' if one.flip else ''}." for one in self.findings]
        return " ".join(said or [self.headline if not self.notes else f"{NOTHING_SEEN} {' '.join(self.notes)}"])

    def frame(self) -> Any:
        """Return a pandas DataFrame, one row per finding, the worst first; bytes and samples/s are predicted."""
        import pandas as pd  # takes long to import

        columns = ("flip", "saves_bytes", "gains_samples_per_s", "mathematics")
        rows = [
            {
                "cause": one.cause,
                "title": one.title,
                "level": LEVELS[one.level],
                "sentence": one.sentence,
                "evidence": dict(one.evidence),
                **(one.flip.numbers if one.flip else dict.fromkeys(columns)),
                "do": one.do,
                "page": one.page,
            }
            for one in self.findings
        ]
        return pd.DataFrame(rows, columns=["cause", "title", "level", "sentence", "evidence", *columns, "do", "page"])

    def __str__(self) -> str:
        lines = [self.headline]
        for number, one in enumerate(self.findings, start=1):
            lines += [
                "",
                f"{number}. {one.title} ({LEVELS[one.level]}): {one.sentence}",
                f"   measured: {one.measured}",
            ]
            lines += [f"   what helps: {one.helps}"] if one.helps else []
            lines += [f"   more: {one.page}"]
        after = [*([self.came] if self.came else []), *self.notes]
        return "\n".join([*lines, *([""] if self.findings and after else []), *after])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cards = "".join(f"<li>{card(one)}{_helps(one)}</li>" for one in self.findings)
        after: Sequence[str] = [*([self.came] if self.came else []), *self.notes]
        return f"{notes_html([self.headline])}<ol style='padding-left: 2em'>{cards}</ol>{notes_html(after)}"


def card(one: Finding) -> str:
    """Return what was found and measured, as HTML."""
    level = f"<small style='{_QUIET}'>({LEVELS[one.level]})</small>"
    return (
        f"<div style='{_CARD.format(colour=COLOURS[one.level])}'>"
        f"<b>{escape(one.title)}</b> {level}<br>{marked(one.sentence)}<br>"
        f"<small style='{_QUIET}'>measured: {marked(one.measured)}</small>"
        f"<small>{unfolding(one.title, one.page)}</small></div>"
    )


def _helps(one: Finding) -> str:
    return f"<p style='margin: 2px 15px'>{marked(one.helps)}</p>" if one.helps else ""
