"""What NVML says about the ranks' devices, as a table, and why something is missing, as sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..shared.messages import DeviceUse
from ..shared.ranklist import name_ranks
from ..shared.units import format_bytes
from .tables import Table

# Fields of DeviceUse for people.
_WORDS = {
    "used_bytes": "used",
    "total_bytes": "total",
    "own_bytes": "own",
    "other_bytes": "others",
    "utilisation_percent": "utilisation",
    "temperature_c": "temperature",
    "power_w": "power",
    "clock_mhz": "clock",
}


def device_table(uses: Sequence[tuple[int, int | None, DeviceUse]]) -> Table:
    """A row for each rank with NVML's account of its device; ``uses``: rank, reserved bytes, what NVML said."""
    headings = (
        *("rank", "device used", "this process", "context, libraries", "other processes", "not explained"),
        *("utilisation", "temperature", "power", "clock"),
    )
    rows = tuple(
        (
            str(rank),
            *map(format_bytes, (use.used_bytes, use.own_bytes, _less(use.own_bytes, reserved), use.other_bytes)),
            format_bytes(_less(use.used_bytes, use.own_bytes, use.other_bytes)),
            _with_unit(use.utilisation_percent, " %"),
            _with_unit(use.temperature_c, " °C"),
            _with_unit(use.power_w, " W"),
            _with_unit(use.clock_mhz, " MHz"),
        )
        for rank, reserved, use in uses
    )
    return Table("The devices, as NVML sees them", headings, rows, frozenset({"rank"}))


def reasons(uses: Sequence[tuple[int, DeviceUse]]) -> tuple[str, ...]:
    """One sentence for each reason why something could not be read, naming what and for which ranks."""
    lacking: dict[str, tuple[dict[str, None], dict[int, None]]] = defaultdict(lambda: ({}, {}))
    for rank, use in uses:
        for field, why in use.missing.items():
            fields, ranks = lacking[why]
            fields[_WORDS.get(field, field)] = None
            ranks[rank] = None
    return tuple(
        f"n/a: {', '.join(fields)} of {name_ranks(list(ranks))}: {why.rstrip('.')}."
        for why, (fields, ranks) in lacking.items()
    )


def _less(of: int | None, *parts: int | None) -> int | None:
    """What is left; ``None`` when any part is not known."""
    if of is None:
        return None
    known = [part for part in parts if part is not None]
    return of - sum(known) if len(known) == len(parts) else None


def _with_unit(value: float | None, unit: str) -> str:
    return "n/a" if value is None else f"{value:.0f}{unit}"
