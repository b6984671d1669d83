"""Which knobs may make a category of the peak smaller; only those that are not used yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..shared import categories as c
from ..shared.settings import Settings

Knobs = dict[str, Any]


def easing(category: str, phase: str, now: Settings, blocks: int) -> list[Knobs]:
    """Changes to try, the most promising first; ``blocks`` is what checkpointing has to work with."""
    makes = _EASING.get(category)
    return [knobs for knobs in makes(phase, now, blocks) if knobs] if makes else []


def in_words(knobs: Knobs) -> str:
    """As it is typed after ``%hvd_set``."""
    return " ".join(f"{name}={value}" for name, value in knobs.items())


# What cannot be changed by a knob, in words.
FIXED = {
    c.PARAMETERS: "No knob changes what the weights take; a smaller model does.",
    c.GRADIENTS: "No knob changes what the gradients take: they are as large as the weights.",
    c.OPTIMIZER_STATE: "No knob makes this optimizer's state smaller.",
    c.COMMUNICATION: "No knob changes what Horovod keeps for exchanging gradients.",
    c.OTHER: "Training did not make it: look for tensors that cells and buffers of the model hold.",
}


def _activations(_: str, now: Settings, blocks: int) -> list[Knobs]:
    return [_checkpointing(now, blocks), _sixteen_bit(now), _smaller(now)]


def _short_lived(phase: str, now: Settings, _: int) -> list[Knobs]:
    return _update(now) if phase == "update" else [_sixteen_bit(now), _smaller(now)]


def _optimizer_state(_: str, now: Settings, blocks: int) -> list[Knobs]:
    lighter = {"adam": ("momentum", "sgd"), "adamw": ("momentum", "sgd"), "momentum": ("sgd",)}
    return [{"optimizer": name} for name in lighter.get(now.optimizer, ())]


def _gradients(_: str, now: Settings, blocks: int) -> list[Knobs]:
    # From the second micro-batch on they are alive during forward too.
    return [{"accumulation_steps": 1}] if now.accumulation_steps > 1 else []


def _inputs(_: str, now: Settings, blocks: int) -> list[Knobs]:
    return [_smaller(now)]


def _casts(_: str, now: Settings, blocks: int) -> list[Knobs]:
    return [{"precision": "fp32"}] if now.precision != "fp32" else []


def _checkpointing(now: Settings, blocks: int) -> Knobs:
    # "all" is one segment, which saves next to nothing; whether √n blocks save more than single ones is the model's.
    return {"checkpointing": "blocks"} if blocks and now.checkpointing in ("none", "all") else {}


def _sixteen_bit(now: Settings) -> Knobs:
    return {"precision": "bf16"} if now.precision == "fp32" else {}


def _smaller(now: Settings) -> Knobs:
    """The same samples in each step, fewer at once."""
    if now.batch_size < 2 or now.batch_size % 2:
        return {}
    return {"batch_size": now.batch_size // 2, "accumulation_steps": now.accumulation_steps * 2}


def _update(now: Settings) -> list[Knobs]:
    # Fused updates work in place; all others take copies of what they update.
    return [{"optimizer_impl": "fused"}] if now.optimizer_impl != "fused" and now.optimizer != "own" else []


_EASING: dict[str, Callable[[str, Settings, int], list[Knobs]]] = {
    c.ACTIVATIONS: _activations,
    c.TEMPORARIES: _short_lived,
    c.INSIDE_OPERATORS: _short_lived,
    c.OPTIMIZER_STATE: _optimizer_state,
    c.GRADIENTS: _gradients,
    c.INPUTS: _inputs,
    c.CASTS: _casts,
}
