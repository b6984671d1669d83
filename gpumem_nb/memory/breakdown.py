"""What a peak is made of: by category, by module, and over the parts of a recorded step, as tables."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..sample import Ledger, Span, Timeline
from .categories import CATEGORIES, MEANING
from .tables import Table
from .units import format_bytes

UNEXPLAINED = "not explained"
WITHOUT_MODULE = "(no module)"
MOST_ROWS = 20
MOST_RANKS = 8


def not_explained(ledger: Ledger) -> int:
    """Bytes of the peak that are in no category."""
    return ledger.peak - sum(ledger.at_peak.values())


def place(ledger: Ledger) -> str:
    """Where in the step the peak was, such as ``forward of blocks.3``."""
    return f"{ledger.phase} of {ledger.module}" if ledger.module else ledger.phase


def share(size: int, of: int) -> str:
    """A part in percent; ``n/a`` of nothing."""
    return f"{size / of:.1%}".replace("%", " %") if of else "n/a"


def category_table(rank: int, ledger: Ledger) -> Table:
    """Category, bytes, share and meaning, in stacking order from top to bottom, of what is there."""
    rows = [
        (name, format_bytes(ledger.at_peak[name]), share(ledger.at_peak[name], ledger.peak), MEANING[name])
        for name in reversed(CATEGORIES)
        if ledger.at_peak.get(name)
    ]
    if missing := not_explained(ledger):
        rows.append((UNEXPLAINED, format_bytes(missing), share(missing, ledger.peak), "in no category"))
    headings = ("category", "at the peak", "share", "what it is")
    return Table(_title(rank, ledger), headings, tuple(rows), frozenset({"category", "what it is"}))


def ranks_by_category(worst_first: Mapping[int, Ledger]) -> Table:
    """A column for each rank; of many ranks for the worst, the median and the best."""
    shown = {f"rank {rank}": worst_first[rank] for rank in sorted(worst_first)}
    if len(worst_first) > MOST_RANKS:
        ordered = list(worst_first)
        chosen = {"worst": ordered[0], "median": ordered[len(ordered) // 2], "best": ordered[-1]}
        shown = {f"{word}: rank {rank}": worst_first[rank] for word, rank in chosen.items()}

    def row(name: str, sizes: list[int]) -> tuple[str, ...]:
        of = zip(sizes, shown.values(), strict=True)
        return (name, *(f"{format_bytes(size)} {share(size, ledger.peak):>7}" for size, ledger in of))

    rows = [
        row(name, [ledger.at_peak.get(name, 0) for ledger in shown.values()])
        for name in reversed(CATEGORIES)
        if any(ledger.at_peak.get(name) for ledger in shown.values())
    ]
    if any(missing := [not_explained(ledger) for ledger in shown.values()]):
        rows.append(row(UNEXPLAINED, missing))
    rows.append(row("live peak", [ledger.peak for ledger in shown.values()]))
    rows.append(("in", *map(place, shown.values())))
    title = "At the peak of the latest step that was looked into"
    return Table(title, ("category", *shown), tuple(rows), frozenset({"category"}))


def by_module(ledger: Ledger) -> list[tuple[str, str, int]]:
    """The whole peak as ``(module, category, bytes)``, largest first; what belongs to no module under its own name."""
    rest = defaultdict(int, {name: ledger.at_peak.get(name, 0) for name in ledger.at_peak})
    for _, category, size in ledger.modules:
        rest[category] -= size
    if missing := not_explained(ledger):
        rest[UNEXPLAINED] = missing
    without = [(WITHOUT_MODULE, category, size) for category, size in rest.items() if size]
    return sorted([*ledger.modules, *without], key=lambda entry: -entry[2])


def module_table(rank: int, ledger: Ledger) -> Table:
    """Module, category, bytes and share, largest first; the small ones in one row."""
    entries = by_module(ledger)
    shown, small = entries[:MOST_ROWS], entries[MOST_ROWS:]
    rows = [(module, category, format_bytes(size), share(size, ledger.peak)) for module, category, size in shown]
    if small:
        size = sum(entry[2] for entry in small)
        rows.append((f"{len(small)} smaller", "", format_bytes(size), share(size, ledger.peak)))
    headings = ("module", "category", "at the peak", "share")
    return Table(_title(rank, ledger), headings, tuple(rows), frozenset(headings[:2]))


@dataclass(frozen=True, slots=True)
class SpanPeak:
    """A part of a recorded step and the highest live bytes in it."""

    span: Span
    peak: int


def span_peaks(timeline: Timeline) -> list[SpanPeak]:
    """The highest live bytes in each part of a recorded step; between two changes they stay as they are."""
    totals = [sum(at_once) for at_once in zip(*timeline.live.values(), strict=True)]
    found = []
    for span in timeline.spans:
        first = max(0, bisect_right(timeline.time_ms, span.begin_ms) - 1)
        last = max(first + 1, bisect_left(timeline.time_ms, span.end_ms))
        found.append(SpanPeak(span, max(totals[first:last], default=0)))
    return found


def timeline_table(timeline: Timeline) -> Table:
    """The parts of a recorded step in order, with when, how long and how high; of many parts the highest."""
    spans = span_peaks(timeline)
    highest = max(spans, key=lambda entry: entry.peak, default=None)
    kept = {id(entry) for entry in heapq.nlargest(MOST_ROWS, spans, key=lambda entry: entry.peak)}
    rows = [
        (
            f"{entry.span.begin_ms:.1f}",
            f"{entry.span.end_ms - entry.span.begin_ms:.1f}",
            entry.span.phase,
            entry.span.module,
            format_bytes(entry.peak),
            "← peak" if entry is highest else "",
        )
        for entry in spans
        if id(entry) in kept
    ]
    some = f"; the highest {MOST_ROWS} of {len(spans)} parts" if len(spans) > MOST_ROWS else ""
    title = f"Step {timeline.step} of rank {timeline.rank}, {timeline.step_s * 1000:.0f} ms while it was recorded{some}"
    headings = ("from ms", "ms", "phase", "module", "highest live", "")
    return Table(title, headings, tuple(rows), frozenset({"phase", "module", ""}))


def _title(rank: int, ledger: Ledger) -> str:
    kind = " (virtual)" if ledger.virtual else ""
    return f"At the peak of rank {rank}: {format_bytes(ledger.peak)}{kind} in {place(ledger)}"
