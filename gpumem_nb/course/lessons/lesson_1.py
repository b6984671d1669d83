"""Lesson 1, *Where the bytes are*: what each parameter costs, what each sample costs, and what the device sees."""

from __future__ import annotations

from ...shared.categories import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from ...shared.units import format_bytes
from ..answers import BYTES_EACH, Nothing, Number, Size, Words
from ..evidence import DoesNotFit, Evidence, Measured
from ..exercise import Content, Exercise, Outcome, right, wrong
from ..judges import Mistake, measured, named

LOAD = "text-gpt width=256 depth=4"
SMALL, LARGE = 8, 16
ROOM_MIB = 115
SPARE_MIB = 10
FIVE = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, INPUTS)
_GROWS = 1.5  # of twice: a category that grows with the batch does so by a factor of two


def _small(evidence: Evidence) -> tuple[Measured, int]:
    """Return what a step of few samples holds, and how many parameters the model has."""
    evidence.needs(LOAD)
    loaded = evidence.session.workload
    assert loaded is not None
    return evidence.measure(batch_size=SMALL), loaded.parameters


def _for_good(found: tuple[Measured, int]) -> float:
    """Return the bytes that each parameter holds: weight, gradient and optimizer state."""
    step, parameters = found
    return sum(step.highest[name] for name in (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)) / parameters


EACH = Exercise(
    "1.1",
    "Bytes for each parameter",
    "The model is trained in fp32 by AdamW. Activations aside, how many bytes does each of its parameters need?",
    Number("12 or '12 bytes'", BYTES_EACH),
    measured(
        _small,
        _for_good,
        within=0.02,
        words=lambda value: f"{value:.3g} bytes",
        why="A weight and its gradient are 4 bytes each, and AdamW remembers two moments of 4 bytes: 16 in all. A "
        "model of a billion parameters needs 16 GB before it has seen its first sample.",
        mistakes=(
            Mistake(lambda _: 2, "16 bits are 2 bytes: that would be one number in half precision, and nothing else."),
            Mistake(lambda _: 4, "That is the weight alone: 32 bits. What does training keep beside each weight?"),
            Mistake(
                lambda _: 8, "That is two numbers. A weight and its gradient, or a weight and half of AdamW's memory?"
            ),
            Mistake(
                lambda _: 12, "That is three numbers, so one is left out: a gradient, or one of AdamW's two moments."
            ),
            Mistake(
                lambda _: 20, "That is five numbers: it counts the gradients twice, or keeps a second copy of weights."
            ),
            Mistake(lambda _: 24, "That is six numbers: moments belong to weights, gradients have none of their own."),
            Mistake(lambda _: 32, "That counts 8 bytes for each number: fp32 means 32 bits, which are 4 bytes."),
            Mistake(lambda _: 128, "Those are bits: 8 of them are a byte."),
        ),
        too_low="Something is left out. Count the numbers for each weight: the weight, what backward computes, and "
        "what AdamW remembers; each takes 4 bytes.",
        too_high="That is too much. Count the numbers that are kept for each weight; in fp32 each takes 4 bytes. "
        "Activations do not belong to parameters.",
    ),
    (
        "Which numbers are kept for each weight while training? The rows of %hvd_memory name them.",
        "fp32 is 32 bits, 4 bytes. Backward makes one number for each weight.",
        "AdamW remembers two numbers for each weight: the mean of its gradients, and of their squares.",
    ),
)


def _growing(evidence: Evidence) -> frozenset[str]:
    """Return the categories that grow with the batch."""
    evidence.needs(LOAD)
    few, more = (evidence.measure(batch_size=size).highest for size in (SMALL // 2, SMALL))
    return frozenset(name for name in FIVE if more[name] > _GROWS * few[name])


GROWING = Exercise(
    "1.2",
    "What a sample costs",
    "You double the batch. Which of parameters, gradients, optimizer state, activations and inputs need more memory?",
    Words(FIVE),
    named(
        _growing,
        why="Only what is computed from samples grows with them: the inputs, and the activations that backward needs. "
        "A gradient has the shape of its weight, whatever the batch.",
        mistakes=(
            (GRADIENTS, "There is one gradient for each weight, summed over the samples, and not one for each sample."),
            (OPTIMIZER_STATE, "AdamW remembers two numbers for each weight, not for each sample."),
            (PARAMETERS, "The model does not grow: its weights are the same for one sample and for a thousand."),
            (f"-{ACTIVATIONS}", "Forward keeps results for backward: of one sample, or of each sample?"),
            (f"-{INPUTS}", "Activations, yes. One more is small and still doubles: what goes into the model?"),
        ),
        otherwise="Ask of each: is there one for each weight, or one for each sample?",
    ),
    (
        "Ask of each category: is there one number for each weight, or one for each sample?",
        "Try it: %hvd_set batch_size=4, %hvd_train 4, %hvd_memory, and again with batch_size=8.",
        "Two of the five grow. One of them is far too small to matter here.",
    ),
)


def _large(evidence: Evidence) -> Measured:
    evidence.needs(LOAD)
    return evidence.measure(batch_size=LARGE)


def _of_sample(step: Measured, samples: int) -> float:
    """Return the bytes at the peak that one sample brings."""
    fixed = sum(step.ledger.at_peak.get(name, 0) for name in (PARAMETERS, GRADIENTS, OPTIMIZER_STATE))
    fixed += step.ledger.at_peak.get("communication", 0) + step.ledger.at_peak.get("other", 0)
    return (step.live_peak_bytes - fixed) / samples


def _peak_with(samples: int, step: Measured) -> float:
    """Return the live peak with so many samples, from that with the larger batch."""
    return step.live_peak_bytes - (LARGE - samples) * _of_sample(step, LARGE)


PEAK = Exercise(
    "1.3",
    "Predict a peak",
    f"You have seen the live peak with batch_size={SMALL // 2} and with batch_size={SMALL}. "
    f"What will it be with batch_size={LARGE}?",
    Size("100 MiB"),
    measured(
        _large,
        lambda step: step.live_peak_bytes,
        within=0.05,
        why=lambda step: (
            f"Each sample adds {format_bytes(round(_of_sample(step, LARGE)))}, and everything else stays: "
            "a straight line that does not begin at zero."
        ),
        mistakes=(
            Mistake(
                lambda step: 2 * _peak_with(SMALL, step),
                "That doubles everything. Weights, gradients and optimizer state are there once, whatever the batch.",
            ),
            Mistake(
                lambda step: 4 * _peak_with(SMALL // 2, step),
                "That is four times everything. Weights, gradients and optimizer state do not grow with the batch.",
            ),
            Mistake(
                lambda step: _peak_with(SMALL + SMALL // 2, step),
                f"That adds as much as {SMALL // 2} more samples did. This time {LARGE - SMALL} more come.",
            ),
            Mistake(
                lambda step: _peak_with(SMALL, step),
                "That is the peak of the smaller batch: activations grow with each sample.",
            ),
            Mistake(
                lambda step: LARGE * _of_sample(step, LARGE),
                "That is what the samples bring. The weights, and what belongs to them, are there, too.",
            ),
        ),
        too_low="Too little: what do 8 more samples bring, if 4 more brought the difference of the two peaks?",
        too_high="Too much: only activations grow with the batch. How much did 4 more samples add?",
    ),
    (
        "What did 4 more samples add? Subtract one peak from the other.",
        "From 4 to 8 samples came 4 more. From 8 to 16 come 8 more, and each brings the same.",
        "Add twice the difference of the two peaks to the larger one.",
    ),
)


_TOO_MANY = (
    "That is too many. Before the first sample comes, weights, optimizer state and Horovod's fusion buffer are there: "
    "only what is left of the room is for samples."
)


def _filled(_: None, evidence: Evidence) -> Outcome:
    """Judge the present settings by their live peak."""
    evidence.needs(LOAD)
    try:
        step = evidence.measure_now()
    except DoesNotFit as error:
        return wrong(f"{_TOO_MANY} {error}")
    peak_mib = step.live_peak_bytes / 2**20
    batch = evidence.session.settings.batch_size
    compared = {"batch_size": str(batch), "live peak": f"{peak_mib:.1f} MiB", "room": f"{ROOM_MIB} MiB"}
    if peak_mib > ROOM_MIB:
        return wrong(_TOO_MANY, compared)
    if peak_mib < ROOM_MIB - SPARE_MIB:
        return wrong(
            "There is room for more. If you divide the whole peak by its samples, you count the weights once for each "
            "of them. The difference of two peaks says what a sample costs.",
            compared,
        )
    return right(
        "First what is always there, then as many samples as the rest holds. The toolkit does the same sum: "
        "%hvd_predict --largest-batch",
        compared,
    )


FILL = Exercise(
    "1.4",
    "Fill the room",
    f"Change the settings until the live peak is at most {ROOM_MIB} MiB and within {SPARE_MIB} MiB of it.",
    Nothing(),
    _filled,
    (
        "Two peaks give you the cost of a sample, and that gives you what is there without samples.",
        "Peak = what is always there + samples × cost of a sample. Solve it for the samples.",
        "%hvd_predict batch_size=20 says what a setting would need, before you take it with %hvd_set batch_size=20",
    ),
)


def _freed(evidence: Evidence) -> tuple[int, int, int, int]:
    """Return what rank 0 had reserved before and after it gave its cache back, its live bytes, and its weights."""
    evidence.needs(LOAD)
    loaded = evidence.session.workload
    assert loaded is not None
    with evidence.trained(batch_size=LARGE):
        freed = evidence.session.free().freed[0]
    return freed.before.reserved_bytes, freed.after.reserved_bytes, freed.after.live_bytes, loaded.parameter_bytes


RESERVED = Exercise(
    "1.5",
    "Live, reserved, device",
    f"You train with batch_size={LARGE}. Between two steps you give the allocator's cache back (%hvd_memory --free). "
    "How much is still reserved?",
    Size("100 MiB"),
    measured(
        _freed,
        lambda found: found[1],
        within=0.15,
        why=lambda found: (
            f"Tensors hold {format_bytes(found[2])} live, and their memory cannot be given back. What was "
            f"reserved beyond that, up to {format_bytes(found[0])}, was the cache: nvidia-smi counts it, and other "
            "processes cannot have it."
        ),
        mistakes=(
            Mistake(
                lambda found: found[0],
                "That is what was reserved before: the cache is what goes back, all that no tensor uses.",
            ),
            Mistake(
                lambda found: found[3],
                "Those are the weights. What AdamW remembers must outlive the step, too, and Horovod keeps its buffer.",
            ),
            Mistake(
                lambda found: 3 * found[3],
                "Weights and optimizer state, yes. Horovod's fusion buffer is a tensor, too, and stays.",
            ),
            Mistake(
                lambda found: found[0] - found[1],
                "That is what went back. What was reserved and is in use by tensors stays.",
            ),
        ),
        too_low="More than that is live between two steps: weights, optimizer state, and Horovod's buffer.",
        too_high="Activations are gone between two steps, and what is cached goes back. What do tensors still hold?",
    ),
    (
        "Only what no tensor uses can go back. What do tensors hold between two steps?",
        "%hvd_memory has the column live: what is held now, as opposed to the peak.",
        "Reserved falls to live, rounded up to whole blocks.",
    ),
)

LESSON = Content("1", "Where the bytes are", (EACH, GROWING, PEAK, FILL, RESERVED))
