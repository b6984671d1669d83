"""The knobs of the update, and of how the learning rate goes with the global batch and with the steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec

from ..categories import INSIDE_OPERATORS, OPTIMIZER_STATE, TEMPORARIES
from ..values import not_negative, positive, whole, whole_or_0
from ..version import torch_version
from ..workload import WorkloadInfo
from .knob import CHANGES, HALF, KEEPS, KEEPS_TO_ROUNDING, MOST, Changes, Knob, Need, Settings, carried

_OWN = "own"
OURS = ("sgd", "momentum", "adam", "adamw", "adamw8bit", "adafactor", "muon")
_USEOURS = f"Use optimizer={', '.join(OURS[:-1])} or {OURS[-1]}."
_LACKS = {"adafactor": ("fused",), "adamw8bit": ("foreach", "fused", "loop")}
UNSHARED = ("adamw8bit", "adafactor", "muon")  # whose update of a number looks at others
NO_8_BIT = "optimizer=adamw8bit is that of bitsandbytes, which is not installed. Install it: %pip install bitsandbytes"
NO_MUON = (
    "optimizer=muon is torch.optim.Muon, which torch has from 2.9 on. Install a newer torch and start the ranks again, "
    "or use optimizer=adamw."
)
_LESS_STATE = {
    **dict.fromkeys(("adam", "adamw"), ("adamw8bit", "muon", "adafactor", "momentum", "sgd")),
    "adamw8bit": ("adafactor", "sgd"),
    "muon": ("adafactor", "momentum", "sgd"),
    "adafactor": ("sgd",),
    "momentum": ("adafactor", "sgd"),
}


def brings_none(workload: str) -> str:
    """Return why this workload cannot be trained with its own optimizer, and what can be used."""
    return f"{workload} brings no optimizer of its own. {_USEOURS}"


def no_matrices(model: str) -> str:
    """Return why Muon has nothing to do in this model, and what can be used."""
    return (
        f"optimizer=muon is for hidden matrices, and {model} trains none: embeddings, the output layer and what does "
        "not have two dimensions are left to AdamW. Use optimizer=adamw."
    )


def _less_state(need: Need) -> Iterator[Changes]:
    # How much an own optimizer remembers is known only when another one is tried.
    others = _LESS_STATE["adam"] if need.tried_out else ()
    for name in others if need.settings.optimizer == _OWN else _LESS_STATE.get(need.settings.optimizer, ()):
        shared = need.settings.shard_optimizer == "on" and name in UNSHARED
        if _refuses(name, None) or shared or (name == "muon" and not need.handles.matrices):
            continue
        lacks = need.settings.optimizer_impl in _LACKS.get(name, ())
        yield {"optimizer": name} | ({"optimizer_impl": "default"} if lacks else {})


def _in_place(need: Need) -> Iterator[Changes]:
    # Fused updates work in place; all others take copies of what they update. An own optimizer may lack them.
    name = need.settings.optimizer
    usable = need.tried_out if name == _OWN else name not in _LACKS
    if need.of_update and usable and need.settings.optimizer_impl != "fused":
        yield {"optimizer_impl": "fused"}


def _has_no_kernel(settings: Settings, ranks: int) -> str:
    lacks = _LACKS.get(settings.optimizer, ())
    if settings.optimizer_impl not in lacks:
        return ""
    *others, last = [one for one in OPTIMIZER_IMPL.choices if one not in lacks]
    return (
        f"There is no {settings.optimizer} with optimizer_impl={settings.optimizer_impl}. "
        f"Use optimizer_impl={', '.join(others) + ' or ' if others else ''}{last}."
    )


def _as_it_has(before: Settings, after: Settings, named: Collection[str], ranks: int) -> Changes:
    """Return torch's default for another optimizer that lacks the kernels of the one before it."""
    kept = before.optimizer_impl == after.optimizer_impl and "optimizer_impl" not in named
    return {"optimizer_impl": "default"} if kept and _has_no_kernel(after, ranks) else {}


def _refuses(name: str, workload: WorkloadInfo | None) -> str:
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        return NO_8_BIT
    if name == "muon":
        lacks = no_matrices(workload.name) if workload and not workload.matrices else ""
        return NO_MUON if torch_version() < (2, 9) else lacks
    if name != _OWN or (workload and workload.own_optimizer):
        return ""
    return brings_none(workload.name) if workload else f"Nothing is loaded. {_USEOURS}"


def _adapts(settings: Settings, workload: WorkloadInfo) -> Changes:
    if workload.own_optimizer:
        return {"optimizer": _OWN, "optimizer_impl": "default", "learning_rate": workload.own_learning_rate}
    if settings.optimizer == _OWN:
        return {"optimizer": OPTIMIZER.default, "learning_rate": LEARNING_RATE.default}
    if settings.optimizer == "muon" and not workload.matrices:
        return {"optimizer": OPTIMIZER.default}
    return {}


OPTIMIZER = Knob(
    "optimizer",
    "adamw",
    "update rule; 'own' is the workload's, if it brings one. A flip begins without state, but for those back to 'own' "
    "and between adamw and adamw8bit",
    in_front=True,
    choices=(*OURS, _OWN),
    means={
        "sgd": "keeps nothing beside the weights",
        "momentum": "SGD with a mean of earlier gradients: one more copy of the weights",
        "adam": "two means for each weight: two more copies",
        "adamw": "Adam with weight decay of its own: two more copies",
        "adamw8bit": "AdamW whose means have 8 bits each: half a copy (bitsandbytes)",
        "adafactor": "a row and a column for each matrix; learning_rate is relative to the size of the weights",
        "muon": "one mean for each number of a hidden matrix, and orthogonal updates; AdamW for all other weights",
        _OWN: "the one that the workload brings",
    },
    short="",
    moves={OPTIMIZER_STATE: MOST},
    apply=lambda live, settings: live.set_optimizer(settings),
    lighter=_less_state,
    saves="it remembers less of each weight",
    refuses=_refuses,
    adapts=_adapts,
    exported=carried,
)

OPTIMIZER_IMPL = Knob(
    "optimizer_impl",
    "default",
    "how torch computes the update: its default, foreach (fast, one extra copy), fused, or a plain loop",
    choices=("default", "foreach", "fused", "loop"),
    means={
        "default": "what torch chooses",
        "foreach": "many weights at once, with a copy of them for a moment",
        "fused": "one kernel for all, in place",
        "loop": "one weight after the other: slow, least memory",
    },
    short="",
    moves={TEMPORARIES: HALF, INSIDE_OPERATORS: HALF},
    mathematics=KEEPS_TO_ROUNDING,
    conflicts=_has_no_kernel,
    settles=_as_it_has,
    apply=lambda live, settings: live.set_optimizer_impl(settings.optimizer_impl),
    lighter=_in_place,
    saves="the update takes no copies of the weights",
    exported=carried,
)


LEARNING_RATE = Knob(
    "learning_rate",
    1e-3,
    "step size of the update; what a cell or own scheduler sets holds until this changes",
    parse=not_negative,
    allowed="a number of at least 0, such as 1e-3",
    write=lambda rate: str(float(f"{rate:.12g}")),  # a schedule's 1.4999999999999999e-05 is 1.5e-05
    short="lr ",
    apply=lambda live, settings: live.set_learning_rate(settings),
    exported=carried,
)


CLIP_NORM = Knob(
    "clip_norm",
    None,
    "largest allowed 2-norm of all gradients together, or none",
    parse=positive,
    allowed="a number above 0, such as 1.0, or none",
    words={"none": None},
    short="clip ",
    exported=carried,
)


_NO_OWN = "Use lr_schedule=constant, cosine or linear."


def _chosen_for(before: Settings, after: Settings, named: Collection[str], ranks: int) -> Changes:
    """Return the batch that learning_rate was chosen for: that of the moment in which either was set."""
    if after.lr_scaling == "none":
        switched_off = before.lr_scaling != "none" and "reference_batch" not in named
        return {"reference_batch": None} if switched_off else {}
    if after.reference_batch is not None and ("reference_batch" in named or "learning_rate" not in named):
        return {}
    of_after = "learning_rate" in named or "reference_batch" in named
    return {"reference_batch": (after if of_after else before).samples_per_rank * ranks}


def _refuses_schedule(name: str, workload: WorkloadInfo | None) -> str:
    if name != "own" or (workload and workload.own_scheduler):
        return ""
    what = f"{workload.name} brings no scheduler of its own" if workload else "Nothing is loaded"
    return f"lr_schedule=own cannot be used: {what}. {_NO_OWN}"


def _adapts_schedule(settings: Settings, workload: WorkloadInfo) -> Changes:
    if workload.own_scheduler:
        return {"lr_schedule": "own", "warmup_steps": 0, "lr_scaling": "none", "reference_batch": None}
    return {"lr_schedule": "constant"} if settings.lr_schedule == "own" else {}


def _conflicts(settings: Settings, ranks: int) -> str:
    name, warmup, steps = settings.lr_schedule, settings.warmup_steps, settings.schedule_steps
    if name == "own":
        besides = [f"warmup_steps={warmup}"] if warmup else []
        besides += [f"lr_scaling={settings.lr_scaling}"] if settings.lr_scaling != "none" else []
        if not besides:
            return ""
        return (
            f"{besides[0]} cannot be used with lr_schedule=own, which leaves the rate to the workload's scheduler. "
            "Use lr_schedule=constant, cosine or linear, or go to lr_schedule=own with warmup_steps=0 lr_scaling=none."
        )
    if name == "constant":
        return ""
    if steps is None:
        return (
            f"lr_schedule={name} needs a length: set schedule_steps with it, the steps until the rate is 0, "
            f"for example lr_schedule={name} schedule_steps=1000."
        )
    if warmup >= steps:
        return (
            f"warmup_steps={warmup} leaves nothing of schedule_steps={steps}, which counts the warm-up too. "
            f"Allowed here: warmup_steps up to {steps - 1}."
        )
    return ""


def _of_length(before: Settings, after: Settings) -> str:
    """A schedule without an end has no length."""
    endless = ("constant", "own")
    return KEEPS if before.lr_schedule in endless and after.lr_schedule in endless else CHANGES


LR_SCALING = Knob(
    "lr_scaling",
    "none",
    "learning_rate times the global batch over reference_batch (linear), or times the root of that (sqrt)",
    choices=("none", "linear", "sqrt"),
    means={
        "none": "learning_rate as it is",
        "linear": "twice the batch, twice the rate",
        "sqrt": "four times the batch, twice the rate",
    },
    short="lr scaling ",
    exported=carried,
)

REFERENCE_BATCH = Knob(
    "reference_batch",
    None,
    "global batch that learning_rate is meant for; set by itself when lr_scaling is switched on or learning_rate set",
    parse=whole,
    allowed="a whole number of at least 1, such as 256, or none",
    words={"none": None},
    short="for batch ",
    mathematics=lambda before, after: KEEPS if before.lr_scaling == after.lr_scaling == "none" else CHANGES,
    settles=_chosen_for,
    exported=carried,
)

WARMUP_STEPS = Knob(
    "warmup_steps",
    0,
    "steps over which the learning rate grows to its full value, from the step after this is set",
    parse=whole_or_0,
    allowed="a whole number of at least 0, such as 100",
    short="warm-up ",
    exported=carried,
)

LR_SCHEDULE = Knob(
    "lr_schedule",
    "constant",
    "constant (learning_rate, until a cell sets another), cosine or linear to 0 over schedule_steps; own: the "
    "workload's scheduler, which rests under all others",
    choices=("constant", "cosine", "linear", "own"),
    means={
        "constant": "the same rate until it is changed",
        "cosine": "falls slowly, fast, slowly to 0 over schedule_steps",
        "linear": "falls evenly to 0 over schedule_steps",
        "own": "the workload's scheduler",
    },
    short="",
    refuses=_refuses_schedule,
    adapts=_adapts_schedule,
    conflicts=_conflicts,
    exported=carried,
)

SCHEDULE_STEPS = Knob(
    "schedule_steps",
    None,
    "steps of lr_schedule=cosine and linear from their first to rate 0, warm-up included",
    parse=whole,
    allowed="a whole number of at least 1, such as 1000, or none",
    words={"none": None},
    short="over ",
    mathematics=_of_length,
    exported=carried,
)
