"""Questions that ranks answer: scaling, traces, whether ranks are the same, facts of the model, facts for a script."""

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
        eager: whether it is a transformer of Hugging Face whose attention is eager though it could be SDPA.
        scores: of each softmax of attention that the model computes by itself, the bytes of its result, in one
            micro-batch of that step; empty where there is none, or SDPA could not take its place.
        logits: the shape of what the loss of a micro-batch of that step takes a softmax of; empty without any.
        groups: of the optimizer.
        weights: how many tensors these have.
        replaced: a sentence on variables that hold other objects than those attached by them; empty if none does.
        threads: that torch computes with by now; 0 where that was not asked.
    """

    state_of_frozen: TensorTotal = TensorTotal()
    wide_weights: TensorTotal = TensorTotal()
    inputs: tuple[InputFacts, ...] = ()
    eager: bool = False
    scores: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()
    groups: int = 1
    weights: int = 0
    replaced: str = ""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a rank about its training.

    Attributes:
        seed: of the data's order and of training's random numbers.
        stepped: whether a step was done since it was loaded, which shows what a loss takes, and gradients.
        order: of the samples: ``shuffled``, ``in turn``, or what decides it, in words.
        iterable, batched: whether the data can be iterated only, and brings micro-batches of its own.
        draws: whether samples or their collation draw random numbers.
        unsteady: whether they follow from when they were read, with equal random numbers too.
        loader: whether the data was handed over in a ``DataLoader``, with ``handed_on`` its options for workers.
        columns: ``tuple`` or ``dict`` of tensors, else empty.
        batch: what a micro-batch is: ``pair``, ``mapping`` or ``other``.
        eval_form: how the validation data was handed over; see ``HeldOut``. Empty without any.
        eval_changes: something that the latest evaluation changed, and a session put back; empty if nothing.
        loss, metric: what they are called with: ``batch`` (the model and the batch), ``outputs`` (the model's, and
            targets); ``model`` where the model returns its own loss, ``unknown`` where that shows when it is called.
        loss_key: whether the model returns its own loss in a plain dict.
        tokens: how an own loss counts labels over a step: ``shifted``, ``labels``, or empty where it does not.
        criterion, metric_module: whether they are modules (of a criterion: other than torch's, which have no modes).
        criterion_weights: whether the criterion is a module, with weights or buffers.
        optimizer: the knob as the rank has it: settings that were just changed may not have reached it.
        own_optimizer, own_scheduler: whether it came with one.
        groups: of parameters, in the optimizer.
        optimizer_hooks: whether the user registered hooks around the optimizer's update.
        optimizer_needs: names of what an optimizer's class must be given besides weights.
        own_rate: the learning rate that people knew the own optimizer by when it was loaded.
        tensor_rate: whether a learning rate of the optimizer is a tensor.
        optimizer_keeps: names of what an optimizer that is not torch's keeps beside its groups and state.
        loose: how many weights only the optimizer knows.
        dtypes: of what is trained.
        uncommon: whether there are weights or buffers whose type Horovod's broadcast does not take, or empty ones, or a
            state that holds more than tensors.
        unsent: a weight, frozen or not, whose type Horovod's broadcast does not take; empty without any.
        strided: a weight or buffer that is not contiguous in memory; empty without any.
        sparse: whether there are sparse gradients.
        absent: weights that had a gradient on no rank in any step since it was loaded, though they are not frozen.
        sometimes: those that had one in some of these steps, and in others on no rank.
        partial: whether some ever had one on some ranks only.
        evaluating: whether modules train in evaluation mode.
        buffers: whether the model has any.
        norms: whether blocks hold batch norms with statistics.
        changed_by_blocks: what else checkpointed blocks change when they run: the first of its names, or nothing;
            ``None`` before there was a step to see it in.
        blocks: names of those that checkpointing wraps.
        kept: which calls of operators each of these keeps the results of, by name of the operator, with
            ``checkpointing=selective``; nothing before a step was taken.
        head: name of the layer that makes logits; empty without one in the model.
        not_hidden: names of weights that have two dimensions and are no matrices of hidden layers.
        cache: whether the model has a configuration with a cache for generation.
        rate: of the optimizer's first group just now.
        asked_rate: what the settings asked for last.
        variables: Horovod's that the rank was started with, by name, where they are not its own defaults.
        hash_seed: ``PYTHONHASHSEED``, which is alike on all ranks.
        folder: in which the rank works.
        modules: top-level modules that were imported from outside of Python's environment, each with its folder, in
            the order in which Python looks into these.
        torch, horovod: versions.
    """

    seed: int
    stepped: bool
    order: str
    iterable: bool
    batched: bool
    draws: bool
    unsteady: bool
    loader: bool
    handed_on: tuple[str, ...]
    columns: str
    batch: str
    eval_form: str
    eval_changes: str
    loss: str
    metric: str
    loss_key: bool
    tokens: str
    criterion: bool
    metric_module: bool
    criterion_weights: bool
    optimizer: str
    own_optimizer: bool
    groups: int
    own_scheduler: bool
    optimizer_hooks: bool
    optimizer_needs: tuple[str, ...]
    own_rate: float
    tensor_rate: bool
    optimizer_keeps: tuple[str, ...]
    loose: int
    dtypes: tuple[str, ...]
    uncommon: bool
    unsent: str
    strided: str
    sparse: bool
    absent: tuple[str, ...]
    sometimes: tuple[str, ...]
    partial: bool
    evaluating: bool
    buffers: bool
    norms: bool
    changed_by_blocks: str | None
    blocks: tuple[str, ...]
    kept: tuple[dict[str, list[int]], ...]
    head: str
    not_hidden: tuple[str, ...]
    cache: bool
    rate: float
    asked_rate: float
    variables: dict[str, str]
    hash_seed: str
    folder: str
    modules: dict[str, str]
    torch: str
    horovod: str


@dataclass(frozen=True, slots=True)
class Cell:
    """Code that ran on the ranks, or what changed their random numbers or variables from outside.

    Attributes:
        source: plain Python; empty for what is not a cell.
        everywhere: whether it ran on all ranks.
        finished: whether it ended well.
        drew: whether it moved the random numbers that cells draw.
        seed: what these begin at from here on, for a seeding or a start of the ranks.
        pushed: variables that were defined from the notebook.
        opaque: whether it was a function of the notebook, whose code is not known.
        started: whether the ranks are new processes from here on.
        offered: names under which cells find what was attached, each with the variable that holds it; or with none, for
            what no cell has made.
    """

    source: str = ""
    everywhere: bool = True
    finished: bool = True
    drew: bool = False
    seed: int | None = None
    pushed: tuple[str, ...] = ()
    opaque: bool = False
    started: bool = False
    offered: tuple[tuple[str, str], ...] = ()

    @property
    def known(self) -> bool:
        """Return whether doing it again gives what it gave: its code is there, and succeeded on all ranks."""
        unmade = self.pushed or self.opaque or any(not variable for _, variable in self.offered)
        return self.everywhere and self.finished and not unmade
