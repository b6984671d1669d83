"""Rules about memory: what grows, what fills a scarce limit, what is held and not used, what ranks hold unevenly."""

from __future__ import annotations

import math
import re
import statistics

from ....report.advice import ON_SOME_ROWS
from ....report.freed import cells_hold, free_cells, leak_headline, leak_what
from ....report.instead import BESIDES
from ....shared import categories as c
from ....shared.forecast import ERRORS, RECORDED
from ....shared.units import format_bytes
from ...prediction import FITS, NO_LIMIT
from ..evidence import Evidence, OnRank, much_unused
from ..finding import LESS, MEMORY, STOPS, WRONG, Finding
from .limits import SCARCE

_MOST = 1 / 3  # of the peak: the largest category is nearly always above it where one stands out
# Ranks with samples of different lengths differ by some percent from step to step, by less over many steps.
_UNEVEN, _UNEVEN_OF_LIMIT = 0.25, 0.05


def leak(evidence: Evidence) -> Finding | None:
    """Ranks keep more after every step."""
    if not evidence.leaks:
        return None
    fastest = max(evidence.leaks, key=lambda leaks: max(one.bytes_per_step for one in leaks))
    worst = max(fastest, key=lambda one: one.bytes_per_step)
    reading = evidence.ranks[worst.rank].reading
    room = None
    if reading and reading.limit_bytes and evidence.needs and worst.bytes_per_step:
        room = max(0, reading.limit_bytes - evidence.needs.reserved_peak_bytes) // worst.bytes_per_step
    more = f" {len(evidence.leaks) - 1} more: the panel names them." if len(evidence.leaks) > 1 else ""
    return Finding(
        "leak",
        "Memory grows with every step",
        WRONG,
        2,
        f"{leak_headline(fastest)}. {leak_what(fastest[0])}{more}",
        {"per step_bytes": worst.bytes_per_step, "so far_bytes": worst.bytes_so_far, "steps until it is full": room},
        do=fastest[0].fix,
    )


def held_by_cells(evidence: Evidence) -> Finding | None:
    """Variables of cells hold memory: outputs with their graphs always, others where memory is scarce."""
    held = {rank.info.rank: _of_cells(evidence, rank) for rank in evidence.ranks}
    worst = max(held, key=lambda rank: sum(held[rank].values()))
    named, live = held[worst], evidence.ranks[worst].live
    if not named or live is None:
        return None
    size = sum(named.values())
    what, helps = cells_hold(live), free_cells(live)
    reading, needs = evidence.ranks[worst].reading, evidence.needs
    limit = reading.limit_bytes if reading else None
    stops = _runs_out(evidence) and size >= _MOST_OF_LIMIT * (limit or 0)
    return Finding(
        "memory held by cells",
        "Variables of your cells hold memory",
        STOPS if stops else MEMORY,
        _BEFORE_DOES_NOT_FIT if stops else size,
        f"On rank {worst}, {what[:1].lower()}{what[1:]}",
        {
            **{f"{name}_bytes": nbytes for name, nbytes in named.items()},
            **evidence.live_peak(needs.live_peak_bytes if needs else None),
            "limit_bytes": limit,
        },
        do=helps,
    )


_BEFORE_DOES_NOT_FIT = 3.5  # a flip to smaller settings would fix what is not the cause
_MOST_OF_LIMIT = 0.1


def _of_cells(evidence: Evidence, rank: OnRank) -> dict[str, int]:
    """The bytes of a rank's variables that are worth a word; what leaks is a finding of its own."""
    if rank.live is None:
        return {}
    leaking = [one.name for leaks in evidence.leaks for one in leaks]
    scarce = (evidence.share or 0) >= SCARCE or _runs_out(evidence)
    peak = rank.live_peak_bytes or (evidence.needs.live_peak_bytes if evidence.needs else 0)
    return {
        name: nbytes
        for name, nbytes in rank.live.notable.items()
        if (scarce or name in rank.live.with_graph)
        and nbytes >= ERRORS[RECORDED] * peak
        and not any(re.match(rf"{re.escape(name)}\b", one) for one in leaking)
    }


def _runs_out(evidence: Evidence) -> bool:
    oom = evidence.rescue is not None and evidence.rescue.failure.kind == "oom"
    return oom or (evidence.needs is not None and evidence.needs.verdict not in (FITS, NO_LIMIT))


def activations(evidence: Evidence) -> Finding | None:
    """What forward keeps for backward fills a scarce limit."""
    return _dominates(evidence, c.ACTIVATIONS, "activations dominate", "Activations fill most of the memory")


def optimizer_state(evidence: Evidence) -> Finding | None:
    """What the optimizer remembers fills a scarce limit."""
    return _dominates(
        evidence, c.OPTIMIZER_STATE, "optimizer state dominates", "The optimizer's state fills most of the memory"
    )


def communication(evidence: Evidence) -> Finding | None:
    """Horovod's buffer and copies of gradients fill a scarce limit."""
    return _dominates(
        evidence, c.COMMUNICATION, "communication buffers dominate", "Communication buffers fill most of the memory"
    )


def inside_operators(evidence: Evidence) -> Finding | None:
    """What operators take and give back fills a scarce limit."""
    return _dominates(
        evidence, c.INSIDE_OPERATORS, "memory inside operators", "Operators need most of the memory for themselves"
    )


def temporaries(evidence: Evidence) -> Finding | None:
    """Tensors that live for a moment fill a scarce limit."""
    return _dominates(evidence, c.TEMPORARIES, "temporaries dominate", "Short-lived tensors fill most of the memory")


def _dominates(evidence: Evidence, category: str, cause: str, title: str) -> Finding | None:
    needs, share, peak = evidence.needs, evidence.share, evidence.peak
    if needs is None or share is None or peak is None or share < SCARCE or needs.verdict != FITS:
        return None
    cells = max(sum(_of_cells(evidence, rank).values()) for rank in evidence.ranks)
    if needs.limit_bytes and share - cells / needs.limit_bytes < SCARCE:
        return None  # without what cells hold there is room
    size = peak.categories.get(category, 0)
    if peak.largest != category or size < _MOST * peak.bytes:
        return None
    candidates = evidence.lighter(category, peak.phase)
    where = f"{peak.phase} of {peak.module}" if peak.module else peak.phase
    return Finding(
        cause,
        title,
        MEMORY,
        size,
        f"Memory is scarce ({100 * share:.0f} % of {format_bytes(needs.limit_bytes)} is needed), and of the live peak, "
        f"in {where}, {100 * size / peak.bytes:.0f} % is {category}.",
        {
            f"{category}_bytes": size,
            "live_peak_bytes": peak.bytes,
            "reserved_peak_bytes": needs.reserved_peak_bytes,
            "limit_bytes": needs.limit_bytes,
        },
        do=BESIDES.get(category, "" if candidates else "No knob makes it smaller here: a smaller model does."),
        candidates=candidates,
        wants=LESS,
    )


_AT_ONCE = 3  # the logits, the logarithms of their softmax, and the gradient


def logits(evidence: Evidence) -> Finding | None:
    """The loss over many classes fills a scarce limit."""
    facts = next((one.facts for one in evidence.ranks if one.facts and len(one.facts.logits) > 1), None)
    peak, needs = evidence.peak, evidence.needs
    if facts is None or peak is None or needs is None:
        return None
    in_parts = evidence.possible([evidence.settings.replace(loss_head="chunked")])
    size = math.prod(facts.logits) * 4  # the loss is computed in fp32
    scarce = (evidence.share or 0) >= SCARCE or _runs_out(evidence)
    if not scarce or _AT_ONCE * size < _MOST * peak.bytes:
        return None
    return Finding(
        "logits dominate",
        "The logits fill most of the memory",
        MEMORY,
        _AT_ONCE * size,
        f"The loss of a micro-batch takes {'×'.join(f'{one:,}' for one in facts.logits)} logits, {format_bytes(size)} "
        f"in fp32, and holds about {_AT_ONCE} times that: the logits, the logarithms of their softmax, and their "
        "gradient.",
        {"logits_bytes": size, **evidence.live_peak(peak.bytes), "limit_bytes": needs.limit_bytes},
        do=ON_SOME_ROWS,
        candidates=(*in_parts, *(one for one in evidence.lighter(c.ACTIVATIONS, peak.phase) if one not in in_parts)),
        wants=LESS,
    )


def long_samples(evidence: Evidence) -> Finding | None:
    """A few samples are so large that a micro-batch with one of them may not fit, or did not."""
    needs, rescue = evidence.needs, evidence.rescue
    of_step = rescue.failure.sample if rescue and rescue.failure.kind == "oom" else ""
    sample = of_step or (needs.sample if needs else "")
    if not sample:
        return None
    share = needs.high_bytes / needs.limit_bytes if needs and needs.limit_bytes else None
    if not of_step and (share is None or share < SCARCE):
        return None
    said, may, numbers = sample, "", dict[str, float | str | None]()
    if needs is not None and needs.sample and not needs.lower_bound:
        reserved, most = (format_bytes(size) for size in (needs.reserved_peak_bytes, needs.high_bytes))
        may = f" A micro-batch with the largest may need {most}, most others {reserved}."
        numbers = {
            "most_bytes": needs.high_bytes,
            "usual_bytes": needs.reserved_peak_bytes,
            "limit_bytes": needs.limit_bytes,
        }
    fits = not of_step and needs is not None and needs.verdict in (FITS, NO_LIMIT)
    return Finding(
        "long samples",
        "A few samples are much larger than the others",
        MEMORY if fits else STOPS,
        needs.high_bytes - needs.reserved_peak_bytes if fits and needs else _AFTER_BARELY_FITS,
        f"{said}{may}",
        {"step that failed": rescue.step, **numbers} if of_step and rescue else numbers,
        do="Truncate in the dataset or its collate_fn: sample[:N]. Or attach a DataLoader whose batch_sampler sorts by "
        "length, or fills micro-batches up to a number of tokens. Then attach again.",
    )


_AFTER_BARELY_FITS = 0.5


def fragmentation(evidence: Evidence) -> Finding | None:
    """A step reserves far more than it uses, though all that is free is given back before: pieces that nothing fits."""
    needs = evidence.needs
    if needs is None or not evidence.wastes:
        return None
    fits = needs.verdict in (FITS, NO_LIMIT)
    return Finding(
        "fragmentation",
        "Free memory lies in pieces that are too small",
        MEMORY if fits else STOPS,
        needs.reserved_peak_bytes - needs.live_peak_bytes if fits else 1,
        f"A step reserves {format_bytes(needs.reserved_peak_bytes)} for a live peak of "
        f"{format_bytes(needs.live_peak_bytes)}: what was freed lies in pieces "
        "that the next tensors do not fit into, or beside small ones that stay.",
        {
            "reserved_peak_bytes": needs.reserved_peak_bytes,
            "live_peak_bytes": needs.live_peak_bytes,
            "limit_bytes": needs.limit_bytes,
        },
        do="%hvd_restart begins with whole segments. If it comes again, %hvd_memory --what-if says what the caching "
        f"allocator would reserve under other settings.{_expandable(evidence)}",
    )


def _expandable(evidence: Evidence) -> str:
    """Return what segments that grow would bring; nothing where they are in use, or there is no allocator to set."""
    if all(rank.info.virtual or rank.info.allocator.expandable_segments for rank in evidence.ranks):
        return ""
    said = " To have segments that grow, type %env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then %hvd_restart"
    would = evidence.expandable
    return f"{said}: predicted to reserve {format_bytes(would.reserved_peak_bytes)}." if would else f"{said}."


def cached(evidence: Evidence) -> Finding | None:
    """More is reserved than a step needs that begins with an empty cache: earlier settings or cells have left it."""
    needs, known = evidence.needs, [rank for rank in evidence.ranks if rank.reading and rank.samples]
    worst = max(known, key=lambda rank: rank.reading.reserved_bytes if rank.reading else 0, default=None)
    if needs is None or worst is None or worst.reading is None or fragmentation(evidence):
        return None
    held = worst.reading.reserved_bytes
    # The prediction is that of the rank with least room; this one may hold more, in a cell's variables say.
    needed = max(needs.reserved_peak_bytes, worst.live_peak_bytes or 0, worst.reading.live_bytes)
    if not much_unused(held, needed, needs.limit_bytes):
        return None
    return Finding(
        "free memory in the cache",
        "The cache holds memory that training does not need",
        MEMORY,
        held - needed,
        f"Rank {worst.info.rank} reserves {format_bytes(held)}, and its steps need {format_bytes(needed)}: the caching "
        "allocator keeps what earlier settings or cells have used.",
        {"reserved_bytes": held, "needed_bytes": needed, "limit_bytes": needs.limit_bytes},
        do="This process uses it again when it must; for others on the device it is lost. To give it back: "
        "%hvd_memory --free.",
    )


def uneven(evidence: Evidence) -> Finding | None:
    """One rank needs much more than the others: it decides what fits."""
    known = [rank for rank in evidence.ranks if rank.live_peak_bytes]
    worst = max(known, key=lambda rank: rank.live_peak_bytes or 0, default=None)
    others = [rank.live_peak_bytes for rank in evidence.ranks if rank is not worst and rank.live_peak_bytes]
    if worst is None or not others or not worst.live_peak_bytes:
        return None
    usual = statistics.median(others)
    more = worst.live_peak_bytes - usual
    limit = worst.reading.limit_bytes if worst.reading else None
    if more < _UNEVEN * usual or more < _UNEVEN_OF_LIMIT * (limit or 0):
        return None
    category, bytes_more = _difference(evidence, worst)
    where = f", {format_bytes(bytes_more)} more {category}" if category else ""
    held = "Look for tensors that a cell has made on this rank alone: %hvd_memory --by category."
    samples = "Are its samples longer? A sampler that puts like ones together helps."
    return Finding(
        "uneven memory",
        "One rank needs much more memory than the others",
        MEMORY,
        more,
        f"Rank {worst.info.rank} needs {format_bytes(worst.live_peak_bytes)}, the others "
        f"{format_bytes(round(usual))}{where}: it decides what fits.",
        {"live_peak_bytes": worst.live_peak_bytes, "of the others_bytes": usual, "limit_bytes": limit},
        do=samples if category in (c.ACTIVATIONS, c.LOGITS, c.INPUTS, c.TEMPORARIES) else held,
    )


def _difference(evidence: Evidence, worst: OnRank) -> tuple[str, int]:
    """The category of which this rank has most more than another one, and by how much; empty if not known."""
    other = next((rank.ledger for rank in evidence.ranks if rank is not worst and rank.ledger), None)
    if worst.ledger is None or other is None:
        return "", 0
    more = {name: size - other.at_peak.get(name, 0) for name, size in worst.ledger.at_peak.items()}
    category = max(more, key=more.__getitem__)
    return (category, more[category]) if more[category] > 0 else ("", 0)


# A process that only has a CUDA context, a notebook's for one, takes 200 to 700 MB, and a desktop's as much: nothing
# to be alarmed about on a device of which that is little.
_CONTEXT_BYTES, _OF_DEVICE = 700 * 10**6, 0.05


def other_processes(evidence: Evidence) -> Finding | None:
    """Other processes hold memory on a rank's device."""
    held = {rank.info.rank: _others(rank, evidence) for rank in evidence.ranks}
    worst = max(held, key=held.__getitem__)
    use = evidence.ranks[worst].use
    total = use.total_bytes if use else None
    if held[worst] <= max(_CONTEXT_BYTES, _OF_DEVICE * (total or 0)):
        return None
    return Finding(
        "other processes on the device",
        "Other programs hold memory on the GPU",
        MEMORY,
        held[worst],
        f"Other processes hold {format_bytes(held[worst])} on the device of rank {worst}, which its steps lack; they "
        "compute there, too.",
        {
            "others_bytes": held[worst],
            "device_bytes": total,
            "utilisation in %": use.utilisation_percent if use else None,
        },
        do="%hvd_status names them, nvidia-smi in a terminal too. End what is yours, or take other devices "
        "(CUDA_VISIBLE_DEVICES before %hvd_start).",
    )


def _others(rank: OnRank, evidence: Evidence) -> int:
    """Return the bytes that processes other than this session's ranks hold on this rank's device; 0 if not known."""
    if rank.use is None or rank.use.other_bytes is None:
        return 0
    place = (rank.info.host, rank.info.device)
    beside = [one.use for one in evidence.ranks if one is not rank and (one.info.host, one.info.device) == place]
    return int(rank.use.other_bytes) - sum(int(use.own_bytes or 0) for use in beside if use)
