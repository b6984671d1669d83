"""What must hold for every record that was measured on a GPU; needs none itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpumem_nb.memory.virtual_gpu.gpu import replay

from .record import FORMAT

# What the model of the caching allocator may be off by; it knows one stream and no expandable segments.
RESERVED_TOLERANCE = 0.005
# Of the peak: what the allocator may round up by, which is in no category.
ROUNDING = 0.1


def problems(record: Mapping[str, Any]) -> list[str]:
    """What does not hold, each with the place where."""
    if record["format"] != FORMAT:
        return [f"format {record['format']} is not {FORMAT}: measure again"]
    return [
        f"cell {number} ({cell['workload']}): {problem}"
        for number, cell in enumerate(record["cells"])
        if cell["outcome"] == "ok"
        for problem in [*_of_figures(cell), *_of_trace(cell)]
    ]


def _of_figures(cell: Mapping[str, Any]) -> Iterator[str]:
    if not cell["samples_per_s"] > 0:
        yield f"{cell['samples_per_s']} samples/s"
    for rank, figures in enumerate(cell["per_rank"]):
        live, reserved = figures["live_peak_bytes"], figures["reserved_peak_bytes"]
        if not 0 < live <= reserved:
            yield f"rank {rank}: live peak {live}, reserved peak {reserved}"
        device = figures["device"] or {}
        own, used, total = device.get("own_bytes"), device.get("used_bytes"), device.get("total_bytes")
        parts = [part for part in (own, used, total) if part is not None]
        if parts != sorted(parts):
            yield f"rank {rank}: own {own}, used {used}, total {total}"
        if ledger := figures["ledger"]:
            peak, known = ledger["peak_bytes"], sum(ledger["at_peak"].values())
            if not 0 <= peak - known <= ROUNDING * peak:
                yield f"rank {rank}: the categories add up to {known}, not to {peak} less rounding"
            if peak > live:
                yield f"rank {rank}: the ledger's peak {peak} is above the live peak {live}"


def _of_trace(cell: Mapping[str, Any]) -> Iterator[str]:
    trace = cell["trace"]
    if trace is None:
        return
    modelled = replay(trace["events"])
    if modelled.live_bytes != trace["requested_bytes"]:
        yield f"the trace ends with {modelled.live_bytes} bytes held, torch with {trace['requested_bytes']}"
    off = abs(modelled.reserved_bytes - trace["reserved_bytes"]) / trace["reserved_bytes"]
    if off > RESERVED_TOLERANCE:
        yield f"the model reserves {modelled.reserved_bytes}, torch {trace['reserved_bytes']} ({off:.1%} apart)"
