"""Lesson 3, *The batch*: micro-batches, accumulation, the learning rate that goes with them, and gradient noise."""

from __future__ import annotations

from typing import Any

from ...shared.units import format_bytes
from ..answers import Nothing, Number, Size
from ..evidence import Evidence, Measured
from ..exercise import Content, Exercise, Judge, Outcome, right, wrong
from ..judges import Mistake, measured

LOAD = "text-gpt width=256 depth=4"
PART, PARTS = 4, 4
FEW_PARTS = 3  # of the small net's: not as many as a part has samples


def _in_parts(evidence: Evidence) -> Measured:
    """Return what a step holds whose samples come in parts."""
    evidence.needs(LOAD)
    return evidence.measure(batch_size=PART, accumulation_steps=PARTS)


def _without_gradients(step: Measured) -> float:
    """Return the live peak that a step of one such part would have."""
    return step.live_peak_bytes - step.ledger.at_peak["gradients"]


PEAK = Exercise(
    "3.1",
    "The peak of four parts",
    f"You have seen the live peak with batch_size={PART * PARTS} and with batch_size={PART}. What is it with "
    f"batch_size={PART} accumulation_steps={PARTS}?",
    Size("100 MiB"),
    measured(
        _in_parts,
        lambda step: step.live_peak_bytes,
        within=0.05,
        why=lambda step: (
            f"The activations of {PART} samples, and from the second part on the gradients of the parts before, "
            f"{format_bytes(step.ledger.at_peak['gradients'])}: with one part alone they come when activations go."
        ),
        mistakes=(
            Mistake(
                _without_gradients,
                f"That is the peak of {PART} samples alone. What do the first parts leave behind, on which the later "
                "ones add?",
            ),
            Mistake(
                lambda step: _without_gradients(step) + (PARTS - 1) * step.ledger.at_peak["activations"],
                f"That is the peak of all {PART * PARTS} samples at once. Are the activations of the first part still "
                "there when the second part begins?",
            ),
            Mistake(
                lambda step: PARTS * _without_gradients(step),
                "That is four times everything. Parts come one after another, and there is one model.",
            ),
        ),
        too_low="Too little: a part needs its activations, and something of the parts before is still there.",
        too_high="Too much: the activations of a part are gone when its backward has ended. What stays?",
    ),
    (
        "After backward of the first part its activations are gone. What is there instead?",
        "Gradients have the size of the weights, and they are kept until the last part has added its own.",
        "Add the size of the weights to the peak of one part.",
    ),
)

_COMMON = {
    "none": "No gradient is left when the function ends. Clear old gradients before the first part, and none after it.",
    "last": "Only the last part is in this gradient: zero_grad() inside of the loop throws the other parts away.",
    "last, divided": "Only the last part is in this gradient: zero_grad() inside of the loop throws the others away.",
    "undivided": "That is the sum of the parts' means, so the step is too long, as with a larger learning rate. Each "
    "loss is a mean already: what makes one mean of several?",
    "summed": "That is the sum over everything, and the mean was asked for: it grows with the batch.",
    "by samples": "That divides by the samples of a part, which its mean has done already. How many means are there?",
    "by ranks": "That divides by the number of ranks. Horovod's average does so later; this is one rank alone.",
    "other": "That is neither the large batch's gradient nor one of the usual mistakes. Take one part through it by "
    "hand.",
}
_OF_TOKENS = {
    "undivided": "That is the sum of the parts' means, and it grows with the number of parts. Make one mean of it in "
    "which each token has the same weight.",
    "parts": "That is the mean of the parts' means: a token in a part of few tokens counts more than one in a part of "
    "many. What is a part to be weighted with?",
    "samples": "That weights a part with its samples, but its loss is a mean over tokens. How many of its labels "
    "count?",
    "positions": "That divides by all positions. Labels of -100 are padding: they give no loss and do not count.",
}


def _accumulated(function: str, given: tuple[int, ...], hints: dict[str, str], why: str) -> Judge:
    """Return a judge of a function that adds up gradients of parts, which is run and watched."""

    def judge(_: None, evidence: Evidence) -> Outcome:
        seen: dict[str, Any] = evidence.of_function(function, "batch", *given)[0]
        compared = f"Your gradient's length: {seen['length']:.4g}. The large batch's: {seen['wanted']:.4g}."
        return _strayed(seen, hints, compared) or right(why, compared)

    return judge


def _strayed(seen: dict[str, Any], hints: dict[str, str], compared: str) -> Outcome | None:
    """Return what is wrong with the way in which gradients were added up, if anything is."""
    if seen["moved"]:
        hint = (
            "The weights have changed. A step is taken once, when all parts are in; here only gradients are asked for."
        )
    elif seen["found"][0] != "right":
        hint = hints[seen["found"][0]]
    elif seen["found"] != ["right", "right"]:
        hint = (
            "The first batch is right; in the next one the old gradients are still there, and are added. Clear them "
            "once for each batch, before its first part."
        )
    elif seen["largest"] > PART:
        hint = (
            "The gradient is right, but this takes the large batch in one piece, with all of its activations: what "
            "accumulation is there to avoid. Let each part go through the net by itself."
        )
    elif seen["waiting"] > 1:
        hint = (
            "The gradient is right, but one backward at the end keeps the graphs of all parts until then: as many "
            "activations as with the large batch. Call backward for each part, inside of the loop."
        )
    else:
        return None
    return wrong(hint, compared)


ACCUMULATE = Exercise(
    "3.2",
    "Accumulate",
    "accumulate(net, parts) is to leave in .grad the gradient of the mean loss over all samples of parts of equal "
    "size, whatever was there before, and never to hold the activations of more than one part. Repair it.",
    Nothing(),
    _accumulated(
        "accumulate",
        (PART, FEW_PARTS),
        _COMMON,
        "Clear once, let every part add its share, divide: the same gradient as the large batch's, with the "
        "activations of one part.",
    ),
    (
        "backward adds to .grad. When must .grad be empty, and when must it not be emptied?",
        "Move zero_grad() before the loop. Then look at the length: how many times too long is the gradient?",
        "Each loss is a mean over its part: call (loss / len(parts)).backward()",
    ),
)

TOKENS = Exercise(
    "3.3",
    "Parts that are not alike",
    "The last part is smaller, and samples are padded (labels of -100 are left out). Change accumulate_tokens(net, "
    "parts) so that .grad is the gradient of the mean over all tokens that count.",
    Nothing(),
    _accumulated(
        "accumulate_tokens",
        (PART,),
        _COMMON | _OF_TOKENS,
        "A mean over tokens is the sum over all of them, divided by how many there are in all parts. Ranks are parts, "
        "too: where their numbers of tokens differ, the average that Horovod makes is a mean of means.",
    ),
    (
        "Each token that counts must have the same weight, in whichever part it is.",
        "Count first: how many labels of all parts are not -100?",
        'Sum the loss of a part (reduction="sum") and divide by the number of tokens of all parts.',
    ),
)

RATE, FIRST, LARGER, STEPS = 0.002, 2, 4, 4


def _rate(evidence: Evidence) -> float:
    """Return the rate of a step under linear scaling, after the batch has grown."""
    evidence.needs(LOAD)
    scaled = {"optimizer": "sgd", "learning_rate": RATE, "lr_scaling": "linear"}
    reference = FIRST * evidence.session.size
    with evidence.trained(**scaled, batch_size=LARGER, accumulation_steps=STEPS, reference_batch=reference) as run:
        return float(run.frame().learning_rate.iloc[-1])


LEARNING_RATE = Exercise(
    "3.4",
    "The rate that goes with it",
    f"SGD trains with learning_rate={RATE}, batch_size={FIRST}, accumulation_steps=1. You flip to batch_size={LARGER} "
    f"accumulation_steps={STEPS} with lr_scaling=linear. What is the rate now?",
    Number("0.01"),
    measured(
        _rate,
        lambda rate: rate,
        within=0.02,
        words=lambda value: f"{value:.4g}",
        why="The rate grows with the samples of a step: twice as many in a micro-batch, four times as many "
        "micro-batches. This is a rule of thumb for SGD, and holds while the batch is small beside the noise scale. "
        "For Adam, whose steps have a length of their own, the root is advised: lr_scaling=sqrt.",
        mistakes=(
            Mistake(
                lambda rate: rate / 8, "That is the old rate. What does lr_scaling=linear do when the batch grows?"
            ),
            Mistake(
                lambda rate: rate / 4, "That follows batch_size alone. Which other setting adds samples to a step?"
            ),
            Mistake(lambda rate: rate / 2, "That follows accumulation_steps alone. The micro-batch has grown, too."),
            Mistake(lambda rate: rate / 8**0.5, "That is the root, as advised for Adam. Linear was asked for."),
            Mistake(lambda rate: rate * 2, "That counts ranks as new. They were there before, and have not doubled."),
            Mistake(lambda rate: rate / 64, "That is the wrong way: a larger batch has less noise, and bears more."),
        ),
        too_low="How many times as many samples are in a step now? Count micro-batch and accumulation.",
        too_high="Too much. How many times as many samples are in a step now?",
    ),
    (
        "Samples of a step: batch_size × accumulation_steps × ranks. How many times as many are there?",
        "Twice the micro-batch, and four micro-batches instead of one.",
        "Linear: the rate times the same factor.",
    ),
)

FEW, MANY = 4, 16
NOISE = Exercise(
    "3.5",
    "Noise of a gradient",
    f"A batch's gradient is the true one plus noise. With {FEW} samples the noise has some mean square. With {MANY} "
    "samples, how many times that is it?",
    Number("0.7 or '2 times'"),
    measured(
        lambda evidence: evidence.of_module("batch", f"noise({FEW}, {MANY})")[0],
        lambda found: found[1] / found[0],
        within=0.12,
        words=lambda value: f"{value:.3g} times",
        why="Noise is averaged out, and its mean square falls as 1 / samples. Its length falls with the root only, so "
        "each further sample brings less.",
        mistakes=(
            Mistake(lambda _: 0.5, "That is so of its length. The square of the length falls faster."),
            Mistake(lambda _: 1, "That would be the noise of one sample, however many there are. A mean is steadier."),
            Mistake(lambda _: 1 / 16, "That compares with one sample. Four samples are the beginning here."),
            Mistake(lambda _: 4, "That is the wrong way round: does a mean over more samples vary more, or less?"),
        ),
        too_low="It falls, but not so fast: what is the variance of a mean of n numbers?",
        too_high="It falls faster than that: what is the variance of a mean of n numbers?",
    ),
    (
        "A batch's gradient is a mean over samples drawn at random.",
        "The variance of a mean of n independent numbers is 1 / n of that of one number.",
        f"From {FEW} to {MANY} samples, n is four times as large.",
    ),
)

LESSON = Content("3", "The batch", (PEAK, ACCUMULATE, TOKENS, LEARNING_RATE, NOISE))
