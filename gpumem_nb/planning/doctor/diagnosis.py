"""The doctor's findings, the worst first: as objects, as a table, in words and for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...report.tables import notes_html
from .finding import MEMORY, STOPS, TIME, WRONG, Finding

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
    def healthy(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings

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

    def frame(self) -> Any:
        """Return a pandas DataFrame, one row per finding, the worst first; bytes and samples/s are predicted."""
        import pandas as pd  # takes long to import

        columns = ("flip", "saves_bytes", "gains_samples_per_s", "mathematics")
        rows = [
            {
                "cause": one.cause,
                "level": LEVELS[one.level],
                "sentence": one.sentence,
                "evidence": dict(one.evidence),
                **(one.flip.numbers if one.flip else dict.fromkeys(columns)),
                "do": one.do,
                "page": one.page,
            }
            for one in self.findings
        ]
        return pd.DataFrame(rows, columns=["cause", "level", "sentence", "evidence", *columns, "do", "page"])

    def __str__(self) -> str:
        lines = [self.headline]
        for number, one in enumerate(self.findings, start=1):
            lines += [
                "",
                f"{number}. {one.cause} ({LEVELS[one.level]}): {one.sentence}",
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
        f"<b>{escape(one.cause)}</b> {level}<br>{escape(one.sentence)}<br>"
        f"<small style='{_QUIET}'>measured: {escape(one.measured)}; more: <code>{escape(one.page)}</code></small></div>"
    )


def _helps(one: Finding) -> str:
    return f"<p style='margin: 2px 15px'>{escape(one.helps)}</p>" if one.helps else ""
