"""Ledgers, timelines and samples made by hand, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from gpumem_nb.shared import categories as c
from gpumem_nb.shared.messages import Ledger, RankInfo, Reading, Sample, Span, Timeline
from gpumem_nb.shared.step_times import FORWARD, REDUCTION, StepTimes

MIB = 2**20
AT_PEAK = {
    c.PARAMETERS: 4 * MIB,
    c.OPTIMIZER_STATE: 8 * MIB,
    c.GRADIENTS: 2 * MIB,
    c.COMMUNICATION: MIB,
    c.INPUTS: MIB,
    c.CASTS: 0,
    c.LOGITS: MIB,
    c.ACTIVATIONS: 20 * MIB,
    c.TEMPORARIES: MIB,
    c.INSIDE_OPERATORS: MIB,
    c.OTHER: MIB,
}


def ledger(scale: float = 1.0, **changed: int) -> Ledger:
    """40 MiB at the peak, half of them activations, times ``scale``; ``changed`` in MiB by category."""
    sizes = {name: int(size * scale) for name, size in AT_PEAK.items()}
    sizes |= {name.replace("_", " "): size * MIB for name, size in changed.items()}
    rest = {name: size if name in (c.PARAMETERS, c.OPTIMIZER_STATE, c.OTHER) else 0 for name, size in sizes.items()}
    half = sizes[c.ACTIVATIONS] // 2
    modules = (
        ("blocks.3", c.ACTIVATIONS, half),
        ("blocks.2.<conv>", c.ACTIVATIONS, sizes[c.ACTIVATIONS] - half),
        ("head", c.PARAMETERS, sizes[c.PARAMETERS]),
    )
    return Ledger(sum(sizes.values()), "forward", "blocks.3", sizes, rest, modules, virtual=True, exact=True)


def timeline(rank: int = 0) -> Timeline:
    """A step of 10 ms with its peak of 40 MiB after 4 ms."""
    top = ledger()
    times = (0.0, 2.0, 4.0, 6.0, 9.0)
    parts = (0.2, 0.6, 1.0, 0.5, 0.1)
    live = {name: tuple(int(size * part) for part in parts) for name, size in top.at_peak.items()}
    spans = (
        Span(0.0, 3.0, "forward", "blocks.2.<conv>"),
        Span(3.0, 5.0, "forward", "blocks.3"),
        Span(5.0, 8.0, "backward", "blocks.3"),
        Span(8.0, 9.0, "reduction", ""),
        Span(9.0, 10.0, "update", ""),
    )
    return Timeline(rank, 7, 0.010, times, live, spans, top)


def info(rank: int = 0, **changed: Any) -> RankInfo:
    """A virtual GPU of 96 MiB."""
    values: dict[str, Any] = {
        **{"rank": rank, "local_rank": rank, "host": "here", "pid": 1, "device": "cpu", "device_name": "virtual GPU"},
        **{"virtual": True, "memory_limit": 96 * MIB, "threads": 1},
    }
    return RankInfo(**(values | changed))


def reading(peak: int = 40 * MIB, limit: int | None = 96 * MIB) -> Reading:
    """A device whose peak was this."""
    return Reading(13 * MIB, peak, peak + 4 * MIB, peak + 8 * MIB, peak + 4 * MIB, limit)


def waits(reduction_s: float) -> StepTimes:
    """Of a step that waits so long for averaged gradients."""
    return StepTimes.of({FORWARD: 0.1 - reduction_s, REDUCTION: reduction_s}, 0.0)


def sample(step: int, rank: int = 0, recorded: Ledger | None = None, **changed: Any) -> Sample:
    """A step; its peak is its ledger's."""
    peak = recorded.peak_bytes if recorded else 40 * MIB
    values = {
        **{"rank": rank, "step": step, "time_s": step / 10, "loss": 1.0, "step_s": 0.1, "samples_per_s": 320.0},
        **{"live_bytes": 13 * MIB, "live_peak_bytes": peak, "reserved_bytes": peak, "reserved_peak_bytes": peak},
        **{"device_used_bytes": peak, "settings_id": 1, "event": "", "ledger": recorded},
    }
    return Sample(**(values | changed))
