"""Lesson 4, *Half the bits*: what autocast keeps in 16 bits and what not, rounding, overflow, and loss scaling."""

from __future__ import annotations

from typing import Any

from ...shared.categories import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ..answers import Nothing, Number, Size, Words
from ..evidence import Evidence, Measured
from ..exercise import Content, Exercise, Outcome, right, wrong
from ..judges import Mistake, measured, named

LOAD = "text-gpt width=256 depth=4"
BATCH = 8
FOUR = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS)
STEP, STEPS = 0.001, 1000
GRADIENT = 6
_SMALLER = 0.8  # as a share of what it is in fp32


def _both(evidence: Evidence) -> tuple[Measured, Measured]:
    """Return what a step holds in fp32, and under autocast."""
    evidence.needs(LOAD)
    return evidence.measure(batch_size=BATCH), evidence.measure(batch_size=BATCH, precision="bf16")


def _shrinking(evidence: Evidence) -> frozenset[str]:
    """Return the categories that are smaller under autocast."""
    whole, half = (step.highest for step in _both(evidence))
    return frozenset(name for name in FOUR if half[name] < _SMALLER * whole[name])


SHRINKING = Exercise(
    "4.1",
    "What becomes smaller",
    "You switch from fp32 to precision=bf16, which is autocast. Which of parameters, gradients, optimizer state and "
    "activations need less memory?",
    Words(FOUR),
    named(
        _shrinking,
        why="Autocast changes the type in which operators compute, and so what forward keeps for backward. The weights "
        "stay in fp32, and gradients and optimizer state have the type of the weights.",
        mistakes=(
            (
                PARAMETERS,
                "That would be model.bfloat16(). Autocast leaves the weights in fp32, and makes a 16-bit copy of one "
                "when an operator needs it.",
            ),
            (
                GRADIENTS,
                "Backward computes in 16 bits, but a gradient is added up in the type of its weight. Which type is it?",
            ),
            (
                OPTIMIZER_STATE,
                "AdamW's moments have the type of the weights, and the optimizer does not know about autocast at all.",
            ),
            (
                f"-{ACTIVATIONS}",
                "Something does become smaller: which of the four are results of operators that ran under autocast?",
            ),
        ),
        otherwise="Autocast acts on operators: which of the four do operators of forward make?",
    ),
    (
        "Autocast chooses the type in which an operator of forward computes. Which of the four are such results?",
        "Ask a weight on the ranks: %%hvd, and in the next line print(next(model.parameters()).dtype)",
        "Three of the four have the type of the weights. Only one is smaller.",
    ),
)


def _halved(found: tuple[Measured, Measured]) -> float:
    """Return the peak of fp32 with half the activations, which leaves the casts out."""
    whole, _ = found
    return whole.live_peak_bytes - whole.ledger.at_peak[ACTIVATIONS] / 2


PEAK = Exercise(
    "4.2",
    "Predict the peak of autocast",
    f"You have seen the live peak and its parts in fp32 with batch_size={BATCH}. "
    "What will the live peak be under precision=bf16?",
    Size("100 MiB"),
    measured(
        _both,
        lambda found: found[1].live_peak_bytes,
        within=0.04,
        why=lambda found: (
            f"Activations fall to {found[1].ledger.at_peak[ACTIVATIONS] / found[0].ledger.at_peak[ACTIVATIONS]:.0%}: "
            "layer norms, and the sums between the blocks, stay in fp32. In return come the 16-bit copies of the "
            "weights, which are as large with one sample as with a thousand."
        ),
        mistakes=(
            Mistake(
                lambda found: found[0].live_peak_bytes / 2,
                "That is half of everything. Weights, optimizer state and Horovod's buffer stay in fp32.",
            ),
            Mistake(
                _halved,
                "Half the activations, yes. But a product in 16 bits needs its weight in 16 bits, too: autocast makes "
                "a copy, 2 bytes for each parameter, and keeps it for backward.",
            ),
            Mistake(
                lambda found: _halved(found) - found[0].ledger.at_peak[PARAMETERS] / 2,
                "That halves the weights, too. They stay in fp32, and autocast makes 16-bit copies beside them.",
            ),
            Mistake(
                lambda found: found[0].live_peak_bytes,
                "That is the peak of fp32. Activations are a good part of it, and they become smaller.",
            ),
            Mistake(
                lambda found: found[0].live_peak_bytes + found[0].ledger.at_peak[PARAMETERS] / 2,
                "The 16-bit copies come, yes. What goes in return? Half of the activations.",
            ),
        ),
        too_low="Too little: only activations are halved, and 16-bit copies of the weights come on top.",
        too_high="Too much: about half of the activations goes, and a copy of the weights takes 2 bytes for each.",
    ),
    (
        "What is halved, and what stays? The table of the peak in fp32 has all parts.",
        "Autocast keeps a copy of 2 bytes for nearly each parameter from forward to backward.",
        "Peak of fp32, less half of the activations, plus half of the parameters' bytes.",
    ),
)


def _rounded(evidence: Evidence) -> dict[str, float]:
    return dict(evidence.of_module("half_bits", f"rounded({STEP}, {STEPS})")[0])


ROUNDED = Exercise(
    "4.3",
    "Small updates",
    f"A weight is 1 and its type is bf16. Training adds {STEP:g} to it, {STEPS:,} times. What is the weight then?",
    Number("1.5"),
    measured(
        _rounded,
        lambda found: found["bfloat16"],
        within=0.0005,
        words=lambda value: f"{value:.4g}",
        why=lambda found: (
            f"bf16 has 8 bits for the digits: after 1 comes 1.0078, and 1.001 is rounded back to 1, {STEPS:,} times. "
            f"fp16 has 11 bits and ends at {found['float16']:.4g}. This is why weights stay in fp32."
        ),
        mistakes=(
            Mistake(
                lambda found: found["float32"],
                "That is what exact arithmetic gives, and nearly what fp32 does. Which number follows 1 in bf16?",
            ),
            Mistake(
                lambda found: found["float16"],
                "That is fp16, which has 11 bits for the digits. bf16 gave three of them away for its range.",
            ),
            Mistake(
                lambda _: 1 + STEP,
                "That is the first sum before it is rounded. bf16 cannot hold it: which number is the nearest to it?",
            ),
            Mistake(
                lambda _: 1 + 2**-7,
                "That is the number that follows 1 in bf16. Each sum is rounded to the nearest number: which is that?",
            ),
        ),
        too_low="Nothing is subtracted: it cannot become less than 1.",
        too_high="Each sum is rounded before the next one is made. What becomes of the first, 1.001?",
    ),
    (
        "bf16 has 8 bits for the digits of a number. How far from 1 is the next number that it can hold?",
        "The next number after 1 is 1 + 1/128. Where is 1.001 rounded to?",
        "Try it: %%hvd, and in the next line print(torch.tensor(1.001, dtype=torch.bfloat16))",
    ),
)


def _skipped(evidence: Evidence) -> float:
    return float(evidence.of_module("half_bits", f"skipped_updates({float(GRADIENT)})")[0])


_UPDATES = {"": 1.0, "updates": 1.0, "update": 1.0, "steps": 1.0, "times": 1.0}

SKIPPED = Exercise(
    "4.4",
    "An overflow",
    f"The gradient of a weight is {GRADIENT}. Training begins under fp16 with the loss scale 65,536. "
    "How many updates are skipped before one counts?",
    Number("1 or '1 update'", _UPDATES),
    measured(
        _skipped,
        lambda found: found,
        within=0.01,
        words=lambda value: f"{value:.3g} updates",
        why=f"{GRADIENT} times 65,536, 32,768 and 16,384 is beyond 65,504, so these three updates are skipped, each at "
        f"the price of a whole forward and backward; {GRADIENT} times 8,192 fits. After 2,000 good updates the scaler "
        "tries twice the scale.",
        mistakes=(
            Mistake(
                lambda _: 0,
                "The scaler does not look ahead: it multiplies the loss, and sees the overflow when the gradients are "
                "there. Then it is too late for this update.",
            ),
            Mistake(
                lambda _: 1,
                f"One overflow halves the scale once. Does {GRADIENT} times 32,768 stay below 65,504?",
            ),
            Mistake(
                lambda _: 2,
                f"After two overflows the scale is 16,384. Does {GRADIENT} times that stay below 65,504?",
            ),
            Mistake(lambda _: 4, f"That is one too many: the last would be with a scale of 8,192. Times {GRADIENT}?"),
            Mistake(
                lambda _: GRADIENT,
                "The scale falls by a factor of 2 with each overflow, not by a fixed amount.",
            ),
            Mistake(
                lambda _: 16,
                "It does not fall to 1. As soon as scale times gradient is below 65,504, the update counts.",
            ),
        ),
        too_low="A number of updates is 0 or more.",
        too_high="Each overflow halves the scale. Go on only until scale times gradient is below 65,504.",
    ),
    (
        "What backward computes is scale times gradient. fp16 ends at 65,504.",
        "An overflow skips the update and halves the scale: 65,536, 32,768, 16,384 …",
        f"Halve 65,536 until {GRADIENT} times it is below 65,504, and count.",
    ),
)


def _clipped(_: None, evidence: Evidence) -> Outcome:
    """Judge a student's update by what it does to weights whose gradients are known."""
    found: dict[str, Any] = evidence.of_function("update", "half_bits")[0]
    if found["error"]:
        return wrong(_of_error(found["error"]))
    compared = (
        f"Gradient of norm {found['norms'][0]:g}: {found['large']:.3g} times the update that it should be. "
        f"Of norm {found['norms'][1]:g}: {found['small']:.3g} times."
    )
    hint = _of_sizes(found) or _of_overflow(found)
    if hint:
        return wrong(hint, compared)
    return right(
        "Unscale, then clip, then step: max_norm is a length of true gradients. An overflow must still reach the "
        "scaler, which skips that update. The toolkit does it in this order when you say %hvd_set clip_norm=1",
        compared,
    )


_FAILED = (
    (
        "_scale is None",
        "unscale_() divides gradients by the scale, so they must be there: scaler.scale(loss).backward() comes first.",
    ),
    (
        "unscale_()",
        "Between two calls of unscale_() for one optimizer there must be one scaler.update(): is it missing, or is "
        "unscale_() called twice?",
    ),
    (
        "prior to update",
        "The scaler has seen no gradients before update(): scaler.step() shows them to it, optimizer.step() does not.",
    ),
    (
        "for this optimizer",
        "scaler.step() found no gradients: first comes backward, and no zero_grad() until the update is done.",
    ),
)


def _of_error(error: str) -> str:
    """Return the hint for an update that failed."""
    hint = next((hint for words, hint in _FAILED if words in error), "It must work for each update.")
    return f"{hint} Your function raised {error}"


def _of_sizes(found: dict[str, Any]) -> str:
    """Return the hint for updates of a wrong length; empty where both are as they should be."""
    large, middle, small, longest = found["large"], found["middle"], found["small"], found["norms"][0]
    if large == small == 0:
        return "The weights did not change: scaler.step(optimizer) is missing."
    if large < _LITTLE and small < _LITTLE:
        return (
            "You clip gradients that are still multiplied by the loss scale: nearly all are longer than 1 then. "
            "After that the scaler divides by its scale, and nothing is left of the update."
        )
    if _is(large, longest) and _is(small, 1):
        return "Nothing is clipped: a long gradient must become one of norm 1, before the optimizer's step."
    if large > _MUCH or small > _MUCH:
        return (
            "The weights were moved by gradients that are multiplied by the loss scale. Divide by it before the "
            "update: scaler.step() does that, and so does scaler.unscale_()."
        )
    if not _is(small, 1):
        return (
            "A gradient that is shorter than 1 may not be changed. Is it still multiplied by the scale when you clip, "
            "or is it divided twice?"
        )
    if not (_is(large, 1) and _is(middle, 1)):
        return "A gradient longer than 1 must become one of norm 1, all weights together."
    return ""


_LITTLE, _MUCH = 0.01, 100.0


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 0.01 * max(1.0, abs(wanted))


def _of_overflow(found: dict[str, Any]) -> str:
    """Return the hint for what is wrong with an overflow; empty where nothing is."""
    if not found["kept"]:
        return (
            "A gradient that overflowed reached the weights, which are lost then. scaler.step(optimizer) skips such "
            "an update; optimizer.step() does not."
        )
    if not _is(found["scale"], 0.5):
        return "After an overflow the scale must be halved: that is scaler.update(), at the end of each update."
    if not _is(found["again"], 1):
        return "After an overflow the scale is another one. Ask the scaler for it each time, with get_scale()."
    return ""


CLIPPED = Exercise(
    "4.5",
    "Clip the true gradients",
    "Correct the function update(net, loss, optimizer, scaler) on the ranks: gradients are clipped to a norm of 1, and "
    "an overflow is skipped.",
    Nothing(),
    _clipped,
    (
        "What has scaler.scale(loss).backward() left in the gradients: g, or g times 65,536?",
        "GradScaler has a method that divides the gradients of an optimizer by the scale, in place.",
        "After backward, and before clip_grad_norm_: scaler.unscale_(optimizer)",
    ),
)

LESSON = Content("4", "Half the bits", (SHRINKING, PEAK, ROUNDED, SKIPPED, CLIPPED))
