"""The knobs ``optimizer``, ``optimizer_impl`` and ``learning_rate``: the update, applied in this order."""

from __future__ import annotations

from collections.abc import Iterator

from ..categories import INSIDE_OPERATORS, OPTIMIZER_STATE, TEMPORARIES
from ..workload import WorkloadInfo
from .knob import HALF, KEEPS_TO_ROUNDING, MOST, Changes, Knob, LiveModel, Need, Settings, carried
from .option import not_negative, positive

_OWN = "own"
_OURS = ("sgd", "momentum", "adam", "adamw")
_USE_OURS = f"Use optimizer={', '.join(_OURS[:-1])} or {_OURS[-1]}."
_LESS_STATE = {"adam": ("momentum", "sgd"), "adamw": ("momentum", "sgd"), "momentum": ("sgd",)}


def brings_none(workload: str) -> str:
    """Return why this workload cannot be trained with its own optimizer, and what can be used."""
    return f"{workload} brings no optimizer of its own. {_USE_OURS}"


def _set_optimizer(live: LiveModel, settings: Settings) -> None:
    live.set_optimizer(settings)


def _set_implementation(live: LiveModel, settings: Settings) -> None:
    live.set_optimizer_impl(settings.optimizer_impl)


def _set_learning_rate(live: LiveModel, settings: Settings) -> None:
    live.set_learning_rate(settings)


def _less_state(need: Need) -> Iterator[Changes]:
    # How much an own optimizer remembers is known only when another one is tried.
    others = _LESS_STATE["adam"] if need.tried_out else ()
    for name in others if need.settings.optimizer == _OWN else _LESS_STATE.get(need.settings.optimizer, ()):
        yield {"optimizer": name}


def _in_place(need: Need) -> Iterator[Changes]:
    # Fused updates work in place; all others take copies of what they update. An own optimizer may lack them.
    usable = need.settings.optimizer != _OWN or need.tried_out
    if need.of_update and usable and need.settings.optimizer_impl != "fused":
        yield {"optimizer_impl": "fused"}


def _refuses(name: str, workload: WorkloadInfo | None) -> str:
    if name != _OWN or (workload and workload.own_optimizer):
        return ""
    return brings_none(workload.name) if workload else f"Nothing is loaded. {_USE_OURS}"


def _adapts(settings: Settings, workload: WorkloadInfo) -> Changes:
    if workload.own_optimizer:
        return {"optimizer": _OWN, "optimizer_impl": "default", "learning_rate": workload.own_learning_rate}
    if settings.optimizer == _OWN:
        return {"optimizer": OPTIMIZER.default, "learning_rate": LEARNING_RATE.default}
    return {}


OPTIMIZER = Knob(
    "optimizer",
    "adamw",
    "update rule; 'own' is the optimizer that the workload brings (offered when it brings one)",
    in_front=True,
    choices=(*_OURS, _OWN),
    short="",
    moves={OPTIMIZER_STATE: MOST},
    apply=_set_optimizer,
    lighter=_less_state,
    refuses=_refuses,
    adapts=_adapts,
    exported=carried,
)

OPTIMIZER_IMPL = Knob(
    "optimizer_impl",
    "default",
    "how torch computes the update: its default, foreach (fast, one extra copy), fused, or a plain loop",
    choices=("default", "foreach", "fused", "loop"),
    short="",
    moves={TEMPORARIES: HALF, INSIDE_OPERATORS: HALF},
    mathematics=KEEPS_TO_ROUNDING,
    apply=_set_implementation,
    lighter=_in_place,
    exported=carried,
)

LEARNING_RATE = Knob(
    "learning_rate",
    1e-3,
    "step size of the update; what a cell or own scheduler sets holds until this changes",
    parse=not_negative,
    allowed="a number of at least 0, such as 1e-3",
    short="lr ",
    apply=_set_learning_rate,
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
