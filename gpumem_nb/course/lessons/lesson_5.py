"""Lesson 5, *Compute it twice*: what activation checkpointing keeps, what it costs, and how a layer is wrapped."""

from __future__ import annotations

from typing import Any

from ...shared.categories import ACTIVATIONS
from ..answers import Nothing, Number, Size
from ..evidence import DoesNotFit, Evidence
from ..exercise import Content, Exercise, Outcome, right, wrong
from ..judges import Mistake, measured

LOAD = "text-gpt width=64 depth=16"
BATCH, BLOCKS, SEGMENT = 16, 16, 4
INPUT_BYTES = BATCH * 64 * 64 * 4
"""What each block is given: for each sample 64 characters of 64 numbers in fp32."""
ROOM_MIB, SPARE_MIB = 70, 6


def _activations(evidence: Evidence, checkpointing: str) -> int:
    return evidence.measure(batch_size=BATCH, checkpointing=checkpointing).highest[ACTIVATIONS]


def _with(checkpointing: str, evidence: Evidence) -> tuple[int, int]:
    """Return the activations of a step without checkpointing, and with it."""
    evidence.needs(LOAD)
    return _activations(evidence, "none"), _activations(evidence, checkpointing)


BLOCKWISE = Exercise(
    "5.1",
    "Keep the inputs of blocks",
    f"{BLOCKS} blocks keep 65 MiB of activations for backward; the input of each is 256 KiB. With "
    "checkpointing=blocks each keeps its input alone. What is the most that activations take during a step?",
    Size("10 MiB"),
    measured(
        lambda evidence: _with("blocks", evidence),
        lambda found: found[1],
        within=0.15,
        why=f"The inputs of {BLOCKS} blocks, and all activations of one: of that which backward is computing again.",
        mistakes=(
            Mistake(
                lambda found: found[0] / BLOCKS,
                f"That is one part of it: the inputs of {BLOCKS} blocks, or the activations of one block. When "
                "backward computes a block again, both are there.",
            ),
            Mistake(
                lambda _: INPUT_BYTES,
                "That is the input of one block. Each block keeps its own until backward gets there.",
            ),
            Mistake(
                lambda found: found[0] / BLOCKS + INPUT_BYTES,
                "All activations of one block, yes, and the input of how many blocks?",
            ),
            Mistake(
                lambda found: found[0] / SEGMENT,
                "That is what joining √n blocks would give. Here each block is computed again by itself.",
            ),
            Mistake(
                lambda found: found[0] / 2,
                "Half of everything is not what is kept. Add up: the inputs, and what one block needs in backward.",
            ),
            Mistake(
                lambda found: found[0],
                "That is without checkpointing. What does a block keep if it keeps its input alone?",
            ),
        ),
        too_low="Too little: all inputs wait for backward, and one block at a time has all its activations.",
        too_high="Too much: only one block at a time has all its activations. The others have their inputs.",
    ),
    (
        "Two things are there at the same time when backward computes a block again. Which?",
        f"{BLOCKS} inputs of 256 KiB wait. One block has all that it had without checkpointing.",
        f"{BLOCKS} × 256 KiB + 65 MiB / {BLOCKS}",
    ),
)


def _arithmetic(evidence: Evidence) -> dict[str, int]:
    return dict(evidence.of_module("twice", "arithmetic()")[0])


ARITHMETIC = Exercise(
    "5.2",
    "What it costs",
    "Every block's forward is computed twice. How many times the arithmetic of a plain step does a step take?",
    Number("1.5 or '1.5 times'"),
    measured(
        _arithmetic,
        lambda found: found["blocks"] / found["none"],
        within=0.04,
        words=lambda value: f"{value:.3g} times",
        why="A forward more in place of three: backward is two forwards' worth of work, one for the gradients of the "
        "weights and one for those of the inputs. So a step takes up to a third longer.",
        mistakes=(
            Mistake(
                lambda _: 2,
                "Only forward is done twice, backward is not. And backward is the larger part of a step.",
            ),
            Mistake(
                lambda _: 1.5,
                "That is right if backward does as much as forward. For each product of forward it computes two: the "
                "gradient of the weight, and that of the input.",
            ),
            Mistake(lambda _: 1, "The second forward is not free: each block computes all of its products again."),
            Mistake(
                lambda _: 1.25,
                "That counts backward as three forwards. For each product of forward it computes two.",
            ),
            Mistake(lambda _: 4 / 3 - 1, "That is what is added. How many times the plain step is the whole?"),
            Mistake(
                lambda _: 0.75,
                "That is the other way round: it does not become less. Divide the new step by the plain one.",
            ),
        ),
        too_low="Too little: how much is one more forward, if a plain step is one forward and one backward?",
        too_high="Too much: a step has one forward more, and nothing else.",
    ),
    (
        "A step is forward and backward. Which of them is computed again?",
        "For each matrix product of forward, backward computes two: so a plain step is three forwards' worth.",
        "Four forwards' worth in place of three.",
    ),
)

SEGMENTS = Exercise(
    "5.3",
    "Segments of √n blocks",
    f"With checkpointing=sqrt, {SEGMENT} blocks at a time form a segment: its first input is kept, and backward "
    "computes the segment again. What is the most that activations take now?",
    Size("10 MiB"),
    measured(
        lambda evidence: _with("sqrt", evidence),
        lambda found: found[1],
        within=0.15,
        why=f"{BLOCKS // SEGMENT} inputs, and all activations of {SEGMENT} blocks: more than with single blocks. "
        "√n is best where a layer keeps nothing but its output; these blocks keep sixteen times their input.",
        mistakes=(
            Mistake(
                lambda found: found[0] / BLOCKS + BLOCKS // SEGMENT * INPUT_BYTES,
                f"{BLOCKS // SEGMENT} inputs, yes. But backward computes a whole segment again: how many blocks "
                "have all their activations then?",
            ),
            Mistake(
                lambda _: BLOCKS // SEGMENT * INPUT_BYTES,
                "Those are the inputs that are kept. What is there while backward computes a segment again?",
            ),
            Mistake(
                lambda found: found[0] / BLOCKS + BLOCKS * INPUT_BYTES,
                "That is what single blocks need. Fewer inputs are kept here, and more is computed again at once.",
            ),
            Mistake(
                lambda found: found[0] / SEGMENT + BLOCKS * INPUT_BYTES,
                f"The activations of a segment, yes. But how many inputs wait, if each segment of {SEGMENT} keeps one?",
            ),
            Mistake(
                lambda found: found[0] / 2,
                "Half of the blocks would be two segments of 8. Here a segment has 4.",
            ),
            Mistake(lambda found: found[0], "That is without checkpointing."),
        ),
        too_low=f"Too little: while a segment is computed again, all {SEGMENT} blocks of it have their activations.",
        too_high="Too much: one segment at a time has its activations, and each of the others one input.",
    ),
    (
        "The same two parts as before: inputs that wait, and what is there while something is computed again.",
        f"{BLOCKS // SEGMENT} segments keep an input each. Backward computes {SEGMENT} blocks again at once.",
        f"{BLOCKS // SEGMENT} × 256 KiB + {SEGMENT} × 65 MiB / {BLOCKS}",
    ),
)


def _budgeted(_: None, evidence: Evidence) -> Outcome:
    """Judge the present settings by their live peak, for as many samples as before."""
    evidence.needs(LOAD)
    settings = evidence.session.settings
    samples = settings.batch_size * settings.accumulation_steps
    if samples != BATCH:
        return wrong(
            f"A step must still take {BATCH} samples on each rank, and takes {samples} now. Another batch is another "
            "training; what is to be found here costs time alone."
        )
    try:
        peak_mib = evidence.measure_now().live_peak_bytes / 2**20
    except DoesNotFit as error:
        return wrong(f"{_TOO_MUCH} {error}")
    compared = f"{_in_words(settings)}: live peak {peak_mib:.1f} MiB of {ROOM_MIB} MiB."
    if peak_mib > ROOM_MIB:
        return wrong(_TOO_MUCH, compared)
    if peak_mib < ROOM_MIB - SPARE_MIB:
        return wrong(
            "There is room for more, so more is computed again than must be. A larger activation_budget keeps more: 0 "
            "is blocks, 1 is none.",
            compared,
        )
    return right(
        "It is no switch but a slider: keep what is slow to compute and small, and compute the rest again. "
        "%hvd_tune finds the fastest settings that fit.",
        compared,
    )


_TOO_MUCH = (
    "Too much is kept. The budget is a share of the blocks' activations, not of the peak: weights, optimizer state and "
    "Horovod's buffer stay, and so does what one block needs while it is computed again."
)


def _in_words(settings: Any) -> str:
    budget = f" activation_budget={settings.activation_budget:g}" if settings.checkpointing == "selective" else ""
    return f"checkpointing={settings.checkpointing}{budget}"


BUDGET = Exercise(
    "5.4",
    "As much as fits",
    f"Keep as much as fits: {BATCH} samples in a step, and a live peak of at most {ROOM_MIB} MiB and within "
    f"{SPARE_MIB} MiB of it.",
    Nothing(),
    _budgeted,
    (
        "none needs too much, and blocks far less than there is room for. What lies between is activation_budget.",
        "%hvd_predict activation_budget=0.5 says what a budget would need, before you take it.",
        "From budget 0 to budget 1 the peak rises nearly on a straight line. Read the budget off for the room.",
    ),
)


def _wrapped(_: None, evidence: Evidence) -> Outcome:
    """Judge a student's checkpointing by a step of a net whose gradients are known."""
    found: dict[str, Any] = evidence.of_function("checkpointed", "twice")[0]
    if found["error"]:
        hint = next((hint for words, hint in _FAILED if words in found["error"]), "The net must still train.")
        return wrong(f"{hint} Your function raised {found['error']}")
    calls = found["calls"]
    compared = (
        f"In a step layer1 is computed {_times(calls['layer1'])} and layer2 {_times(calls['layer2'])}. "
        f"Forward keeps {found['saved']:.0%} of what the plain net keeps."
    )
    if hint := _of_step(found, calls):
        return wrong(hint, compared)
    return right(
        "checkpoint belongs into forward: it is called with the layer and its input, in every step. Forward keeps the "
        "input alone, and backward calls the layer again.",
        compared,
    )


_FAILED = (
    (
        "missing 1 required positional argument",
        "checkpoint(layer) does not make a checkpointed layer: it calls the layer at once, here without an input. It "
        "must be called in forward, each time, with the layer and what the layer is given.",
    ),
    (
        "FloatTensor' as child module",
        "checkpoint(layer, inputs) calls the layer, and gives what comes of these inputs: a tensor, and no layer. It "
        "must be called in forward, in every step, with the inputs of that step.",
    ),
    (
        "as child module",
        "The place of a layer takes a module. Make one whose forward calls checkpoint, or replace forward itself.",
    ),
    (
        "recursion",
        "Your function calls itself: it looks up net.layer1, which is the wrapper by now. Keep the layer, or its "
        "forward, in a variable first.",
    ),
    ("has no attribute 'parameters'", "The function must return the net."),
)


def _of_step(found: dict[str, Any], calls: dict[str, int]) -> str:
    """Return the hint for what a step shows; empty where it is as it should be."""
    if not (calls["layer1"] and calls["layer2"]):
        return "The net that your function returns leaves a layer out. Return the whole net."
    if found["frozen"]:
        return "Weights are frozen, so they do not train. Checkpointing changes what is kept, and no gradient."
    if found["missing"]:
        return (
            "Some weights get no gradient. With use_reentrant=True, or without the argument, checkpoint asks whether "
            "an input needs a gradient, and samples do not: the layer never trains. Write use_reentrant=False."
        )
    if not found["same"]:
        return "The gradients are not those of the plain net: what backward computes must be what forward computed."
    if calls["layer2"] > 1:
        return "layer2 is computed twice as well: put checkpoint around layer1 alone."
    if calls["layer1"] < 2:
        return "layer1 is computed once: its activations are all kept, as without checkpoint."
    if calls["layer1"] > 2:
        return "layer1 is computed more than twice: there is a checkpoint inside of a checkpoint."
    return ""


def _times(calls: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(calls, f"{calls} times")


WRAPPED = Exercise(
    "5.5",
    "A checkpoint that is one",
    "Correct the function checkpointed(net) on the ranks: layer1 is computed again in backward, layer2 is not, and all "
    "gradients stay the same.",
    Nothing(),
    _wrapped,
    (
        "checkpoint(function, *inputs) calls the function with these inputs, now. When must that happen?",
        "In each forward: something must stand in the place of layer1 that calls checkpoint(layer, inputs).",
        "A module of a few lines: __init__ keeps the layer, and forward returns "
        "checkpoint(self.layer, inputs, use_reentrant=False).",
    ),
)

LESSON = Content("5", "Compute it twice", (BLOCKWISE, ARITHMETIC, SEGMENTS, BUDGET, WRAPPED))
