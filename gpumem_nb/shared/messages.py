"""Messages between the kernel and the ranks: plain values without behaviour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .allocator_settings import DEFAULT, AllocatorSettings
from .knobs import Knob
from .readings import METRICS, LiveBytes
from .settings import Settings
from .step_times import REDUCTION, StepLanes, StepTimes
from .units import DEFAULT_SEED


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of one rank's device at one moment, in bytes. What cannot be read is ``None``, as is no limit.

    ``live_bytes`` are held by tensors, ``reserved_bytes`` by the caching allocator, ``device_used_bytes`` by everything
    on the device; peaks count since the last reset.
    """

    live_bytes: int
    live_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    device_used_bytes: int | None
    limit_bytes: int | None


def least_limit(readings: Iterable[Reading | None]) -> int | None:
    """Return the limit of the rank with the least, in bytes; ``None`` where none is known."""
    return min((one.limit_bytes for one in readings if one and one.limit_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bytes of one step by owner, on one rank.

    Categories are those of :mod:`gpumem_nb.shared.categories`. ``peak_bytes`` is the highest live bytes of the step by
    the allocator's count; ``at_peak`` adds up to it but for what could not be explained, and ``at_rest`` to the live
    bytes after the step. ``phase`` and ``module`` say what ran at the peak;
    ``modules`` splits the peak as ``(module, category, bytes)``, largest first, for what belongs to a module.
    ``virtual`` bytes are a virtual GPU's; ``exact`` says that every allocation was seen, not only tensors.
    ``operators`` is how many calls of operators made tensors until backward ended, without those inside of others.
    ``host_bytes`` waited in host memory at most, beside the device's bytes, of ``host_limit_bytes`` that may;
    ``host_state_bytes`` of them are the optimizer's state.
    """

    peak_bytes: int
    phase: str
    module: str
    at_peak: dict[str, int]
    at_rest: dict[str, int]
    modules: tuple[tuple[str, str, int], ...]
    virtual: bool
    exact: bool
    operators: int = 0
    host_bytes: int = 0
    host_limit_bytes: int = 0
    host_state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step: from when to when, in milliseconds, which phase, and in which module (may be empty)."""

    begin_ms: float
    end_ms: float
    phase: str
    module: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step at the level of allocations, on one rank.

    ``time_ms`` counts from the step's start; ``live_bytes`` has for each category those that were live then, thinned
    out so that the peak stays; ``spans`` cover the step without gaps; ``step_s`` is how long the recorded step took.
    """

    rank: int
    step: int
    step_s: float
    time_ms: tuple[float, ...]
    live_bytes: dict[str, tuple[int, ...]]
    spans: tuple[Span, ...]
    ledger: Ledger


@dataclass(frozen=True, slots=True, init=False)
class DeviceUse:
    """NVML's readings of a device at one moment, read by the names of the readings: ``use.temperature_c``.

    Attributes:
        values: what could be read, by the names of :data:`gpumem_nb.shared.readings.METRICS`; any other is ``None``.
        missing: why something could not be read, by name.
    """

    values: dict[str, float]
    missing: dict[str, str]

    def __init__(self, missing: Mapping[str, str] | None = None, **values: float | None) -> None:
        # Frozen: only so can they be set.
        object.__setattr__(self, "values", {name: value for name, value in values.items() if value is not None})
        object.__setattr__(self, "missing", dict(missing or {}))

    def __getattr__(self, name: str) -> Any:
        if name in METRICS:
            return self.values.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return all readings by name, for tables and json; ``None`` for what could not be read."""
        return {name: self.values.get(name) for name in METRICS}


@dataclass(frozen=True, slots=True)
class Sample:
    """One optimizer step on one rank.

    ``time_s`` counts from the session's start, ``step_s`` is the step's duration, bytes are as in :class:`Reading`
    (peaks within this step), ``settings_id`` names the settings it ran under, ``event`` is empty, or ``flip`` on
    the first step under new settings, ``tried`` under those that autotune tries, or why the step was discarded
    (``oom``, ``error``, ``discarded``). ``ledger`` is there for the steps whose memory was recorded.
    ``learning_rate`` is that of the optimizer's first group, however it was set. ``loss_scale`` is what fp16 multiplied
    the loss by, ``None`` in other precisions and in steps without an update; the update was ``skipped`` when
    gradients overflowed under it. ``noise_scale`` is that of the gradients in samples, over the latest steps; there
    for the steps in which it was measured. ``times`` are those of its parts; not there for what was tried out.
    ``compression_error`` is the share of the rank's gradients (by their 2-norms) that compression took, in the
    steps in which it was measured. ``first``: no step of what is loaded was done on the rank before. Kernels are loaded
    and memory is allocated in it, so it says nothing of throughput. ``compile_s``: how long blocks were compiled in it.
    """

    rank: int
    step: int
    time_s: float
    loss: float | None
    step_s: float
    samples_per_s: float
    live_bytes: int
    live_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    device_used_bytes: int | None
    settings_id: int
    event: str = ""
    ledger: Ledger | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    noise_scale: float | None = None
    times: StepTimes | None = None
    compression_error: float | None = None
    first: bool = False
    compile_s: float = 0.0

    @property
    def prepares(self) -> bool:
        """Return whether it did what later steps find done, so that it says nothing of throughput."""
        return self.first or self.compile_s > 0

    @property
    def reduction_s(self) -> float | None:
        """Return how long the rank waited for averaged gradients after backward; shortest on the slowest rank."""
        return self.times[REDUCTION] if self.times else None

    @property
    def tried(self) -> bool:
        """Return whether it was done under settings that autotune tried, and not under the requested ones."""
        return self.event == "tried"

    @property
    def done(self) -> bool:
        """Return whether the step was done, and not discarded or undone."""
        return self.event in ("", "flip", "tried")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of one rank on its share of the validation data, after ``step`` steps.

    ``time_s`` and ``settings_id`` are as in :class:`Sample`. ``sums`` are those of the loss and of each number of the
    metric, by name, each times the samples of its micro-batch; empty on a rank without samples. ``seconds`` is how long
    it took, ``live_peak_bytes`` the highest live bytes in it.
    """

    rank: int
    step: int
    time_s: float
    settings_id: int
    samples: int
    sums: dict[str, float]
    seconds: float
    live_peak_bytes: int


LOGITS, SCORES = "logits", "scores"
"""What memory may run out for: what a loss takes the softmax of, and a score for every pair of tokens."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a rank could not finish a step.

    ``kind`` is ``oom``, ``error``, ``interrupted``, ``stall`` (the ranks came apart) or ``diverged`` (their weights
    differ); ``phase`` is the part of the step (``settings``, ``data``, ``forward``, ``backward``, ``recomputation``,
    ``reduction``, ``update``) or ``evaluation``; ``message`` is one sentence, ``traceback`` the text for those who want
    it. ``module`` is where in the model it was, as far as that can be told; ``asked_bytes`` and ``free_bytes`` are
    those wanted and left when memory ran out, ``None`` if not known. ``sample`` is a sentence about a sample that is
    much larger than others, if memory ran out for one; ``live`` who held the live bytes after memory had run out;
    ``filled`` for what it ran out, as far as the line that ran tells: ``LOGITS``, ``SCORES``, or empty;
    ``everywhere`` whether all ranks said the same, which the kernel notes.
    """

    rank: int
    kind: str
    phase: str
    message: str
    traceback: str = ""
    module: str = ""
    asked_bytes: int | None = None
    free_bytes: int | None = None
    sample: str = ""
    live: LiveBytes | None = None
    filled: str = ""
    everywhere: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that one rank keeps from step to step.

    ``bytes_per_step`` are those of what was found with one holder, ``bytes_so_far`` by how much live bytes have grown
    in all. ``tensor_bytes``, ``shape`` and ``dtype`` are the largest tensor's that a step leaves behind, ``made_at``
    the line that made it (empty where there is none). ``name`` is an expression for the holder, ``holder`` what it is
    in words, ``fix`` one sentence.
    """

    rank: int
    step: int
    bytes_per_step: int
    bytes_so_far: int
    tensor_bytes: int
    shape: tuple[int, ...]
    dtype: str
    made_at: str
    name: str
    holder: str
    fix: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The memory that one rank gave back, its device's readings before and after, and what holds the rest."""

    before: Reading
    after: Reading
    live: LiveBytes


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Take an automatic snapshot.

    It becomes ``folder/<generation>-<steps>.state``; all snapshots of all sessions together take at most
    ``space_bytes``. ``options`` are those of a ready-made workload, ``None`` for any other.
    """

    folder: str
    generation: int
    space_bytes: int
    options: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A training state that was written to a file, or why it was not.

    Not ``taken``: the ranks had come apart from one another, or an earlier one was still being written. The next one is
    not far.

    ``size_bytes`` is the file's (of what did not fit, the size it would have had), ``cpu_s`` what writing it took of a
    core, ``problem`` is empty or a sentence.
    """

    path: str
    steps: int
    size_bytes: int
    cpu_s: float
    problem: str = ""
    taken: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A whole number of steps under one settings object, the same on every rank. Zero steps only apply the settings.

    ``nudges`` counts the nudges sent before it: a later one ends the chunk at the next step boundary. A ``trial`` is
    one step that is measured and then undone on all ranks. ``snapshot`` is taken before the settings are applied.
    The memory of one step in ``ledger_steps`` is recorded, and of the first two under new settings; of none with 0.
    The model is evaluated after each step whose number ``eval_every`` divides, which ends the chunk (never with 0), and
    with ``evaluate`` at the end in any case. A ``traced`` chunk's steps are recorded; no nudge ends it. Of
    settings that autotune tries, ``instead_of`` says what was asked for, by knob: that is what is saved.
    """

    settings: Settings
    settings_id: int
    steps: int
    nudges: int = 0
    snapshot: SnapshotOrder | None = None
    trial: bool = False
    ledger_steps: int = 0
    eval_every: int = 0
    evaluate: bool = False
    traced: bool = False
    instead_of: dict[str, Any] = field(default_factory=dict)

    @property
    def tried(self) -> bool:
        """Return whether its settings are being tried by autotune, and were not requested."""
        return bool(self.instead_of)


@dataclass(frozen=True, slots=True)
class ChunkReply:
    """The result of a chunk on one rank; without samples if an earlier chunk under the same settings failed.

    ``snapshot_s`` is how long the chunk's snapshot held training up, in seconds; ``stored`` is the snapshot whose
    writing has ended since the last reply; ``leaks`` are those found since then. ``device_use`` is about a second old.
    ``notes`` are sentences to be said once.
    ``evaluated`` is there when the chunk ended with an evaluation that went well on all ranks. ``lanes`` are the
    steps of a traced chunk in which nothing failed on any rank.
    """

    rank: int
    samples: tuple[Sample, ...]
    reading: Reading
    failure: Failure | None = None
    snapshot_s: float = 0.0
    stored: Stored | None = None
    leaks: tuple[Leak, ...] = ()
    device_use: DeviceUse | None = None
    notes: tuple[str, ...] = ()
    evaluated: Evaluated | None = None
    lanes: tuple[StepLanes, ...] = ()


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The configuration of a rank at start.

    ``memory_limit`` in bytes, ``None`` for the device's own; ``stall_limit_s`` is how long it waits for other ranks.
    ``knobs`` are those that were registered in the notebook besides the built-in ones; ``seed`` is that of the random
    numbers which cells draw.
    """

    device: str
    memory_limit: int | None
    threads: int
    epoch_time_s: float
    stall_limit_s: float
    knobs: tuple[Knob, ...] = ()
    seed: int = DEFAULT_SEED


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The notebook's surroundings: its working directory, and where it looks for modules; absolute, and there."""

    folder: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The identity of a rank, shown by ``%hvd_status``.

    ``machine`` names the boot and the container that ``pid`` belongs to; ``cores`` are those that it may run on, by the
    system's numbers, no more of them than it may use at once; ``versions`` are those of what must be the same on all
    ranks, such as ``torch 2.13.0``; ``driver`` is the version of NVIDIA's, empty where there is none.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    device_name: str
    virtual: bool
    memory_limit: int | None
    threads: int
    note: str = ""
    machine: str = ""
    allocator: AllocatorSettings = DEFAULT
    cores: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    driver: str = ""
