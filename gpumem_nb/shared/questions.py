"""Messages about questions that ranks answer: scaling, traces, whether ranks are the same, facts of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .messages import Failure
from .step_times import StepTimes

SWEEP_BYTES = tuple(2**power for power in range(10, 27, 2))
"""Sizes of messages, from 1 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True)
class StepsAmong:
    """Steps that the first so many ranks took without the others, and undid.

    Attributes:
        times: of each step; none where one failed, and of ranks that waited meanwhile.
        sent_bytes: of gradients, in one step.
        failure: why this rank could not do one.
    """

    times: tuple[StepTimes, ...] = ()
    sent_bytes: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """All-reduces of messages of several sizes.

    Attributes:
        seconds: the median for each size in bytes.
    """

    seconds: Mapping[int, float]


TIMELINE = "HOROVOD_TIMELINE"
"""Horovod's variable, read when it starts: the file of its timeline."""
HEAD = b'{"displayTimeUnit": "ms", "otherData": {"written by": "gpumem_nb"}, "traceEvents": [\n'
BETWEEN = b",\n"
TAIL = b"\n]}\n"


@dataclass(frozen=True, slots=True)
class TraceOrder:
    """Instructions for each rank's part of a trace.

    Attributes:
        titles: what the ranks are called, by their numbers.
        later_s: for each rank how many seconds its host's clock is behind that of rank 0's host.
        origin_s: when the trace begins, by the clock of rank 0's host.
    """

    titles: tuple[str, ...]
    later_s: tuple[float, ...]
    origin_s: float


@dataclass(frozen=True, slots=True)
class TracePart:
    """A rank's part of a trace: so many events, in so many compressed bytes; or why it has nothing."""

    events: int = 0
    size_bytes: int = 0
    problem: str = ""


MOST_SAMPLES = 100_000  # of each rank that are compared


@dataclass(frozen=True, slots=True)
class SeenSamples:
    """The samples that a rank sees, each as a number.

    Attributes:
        numbers: of the samples in the dataset, or checksums.
        what: they are: samples, or micro-batches.
        numbered: whether they are numbers in the dataset, and no checksums.
        repeats: whether the rank sees some more than once.
        dataset: a checksum of some samples of the dataset, by which datasets are told apart; ``None`` if not known.
    """

    numbers: tuple[int, ...]
    what: str = "samples"
    numbered: bool = True
    repeats: bool = False
    dataset: int | None = None


@dataclass(frozen=True, slots=True)
class SyncLook:
    """Checksums of one rank's tensors by name, and which samples it sees.

    Attributes:
        weights: of parameters.
        buffers: of what is no parameter, such as statistics.
        gradients: of parameters that have one; empty where none has.
        samples: ``None`` if not asked for, or they cannot be told apart.
    """

    weights: Mapping[str, int]
    buffers: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    samples: SeenSamples | None = None


@dataclass(frozen=True, slots=True)
class TensorTotal:
    """Tensors of one kind: how many bytes, how many tensors, and the name of the largest (empty without any)."""

    bytes: int = 0
    tensors: int = 0
    largest: str = ""


@dataclass(frozen=True, slots=True)
class InputFacts:
    """One tensor of a micro-batch.

    Attributes:
        shape, dtype: of the tensor.
        bytes: what it takes.
        enough: the smallest type that holds its values, as float32 does floating ones; ``dtype`` where that is it.
        spare_bytes: what it would take less in that.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    enough: str
    spare_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of one rank, in bytes.

    Attributes:
        state_of_frozen: what the optimizer remembers of weights that are frozen, and will not be updated.
        wide_weights: weights in float64.
        inputs: of the first micro-batch of a step that was undone; empty where that was not asked, or failed.
        eager: layers and heads of a transformer whose attention is eager though it could be SDPA; ``None`` of others.
        vocabulary: how many logits a token has; 0 where the model makes none.
        groups: of the optimizer.
        weights: how many tensors these have.
    """

    state_of_frozen: TensorTotal = TensorTotal()
    wide_weights: TensorTotal = TensorTotal()
    inputs: tuple[InputFacts, ...] = ()
    eager: tuple[int, int] | None = None
    vocabulary: int = 0
    groups: int = 1
    weights: int = 0

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Rows and tokens of a row of the micro-batch; ``None`` where it was not looked at, or has none."""
        found = (one.shape for one in self.inputs if "int" in one.dtype and len(one.shape) == 2)
        return next(((rows, length) for rows, length in found), None)
