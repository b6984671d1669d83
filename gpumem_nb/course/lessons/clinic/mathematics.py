"""The clinic's trainings whose updates are not what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...exercise import Outcome, right, wrong
from .cases import case

_SAME = 0.01
_PARALLEL = 0.9999
_LARGE = 0.8  # of the peak of one large batch


def _accumulate(ranks: Sequence[dict[str, Any]]) -> Outcome:
    steps = ranks[0]["steps"]
    compared = " ".join(
        f"With {step['parts']} micro-batches the update is {step['times']:.3g} times that of the large batch."
        for step in steps
    )
    first, second = steps
    if not (first["updates"] and second["updates"]):
        return wrong("Nothing is updated: the optimizer must step once, behind the last micro-batch.", compared)
    if first["updates"] > 1 or second["updates"] > 1:
        return wrong(
            "That updates after each micro-batch: many small steps with gradients of few samples, and not one of many.",
            compared,
        )
    if second["last"] > _PARALLEL:
        return wrong(
            "Only the last micro-batch counts: zero_grad() between two of them throws away what was accumulated.",
            compared,
        )
    if first["off"] < _SAME and second["off"] > _SAME and abs(second["times"] - first["times"]) > _SAME:
        return wrong(
            "The first step is right, and the second is not: gradients of the first are still there, or the number of "
            "micro-batches is fixed in the code.",
            compared,
        )
    if first["off"] > _SAME or second["off"] > _SAME:
        return wrong(_why_off(second), compared)
    if second["peak"] > _LARGE:
        return wrong(
            "The update is right, but all samples go through the model at once: that takes the memory of the large "
            "batch, which accumulation is there to avoid.",
            compared,
        )
    return right(
        "backward() adds to what is there. A mean over the batch is the sum of the micro-batches' means divided by "
        "their number: divide each loss, or all gradients.",
        compared,
    )


def _why_off(step: dict[str, Any]) -> str:
    """Return which misconception leads to an update of this size."""
    if abs(step["times"] / step["parts"] - 1) < _SAME:
        return (
            "That is the sum of the micro-batches' gradients. The large batch takes the mean of its samples, so with "
            "more micro-batches your steps grow, as if the learning rate did."
        )
    if abs(step["times"] * step["parts"] - 1) < _SAME:
        return "Now it is divided twice: steps get smaller with more micro-batches."
    return "The update should be that of one batch with all the samples: the mean over all of them."


_HALVED = 0.5


def _clipped(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    small, large = found["small"], found["large"]
    compared = (
        f"Gradients of norm {small['norm']:.2g}: the update is {small['times']:.3g} times what it should be. "
        f"Of norm {large['norm']:.2g}: {large['times']:.3g} times."
    )
    if small["off"] > _SAME and small["times"] < _HALVED:
        return wrong(
            "The norm that is clipped is not that of the gradient: it is larger or smaller by the scaler's scale. So "
            "everything seems too long, or is made too short, and training hardly moves.",
            compared,
        )
    if large["off"] > _SAME and large["times"] > 1 + _SAME:
        return wrong("Large gradients are not clipped to a norm of 1 before the optimizer uses them.", compared)
    if small["off"] > _SAME or large["off"] > _SAME:
        return wrong(
            "The update is not that of gradients that were clipped to a norm of 1: the direction or the length "
            "differs.",
            compared,
        )
    if not found["skips"]:
        return wrong(
            "A step whose gradients overflowed must be skipped, and here it has spoilt the weights: that is what "
            "scaler.step() is for.",
            compared,
        )
    if not found["scales"]:
        return wrong(
            "The scale stays as it is after gradients that overflowed: scaler.update() must follow, or every step is "
            "skipped.",
            compared,
        )
    return right(
        "Scaled gradients are longer by the scale. unscale_() first, then clip: scaler.step() knows that it was done.",
        compared,
    )


ACCUMULATION = case(
    4,
    "Wrong accumulation",
    "With more micro-batches training diverges. Change accumulate() so that its update is that of one large batch, "
    "whatever the number of micro-batches.",
    "accumulate",
    "mathematics",
    _accumulate,
    (
        "Compare the gradients for 1, 2, 4 and 8 micro-batches of the same samples.",
        "Each loss is a mean over its micro-batch. What is the mean over all of them?",
        "(loss / len(micro_batches)).backward()",
    ),
)
CLIPPING = case(
    5,
    "Clipping of scaled gradients",
    "With a gradient scaler the loss hardly falls. Change clipped_step() so that gradients are clipped to a norm of 1, "
    "whatever the scale, and steps that overflow are skipped.",
    "clipped_step",
    "mathematics",
    _clipped,
    (
        "Print what clip_grad_norm_ returns: the norm that it found.",
        "The gradients are those of the loss times the scale. Which call of the scaler divides by it?",
        "scaler.unscale_(optimizer) before the line that clips.",
    ),
)
