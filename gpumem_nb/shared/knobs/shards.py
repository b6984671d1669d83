"""The knobs that say where the optimizer's state is: shares of it on each rank (ZeRO 1 and 2), or host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..categories import GRADIENTS, OPTIMIZER_STATE, TEMPORARIES
from ..workload import WorkloadInfo
from .knob import HALF, KEEPS, MOST, SOME, Changes, Knob, Need, Settings, carried
from .update import OURS, UNSHARED

OWN = "own"


def _shared(need: Need) -> Iterator[Changes]:
    name = need.settings.optimizer
    able = need.tried_out if name == OWN else name not in ("sgd", *UNSHARED)  # plain SGD has no state
    if need.handles.shards and able and need.settings.shard_optimizer == "off":
        yield {"shard_optimizer": "on"}


ONE_RANK = (
    "shard_optimizer=on frees nothing here: there is one rank, which keeps all of the optimizer's state. Use "
    "shard_optimizer=off."
)


def _whole_alone(value: str, workload: WorkloadInfo | None) -> str:
    return (workload.why_whole or "") if value == "on" and workload else ""


def _looks_at_others(settings: Settings, ranks: int) -> str:
    if settings.shard_optimizer == "off" or settings.optimizer not in UNSHARED:
        return ""
    able = ", ".join(name for name in OURS if name not in UNSHARED)
    return (
        f"shard_optimizer=on cannot be used with optimizer={settings.optimizer}, whose update of one number looks at "
        f"others, which another rank may hold. Use shard_optimizer=off, or optimizer={able}."
    )


SHARD_OPTIMIZER = Knob(
    "shard_optimizer",
    "off",
    "on: each rank keeps the optimizer's state of its share of the weights, and updates that share for all (ZeRO 1)",
    choices=("off", "on"),
    means={
        "off": "every rank keeps all of the optimizer's state",
        "on": "each of N ranks keeps an Nth of it; the same weights, to the bit",
    },
    label="shards",
    short="shards ",
    moves={OPTIMIZER_STATE: HALF, TEMPORARIES: SOME},
    mathematics=KEEPS,
    refuses=_whole_alone,
    conflicts=_looks_at_others,
    adapts=lambda settings, workload: {"shard_optimizer": "off"} if workload.why_whole else {},
    apply=lambda live, settings: live.set_shard_optimizer(settings),
    lighter=_shared,
    saves="each rank keeps its share of the optimizer's state",
    exported=carried,
)


def _needs_shards(settings: Settings, ranks: int) -> str:
    if settings.shard_gradients == "off" or settings.shard_optimizer == "on":
        return ""
    return (
        "shard_gradients=on needs shard_optimizer=on: a rank that updates all of the weights needs all of their "
        "gradients. Set both, or shard_gradients=off."
    )


def _go_together(before: Settings, after: Settings, named: Collection[str], ranks: int) -> Changes:
    """Return what the one that was not named must be for the other."""
    if after.shard_gradients == "off" or after.shard_optimizer == "on":
        return {}
    if "shard_optimizer" not in named:
        return {"shard_optimizer": "on"}
    return {} if "shard_gradients" in named else {"shard_gradients": "off"}


def _gradients_shared(need: Need) -> Iterator[Changes]:
    settings = need.settings
    able = need.tried_out if settings.optimizer == OWN else settings.optimizer not in UNSHARED
    # With several micro-batches whole gradients lie there until the last one.
    if need.handles.shards and able and settings.shard_gradients == "off" and settings.accumulation_steps == 1:
        yield {"shard_optimizer": "on", "shard_gradients": "on"}


SHARD_GRADIENTS = Knob(
    "shard_gradients",
    "off",
    "on: each rank keeps its share of the averaged gradients, as backward makes them (ZeRO 2); with shard_optimizer",
    choices=("off", "on"),
    means={
        "off": "every rank keeps all gradients until the update",
        "on": "each of N ranks keeps an Nth of them; the same weights, to the bit",
    },
    label="gradient shards",
    short="grad shards ",
    moves={GRADIENTS: MOST},
    mathematics=KEEPS,
    refuses=_whole_alone,
    conflicts=_needs_shards,
    settles=_go_together,
    adapts=lambda settings, workload: {"shard_gradients": "off"} if workload.why_whole else {},
    lighter=_gradients_shared,
    saves="each rank keeps its share of the averaged gradients",
    exported=carried,
    left_out=lambda value, ddp: "every rank of a script keeps whole gradients" if value == "on" else "",
)


def _state_offloaded(need: Need) -> Iterator[Changes]:
    name = need.settings.optimizer
    able = need.tried_out if name == OWN else name != "sgd"  # which has no state
    if need.handles.offloads and able and need.settings.offload_optimizer == "off":
        yield {"offload_optimizer": "on"}


OFFLOAD_OPTIMIZER = Knob(
    "offload_optimizer",
    "off",
    "where the optimizer's state waits between updates: on the GPU, or in host memory",
    choices=("off", "on"),
    means={
        "off": "on the GPU",
        "on": "in host memory; a piece at a time is on the GPU for its update; the same weights, to the bit",
    },
    label="state offload",
    short="state offload ",
    moves={OPTIMIZER_STATE: MOST},
    mathematics=KEEPS,
    apply=lambda live, settings: live.set_offload_optimizer(settings),
    lighter=_state_offloaded,
    saves="the optimizer's state waits in host memory",
    exported=carried,
)
