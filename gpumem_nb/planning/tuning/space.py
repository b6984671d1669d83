"""The settings that a tuner may choose from: the same global batch in every way in which it can be computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...report.differences import NOT_KNOWN, changes
from ...shared.errors import InvalidInput, nearest
from ...shared.forecast import MOST_BATCH
from ...shared.knobs import CHANGES, KNOBS
from ...shared.knobs.step import ACCUMULATION_STEPS, BATCH_SIZE
from ...shared.settings import Settings
from ...shared.units import as_whole
from ...shared.workload import Splits, WorkloadInfo

SPLIT = (BATCH_SIZE.name, ACCUMULATION_STEPS.name)
"""Knobs that change together only, because their product is the samples of a step on one rank."""
TUNED = ("precision", "checkpointing", *SPLIT, "optimizer_impl")
"""The knobs that are tuned if none are named."""
TUNABLE = (
    *TUNED,
    "loss_head",
    "compile",
    "offload_activations",
    "offload_optimizer",
    "optimizer",
    "shard_optimizer",
    "shard_gradients",
)
"""What a few steps that are undone can tell of; autotune takes care of how gradients travel."""
_ONLY_VALUE = {
    "checkpointing": "the model has no blocks to compute again (Workload(blocks=...) would name some)",
    "loss_head": "no linear layer with more outputs than inputs makes the logits",
    "compile": "blocks cannot be compiled here",
    "shard_optimizer": "ranks cannot share the optimizer's state here",
    "shard_gradients": "ranks cannot share gradients here",
    **dict.fromkeys(SPLIT, "one sample of a step on each rank cannot be split (those of a larger global batch can)"),
}
# The budget of the first is one more thing to look for; the second computes as bf16 does, and updates more slowly.
_WHERE_IN_USE = {"selective", "bf16_weights"}
Ask = Callable[[Mapping[str, Any]], Settings]


@dataclass(frozen=True)
class Space:
    """The settings to choose from.

    Attributes:
        start: the present settings, with the global batch that was asked for.
        knobs: names of those that differ among the candidates.
        candidates: every combination that can be used with what is loaded, ``start`` first.
        idle: of each knob that was named and that has no other value, why, without a full stop.
    """

    start: Settings
    knobs: tuple[str, ...]
    candidates: tuple[Settings, ...]
    idle: tuple[str, ...] = ()

    def other_splits(self, settings: Settings) -> tuple[Settings, ...]:
        """Those that differ from these at most in how the batch is split."""
        return tuple(one for one in self.candidates if set(one.changed_from(settings)) <= set(SPLIT))


def space(
    present: Settings,
    workload: WorkloadInfo,
    ranks: int,
    ask: Ask,
    knobs: Iterable[str] | None = None,
    global_batch: int | None = None,
    same_mathematics: bool = True,
    splits: Splits = NOT_KNOWN,
) -> Space:
    """Return the settings to choose from.

    Args:
        present: the settings of the moment.
        workload: what is trained.
        ranks: how many train it.
        ask: returns the settings that setting these knobs now would give; raises ``InvalidInput`` where they cannot
            be used with what is loaded.
        knobs: what may change; by default :data:`TUNED`, as far as they keep the mathematics.
        global_batch: samples of one step of all ranks; by default those of the present settings.
        same_mathematics: whether training must go on as it would have, to rounding, but for another global batch.
        splits: what is known of training micro-batches in parts.

    Raises:
        InvalidInput: a knob that is not tuned or changes the mathematics, named knobs that leave no choice, or a global
            batch that cannot be used.
    """
    names = TUNED if knobs is None else _checked(knobs, workload)
    per_rank = _per_rank(present, ranks, global_batch)
    start = ask(_split_of(present, per_rank, workload))
    values: dict[str, list[Mapping[str, Any]]] = {}
    for name in dict.fromkeys(SPLIT[0] if name in SPLIT else name for name in names):
        usable = [change for change in _values(name, per_rank, workload, start) if _usable(ask, start, change)]
        kept = [change for change in usable if not same_mathematics or _keeps(ask, start, change, splits)]
        if knobs is not None and len(kept) < len(usable):
            raise InvalidInput(
                f"{name} changes the mathematics, which tuning keeps unless it is told otherwise: "
                "%hvd_tune --any-mathematics (same_mathematics=False), or leave it out."
            )
        values[name] = kept
    found = {start: None}
    for chosen in itertools.product(*(choices for choices in values.values() if choices)):
        wanted = {name: value for change in chosen for name, value in change.items()}
        if one := _usable(ask, start, wanted):
            found[one] = None
    candidates = tuple(found)
    differ = tuple(name for name in KNOBS if len({getattr(one, name) for one in candidates}) > 1)
    idle = () if knobs is None else tuple(_idle(name) for name in names if name not in differ)
    if idle and not differ:
        others = space(present, workload, ranks, ask, None, global_batch, same_mathematics, splits).knobs
        more = f"Leave knobs out, or name others: {', '.join(others)}." if others else "Nor has any other knob."
        raise InvalidInput(f"{'; '.join(idle)}. {more}")
    return Space(start, differ, candidates, idle)


def _idle(name: str) -> str:
    return f"{name} has no other value with what is loaded: {_ONLY_VALUE.get(name, 'none can be used')}"


def _checked(knobs: Iterable[str], workload: WorkloadInfo) -> tuple[str, ...]:
    is_list = isinstance(knobs, Iterable) and not isinstance(knobs, str | Mapping)
    given = tuple(knobs) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in given):
        raise InvalidInput(f"knobs={knobs!r} is not a list of names: write knobs=['precision', 'checkpointing'].")
    names = tuple(dict.fromkeys(given))
    if not names:
        raise InvalidInput(f"No knob to tune was named: leave knobs out, or name some of {', '.join(TUNABLE)}.")
    for name in names:
        if name not in TUNABLE:
            hint = " %hvd_set autotune=on looks for how gradients travel fastest." if name in KNOBS else ""
            raise InvalidInput(f"{name!r} is not a knob that can be tuned: {nearest(name, TUNABLE)}.{hint}")
        if name in SPLIT and workload.data.batched:
            raise InvalidInput(f"{name} cannot be tuned: the data bring micro-batches of their own.")
    return names


def _per_rank(present: Settings, ranks: int, global_batch: int | None) -> int:
    """Samples of one step on one rank."""
    if global_batch is None:
        return present.samples_per_rank
    if (samples := as_whole(global_batch, 1)) is None:
        raise InvalidInput(f"global_batch={global_batch!r} cannot be used: write a whole number, such as {64 * ranks}.")
    if samples % ranks:
        near = max(1, round(samples / ranks)) * ranks
        raise InvalidInput(
            f"A global batch of {samples} cannot be split over {ranks} ranks: write a multiple of {ranks}, such as "
            f"{near}."
        )
    if samples // ranks > MOST_BATCH:
        raise InvalidInput(f"A global batch of {samples} is too large: write at most {MOST_BATCH * ranks}.")
    return samples // ranks


def _split_of(present: Settings, per_rank: int, workload: WorkloadInfo) -> dict[str, int]:
    """Return the split of so many samples that is nearest to the present one."""
    most = present.batch_size
    if workload.data.batched:
        if per_rank % most:
            raise InvalidInput(
                f"The data bring micro-batches of {most} samples, of which {per_rank} on a rank are not a whole number."
            )
        return _split(most, per_rank)
    return _split(max(size for size in _divisors(per_rank) if size <= most), per_rank)


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _split(batch_size: int, per_rank: int) -> dict[str, int]:
    return dict(zip(SPLIT, (batch_size, per_rank // batch_size), strict=True))


def _values(name: str, per_rank: int, workload: WorkloadInfo, start: Settings) -> list[Mapping[str, Any]]:
    handles = workload.handles
    lacking = {
        "checkpointing": not handles.blocks,
        "loss_head": not handles.logits,
        "compile": workload.why_uncompiled != "",
        "shard_optimizer": not handles.shards,
        "shard_gradients": not handles.shards,
    }
    if lacking.get(name):
        return []
    if name != SPLIT[0]:
        left_out = _WHERE_IN_USE - {start.checkpointing, start.precision}
        return [{name: value} for value in KNOBS[name].choices if value not in left_out]
    if workload.data.batched:
        return []
    return [_split(size, per_rank) for size in _divisors(per_rank)]


def _usable(ask: Ask, start: Settings, changes: Mapping[str, Any]) -> Settings | None:
    """These settings, unless they cannot be used."""
    try:
        return ask({name: getattr(start, name) for name in SPLIT} | dict(changes))
    except InvalidInput:
        return None


def _keeps(ask: Ask, start: Settings, wanted: Mapping[str, Any], splits: Splits) -> bool:
    after = _usable(ask, start, wanted)
    return after is not None and changes(start, after, splits) != CHANGES
