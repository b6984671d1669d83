"""NVML's readings of the ranks' devices as a table, and a sentence for each missing one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..shared.messages import DeviceUse
from ..shared.ranklist import name_ranks
from ..shared.readings import METRICS, Metric
from ..shared.units import format_bytes
from .tables import Table

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
            *(_in_words(metric, use) for metric in columns),
        )
        for rank, reserved, use in uses
    )
    headings = ("rank", *account, *(metric.word for metric in columns))
    return Table("The devices, as NVML sees them", headings, rows, frozenset({"rank"}), hints=_hints(columns))


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


def _in_words(metric: Metric, use: DeviceUse) -> str:
    value = getattr(use, metric.name)
    if metric.unit == "B":
        return format_bytes(value)
    return "n/a" if value is None else f"{value:.0f} {metric.unit}"


def _hints(columns: Sequence[Metric]) -> dict[str, str]:
    """Return what is said of a heading while the mouse is over it."""
    account = {"device used": "used_bytes", "this process": "own_bytes", "other processes": "other_bytes"}
    hints = {heading: METRICS[name].help for heading, name in account.items()}
    return hints | {metric.word: metric.help for metric in columns}
