"""The clinic's trainings in which something is kept that they do not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....shared.units import format_bytes
from ...exercise import Outcome, right, wrong
from .cases import case

_NOTHING_BYTES = 2048  # a step: a number on the device takes 64 or 512 bytes
_SAME = 0.01


def _follow(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    grows = max(rank["grows"] for rank in ranks)
    compared = f"Live bytes grow by {format_bytes(round(grows))} a step."
    if not found["learns"] or found["gradient"] > _SAME:
        return wrong(
            "The loss that follow() returns must keep its graph: without it backward has nothing to go through.",
            compared,
        )
    if found["average"] > _SAME:
        return wrong(
            "The curve is gone: average no longer follows the error. Keep the number, and let go of its graph.",
            compared,
        )
    if grows > _NOTHING_BYTES:
        return wrong(
            "average is still a tensor with a graph: it remembers how it was computed, and so holds what backward of "
            "that step would need, and of every step before. A copy or garbage collection changes nothing about that.",
            compared,
        )
    return right(
        "A number has no graph. Whatever outlives a step, such as a curve or a metric, should be detached from it: "
        ".item(), .detach(), or computed under torch.no_grad().",
        compared,
    )


def _train_hard(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    if found["grows"] is None:
        return wrong("train_hard() must go through its batches one by one, and see each of them once.")
    grows = max(rank["grows"] for rank in ranks)
    compared = f"Live bytes grow by {format_bytes(round(grows))} a batch."
    if found["trained"] > _SAME:
        return wrong(
            "Now it trains on other batches than before: only those with a loss at or above the mean should change the "
            "weights. The memory must go without the graphs of the others being used.",
            compared,
        )
    if not found["losses"]:
        return wrong("train_hard() must still return one loss for each batch: keep all numbers.", compared)
    if grows > _NOTHING_BYTES:
        return wrong(
            "The list still holds losses with their graphs. Backward frees what a graph holds; a batch that is skipped "
            "has no backward, so everything it computed stays as long as its loss does.",
            compared,
        )
    if not found["same"]:
        return wrong("The losses that are returned are no longer those of the batches.", compared)
    return right(
        "A loss in a list is the whole graph behind it, until backward has freed that. As a number it is a number.",
        compared,
    )


def _validate(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    if not found["given"]:
        return wrong("validate() must return one tensor with the outputs for all batches.")
    if found["grows"] is None:
        return wrong("validate() must go through its batches one by one, and see each of them once.")
    extra = max(rank["grows"] for rank in ranks) - found["each"]
    compared = f"Beside its output, each batch leaves {format_bytes(max(0, round(extra)))}."
    if not found["enabled"] or found["frozen"]:
        return wrong(
            "Afterwards gradients are switched off for what comes next, too: nothing would be trained any more.",
            compared,
        )
    if not found["mode"]:
        return wrong("The model is left in evaluation mode: training would go on without dropout.", compared)
    if not found["same"]:
        return wrong(
            "The outputs are not those of the model in evaluation mode: dropout and batch norm must be switched by "
            "model.eval(), which has nothing to do with gradients.",
            compared,
        )
    if extra > _NOTHING_BYTES:
        more = (
            " At the end they are let go of, but until then those of all batches are there at once."
            if found["held"] < 2 * found["needed"]
            else ""
        )
        return wrong(
            "Each output still keeps the activations for a backward that never comes: model.eval() changes what "
            f"dropout and batch norm do, and records the graph as before.{more}",
            compared,
        )
    return right(
        "Nothing is recorded under torch.no_grad() or torch.inference_mode(). With .detach() on each output the "
        "graph of one batch is made and dropped, which takes more memory and time; eval() does neither.",
        compared,
    )


_QUARTER = 0.25


def _freeze(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    freed = min(rank["freed"] for rank in ranks)
    compared = f"Freed: {max(0.0, freed):.1f} times the size of the frozen weights."
    if found["trainable"] or not found["still"]:
        return wrong("The body is still trained: all layers but the last one must stay as they are.", compared)
    if not found["moves"]:
        return wrong("Now the last layer is not trained any more, either.", compared)
    if freed < 1 - _QUARTER:
        return wrong(
            "Nothing came back. The gradients of frozen weights lie where they were computed, and an optimizer keeps "
            "the state of a weight in optimizer.state, whether it is in a group or not.",
            compared,
        )
    if freed < 2 - _QUARTER:
        return wrong(
            "The gradients are gone, but AdamW still keeps two numbers for each frozen weight, in optimizer.state: "
            "requires_grad or param_groups do not change that.",
            compared,
        )
    if freed < 3 - _QUARTER:
        return wrong(
            "The state is gone. The latest gradients of the frozen weights are still there: no optimizer clears them "
            "that does not know these weights.",
            compared,
        )
    return right(
        "A frozen weight needs 4 of its 16 bytes. Freezing before the optimizer is made never allocates the rest; "
        "later, state and gradients must be dropped by hand.",
        compared,
    )


def _loss_of(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    held = max(rank["held"] for rank in ranks)
    compared = f"Held between two steps: {format_bytes(max(0, held))}; the logits are {format_bytes(found['logits'])}."
    if not found["learns"]:
        return wrong("The loss has changed: its gradients are not those of the cross-entropy.", compared)
    if found["accuracy"] > _SAME:
        return wrong("accuracy() no longer gives the accuracy of the latest micro-batch.", compared)
    share = held / found["logits"]
    if share > 1 - _QUARTER:
        return wrong(
            "The logits are still there: without their graph they are as large as before, and .cpu() moves nothing "
            "on a virtual GPU, which is this CPU. What does accuracy() need of each row of 2,048 numbers?",
            compared,
        )
    if share > _QUARTER / 4:
        return wrong(
            "A part of the logits is still kept, one way or another. One number for each row is enough.", compared
        )
    return right(
        "One class for each row is left of 2,048 numbers. Logits are often the largest tensor of a language model, and "
        "what is kept of them until the next step adds to that step's peak.",
        compared,
    )


_MOST_TIMES, _MOST_WASTE = 2.5, 2.2


def _pad(ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = ranks[0]
    peak = max(found["peak"], found["least"])
    reserved = max(rank["reserved"] for rank in ranks)
    times = max(0.0, reserved / peak)
    compared = f"Reserved: {format_bytes(max(0, reserved))}, {times:.1f} times the live peak of {format_bytes(peak)}."
    if not found["filled"] or not found["zeros"]:
        return wrong("The texts must come out as they went in, one a row, with zeros behind them.", compared)
    if peak > _MOST_WASTE * found["least"]:
        return wrong(
            "Nothing is fragmented now, but what is padded is mostly zeros: the live peak is more than twice what the "
            "longest texts need.",
            compared,
        )
    if reserved > _MOST_TIMES * peak:
        return wrong(
            "Each micro-batch is still a bit larger than the one before, so none fits into the block which that has "
            "left. The blocks lie in the cache, free and too small. Few different sizes would be used again and again.",
            compared,
        )
    return right(
        "A block is used again for a tensor of the same size. Lengths rounded up to a few sizes, or one buffer for "
        "all, cost some zeros and save the pieces.",
        compared,
    )


GRAPH = case(
    1,
    "A graph kept across steps",
    "Training runs out of memory after some hundred steps. Change follow() so that live bytes no longer grow, "
    "average still follows the error, and the loss stays what it is.",
    "follow",
    "memory",
    _follow,
    (
        "%hvd_doctor names what grows, and the line that made it.",
        "average is computed from error, and error from the outputs. What does a tensor remember of that?",
        "average = 0.9 * average + 0.1 * error.item()",
    ),
)
LOSSES = case(
    2,
    "A list of losses",
    "The more batches are skipped, the more memory is held. Change train_hard() so that it trains in the same way and "
    "returns all losses, and live bytes no longer grow.",
    "train_hard",
    "memory",
    _train_hard,
    (
        "A cell that begins with %%hvd --memory says what it has left behind.",
        "What does loss.backward() free, and for which batches is it called?",
        "losses.append(loss.item())",
    ),
)
VALIDATION = case(
    3,
    "Validation without no_grad",
    "Validation takes more memory than training. Change validate() so that a batch leaves nothing behind but its "
    "output.",
    "validate",
    "memory",
    _validate,
    (
        "%hvd_memory names the variables of cells that hold memory.",
        "model.eval() is about dropout and batch norm. What tells autograd that no backward will come?",
        "with torch.no_grad(): around the line that calls the model.",
    ),
)
FROZEN = case(
    8,
    "Frozen layers in the optimizer",
    "You freeze all layers but the last one, and memory stays as it was. Change freeze() so that all comes back that "
    "frozen weights do not need.",
    "freeze",
    "memory",
    _freeze,
    (
        "%hvd_doctor says which weights the optimizer remembers.",
        "Of the 16 bytes of a weight, 4 are the weight. Where are the other 12?",
        "for weight in layer.parameters(): optimizer.state.pop(weight, None) is a part of it; weight.grad is the "
        "other.",
    ),
)
LOGITS = case(
    9,
    "Logits kept alive",
    "accuracy() keeps the logits of a step until the next one. Change loss_of() and accuracy() so that they keep far "
    "less.",
    "loss_of",
    "memory",
    _loss_of,
    (
        "What do you still need of 2,048 logits, to say whether the largest one is that of the right class?",
        "The class with the largest logit is one number.",
        'last["classes"] = logits.argmax(-1), which has no graph.',
    ),
)
PIECES = case(
    10,
    "Fragmentation",
    "Much more is reserved than was ever live. Change pad() so that reserved is at most two and a half times the "
    "live peak.",
    "pad",
    "memory",
    _pad,
    (
        "The caching allocator uses a block again for a tensor that fits into it. Which block fits a tensor that is "
        "larger?",
        "Let there be few different lengths.",
        "longest = -(-longest // 512) * 512 rounds up to a multiple of 512.",
    ),
)
