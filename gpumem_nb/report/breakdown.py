"""Tables of the memory report: a peak by category, by module and over a recorded step, and what NVML reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..shared.categories import CATEGORIES, MEANING
from ..shared.messages import DeviceUse, Ledger, Span, Timeline
from ..shared.readings import METRICS, Metric
from ..shared.units import format_bytes, format_duration, name_ranks
from .tables import Table

UNEXPLAINED = "not explained"
WITHOUT_MODULE = "(no module)"
_NAMES = {"": "(the loss, the model itself)", "…": "(smaller ones)"}  # of modules in a ledger
MOST_ROWS = 20
MOST_RANKS = 8
MOST_PARTS = 40  # of a recorded step
_TOO_SHORT = 0.01  # of a step, for a part of its own


def not_explained(ledger: Ledger) -> int:
    """Bytes of the peak that are in no category."""
    return ledger.peak_bytes - sum(ledger.at_peak.values())


def place(ledger: Ledger) -> str:
    """Return where in the step the peak was, such as ``forward of blocks.3``."""
    return f"{ledger.phase} of {ledger.module}" if ledger.module else ledger.phase


def share(size: int, of: int) -> str:
    """Return a part in percent; ``n/a`` when the whole is 0."""
    return f"{size / of:.1%}".replace("%", " %") if of else "n/a"


def category_table(rank: int, ledger: Ledger) -> Table:
    """Return each category present, with its bytes, share and meaning, in stacking order from top to bottom."""
    rows = [
        (name, format_bytes(ledger.at_peak[name]), share(ledger.at_peak[name], ledger.peak_bytes), MEANING[name])
        for name in reversed(CATEGORIES)
        if ledger.at_peak.get(name)
    ]
    if missing := not_explained(ledger):
        rows.append((UNEXPLAINED, format_bytes(missing), share(missing, ledger.peak_bytes), "in no category"))
    headings = ("category", "at the peak", "share", "what it is")
    return Table(_title(rank, ledger), headings, tuple(rows), frozenset({"category", "what it is"}))


def ranks_by_category(worst_first: Mapping[int, Ledger]) -> Table:
    """Return a column for each rank; of many ranks for the worst, the median and the best."""
    shown = {f"rank {rank}": worst_first[rank] for rank in sorted(worst_first)}
    if len(worst_first) > MOST_RANKS:
        ordered = list(worst_first)
        chosen = {"worst": ordered[0], "median": ordered[len(ordered) // 2], "best": ordered[-1]}
        shown = {f"{word}: rank {rank}": worst_first[rank] for word, rank in chosen.items()}

    def row(name: str, sizes: list[int]) -> tuple[str, ...]:
        of = zip(sizes, shown.values(), strict=True)
        return (name, *(f"{format_bytes(size)} {share(size, ledger.peak_bytes):>7}" for size, ledger in of))

    rows = [
        row(name, [ledger.at_peak.get(name, 0) for ledger in shown.values()])
        for name in reversed(CATEGORIES)
        if any(ledger.at_peak.get(name) for ledger in shown.values())
    ]
    if any(missing := [not_explained(ledger) for ledger in shown.values()]):
        rows.append(row(UNEXPLAINED, missing))
    rows.append(row("live peak", [ledger.peak_bytes for ledger in shown.values()]))
    rows.append(("in", *map(place, shown.values())))
    title = "At the peak of the latest recorded step"
    return Table(title, ("category", *shown), tuple(rows), frozenset({"category"}))


def by_module(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return the whole peak as ``(module, category, bytes)``, largest first; ``(no module)`` for what has none."""
    rest = defaultdict(int, {name: ledger.at_peak.get(name, 0) for name in ledger.at_peak})
    for _, category, size in ledger.modules:
        rest[category] -= size
    if missing := not_explained(ledger):
        rest[UNEXPLAINED] = missing
    without = [(WITHOUT_MODULE, category, size) for category, size in rest.items() if size]
    named = [(_NAMES.get(module, module), category, size) for module, category, size in ledger.modules]
    return sorted([*named, *without], key=lambda entry: -entry[2])


def by_outer_module(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Bytes by module and category; inner modules count with their parents where there would be too many."""
    entries = by_module(ledger)
    depth = max((module.count(".") + 1 for module, _, _ in entries), default=1)
    while len(found := _by_path(entries, depth)) > MOST_ROWS and depth > 1:
        depth -= 1
    return found


def module_table(rank: int, ledger: Ledger) -> Table:
    """Module, bytes, share and what they are, largest first."""
    rows = [
        (module, format_bytes(sum(sizes.values())), share(sum(sizes.values()), ledger.peak_bytes), _in_words(sizes))
        for module, sizes in sorted(by_outer_module(ledger).items(), key=lambda entry: -sum(entry[1].values()))
    ]
    headings = ("module", "at the peak", "share", "what it is")
    return Table(_title(rank, ledger), headings, tuple(rows), frozenset({"module", "what it is"}))


def _by_path(entries: Iterable[tuple[str, str, int]], depth: int) -> dict[str, dict[str, int]]:
    """Bytes by category and module, whose path is cut to ``depth`` names."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module, category, size in entries:
        found[".".join(module.split(".")[:depth])][category] += size
    return found


def _in_words(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{category} {format_bytes(size)}" for category, size in largest)


def parts(timeline: Timeline, most: int = MOST_PARTS) -> list[Span]:
    """Return the step in few parts: spans of one phase in modules with a common parent are joined, as far as needed."""
    deepest = max((span.module.count(".") + 1 for span in timeline.spans), default=0)
    shortest_ms = timeline.step_s * 1000 * _TOO_SHORT
    found: list[Span] = []
    for depth in range(deepest, -1, -1):
        found = joined(timeline.spans, depth, shortest_ms)
        if len(found) <= most:
            break
    return found


def joined(spans: Sequence[Span], depth: int, shortest_ms: float = 0.0) -> list[Span]:
    """Consecutive spans of one phase and one module are joined; module paths are cut to ``depth`` names."""
    found: list[Span] = []
    for span in spans:
        module = ".".join(span.module.split(".")[:depth])
        last = found[-1] if found else None
        # Before, between and after its children a module runs for a moment itself.
        if last and last.phase == span.phase:
            after = span.end_ms - span.begin_ms < shortest_ms and _is_in(last.module, module)
            before = last.end_ms - last.begin_ms < shortest_ms and _is_in(module, last.module)
            if last.module == module or after or before:
                found[-1] = Span(last.begin_ms, span.end_ms, last.phase, last.module if after else module)
                continue
        found.append(Span(span.begin_ms, span.end_ms, span.phase, module))
    return found


def _is_in(module: str, outer: str) -> bool:
    return not outer or f"{module}.".startswith(f"{outer}.")


def highest(timeline: Timeline, span: Span) -> int:
    """Return the highest live bytes in a part of a recorded step; they are constant between two changes."""
    first = max(0, bisect_right(timeline.time_ms, span.begin_ms) - 1)
    last = max(first + 1, bisect_left(timeline.time_ms, span.end_ms))
    return max(
        (sum(at_once) for at_once in zip(*(v[first:last] for v in timeline.live_bytes.values()), strict=True)),
        default=0,
    )


def timeline_table(timeline: Timeline) -> Table:
    """Return the parts of a recorded step in order, each with its begin, duration and highest live bytes."""
    peaks = [(span, highest(timeline, span)) for span in parts(timeline)]
    top = max(peaks, key=lambda entry: entry[1], default=None)
    rows = tuple(
        (
            f"{span.begin_ms:.1f}",
            f"{span.end_ms - span.begin_ms:.1f}",
            span.phase,
            span.module,
            format_bytes(peak),
            "← peak" if (span, peak) == top else "",
        )
        for span, peak in peaks
    )
    title = f"Step {timeline.step} of rank {timeline.rank}, {format_duration(timeline.step_s)} while it was recorded"
    headings = ("from ms", "ms", "phase", "module", "highest live", "")
    return Table(title, headings, rows, frozenset({"phase", "module", ""}))


def _title(rank: int, ledger: Ledger) -> str:
    kind = " (virtual)" if ledger.virtual else ""
    return f"At the peak of rank {rank}: {format_bytes(ledger.peak_bytes)}{kind} in {place(ledger)}"


# What the first columns are made of; every other reading has a column of its own.
_ACCOUNT = ("used_bytes", "total_bytes", "own_bytes", "other_bytes")


def device_table(uses: Sequence[tuple[int, int | None, DeviceUse]]) -> Table:
    """Return a row for each rank with NVML's account of its device; ``uses``: rank, reserved bytes, what NVML said."""
    columns = [metric for name, metric in METRICS.items() if name not in _ACCOUNT]
    account = ("device used", "this process", "context, libraries", "other processes", "not explained")
    rows = tuple(
        (
            str(rank),
            *map(format_bytes, (use.used_bytes, use.own_bytes, _less(use.own_bytes, reserved), use.other_bytes)),
            format_bytes(_less(use.used_bytes, use.own_bytes, use.other_bytes)),
            *(_in_unit(metric, use) for metric in columns),
        )
        for rank, reserved, use in uses
    )
    headings = ("rank", *account, *(metric.word for metric in columns))
    named = {"device used": "used_bytes", "this process": "own_bytes", "other processes": "other_bytes"}
    hints = {heading: METRICS[name].help for heading, name in named.items()}
    hints |= {metric.word: metric.help for metric in columns}
    return Table("The devices, as NVML sees them", headings, rows, frozenset({"rank"}), hints=hints)


def reasons(uses: Sequence[tuple[int, DeviceUse]]) -> tuple[str, ...]:
    """Return one sentence for each reason why something could not be read, naming what and for which ranks."""
    lacking: dict[str, tuple[dict[str, None], dict[int, None]]] = defaultdict(lambda: ({}, {}))
    for rank, use in uses:
        for field, why in use.missing.items():
            fields, ranks = lacking[why]
            fields[METRICS[field].word if field in METRICS else field] = None
            ranks[rank] = None
    return tuple(
        f"n/a: {', '.join(fields)} of {name_ranks(list(ranks))}: {why.rstrip('.')}."
        for why, (fields, ranks) in lacking.items()
    )


def _less(of: int | None, *parts: int | None) -> int | None:
    """Return what is left; ``None`` when any part is not known."""
    if of is None:
        return None
    known = [part for part in parts if part is not None]
    return of - sum(known) if len(known) == len(parts) else None


def _in_unit(metric: Metric, use: DeviceUse) -> str:
    value = getattr(use, metric.name)
    if metric.unit == "B":
        return format_bytes(value)
    return "n/a" if value is None else f"{value:.0f} {metric.unit}"
