"""Forecasts of steps that were not taken yet: of a rank, and of a dry run, with the questions to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .messages import Failure, Reading
from .settings import Settings

SMALL = (8, 16)
"""Batch sizes of the steps from which larger ones follow; see docs/prediction.md."""
FEWEST = (2, 4)
"""The same where those run out of memory; some models mix pairs, so it is not one sample."""
MOST_BATCH = 2**20
"""Of the batch sizes that are looked through where the data set none."""

RECORDED, SCALED, BY_OPERATORS, BY_PEAKS = "recorded", "scaled", "scaled by operators", "through two peaks"
BY_PEAKS_AT_MOST = "through two peaks, at most, because garbage_collection_threshold may give more of it back,"
VARYING = "roughly, because samples differ in size,"
DRY, DRY_CONVOLUTIONS = "without running it", "without running it, roughly, because of cuDNN's workspaces,"
DRY_CONVOLUTIONS_16_BIT = "without running it, in 16 bit, roughly, because of cuDNN's workspaces,"
DRY_RECURRENT = "without running it, roughly, because what cuDNN keeps of recurrent layers is not documented,"
ON_CPU = "roughly, as on the CPU,"
UPDATE_TRAINED, UPDATE_ON_SCRATCH = "updates as in training", "updates timed on scratch tensors"
UPDATE_SCALED, UPDATE_UNKNOWN = "updates scaled from those of training", "without the time of updates"
OTHERWISE_SET = "as a model of the caching allocator has it,"
ERRORS = {
    RECORDED: 0.02,
    SCALED: 0.02,
    BY_OPERATORS: 0.05,
    BY_PEAKS: 0.15,
    BY_PEAKS_AT_MOST: 0.15,
    VARYING: 0.5,
    DRY: 0.18,
    DRY_CONVOLUTIONS: 0.3,
    DRY_CONVOLUTIONS_16_BIT: 0.3,
    DRY_RECURRENT: 0.5,
    ON_CPU: 0.5,
    OTHERWISE_SET: 0.1,
}
"""By how it was found: the share by which reserved bytes came out higher or lower in 95 % of cases, or less often.

Those of 0.5 are estimates for which no measurement stands.
"""
LIVE_ERRORS = {DRY: 0.04, DRY_CONVOLUTIONS: 0.16, DRY_CONVOLUTIONS_16_BIT: 0.05}
"""The same of live bytes, where these decide without a step: the jobs of an H200 lie within it.

Those of an A100, of which live bytes were not measured, needed up to 16 % more than predicted with convolutions in
fp32.

What is reserved beyond them says less: the caching allocator gives segments back before it runs out.
"""
SEGMENT_BYTES = 2 * 2**20
"""The caching allocator reserves no less at a time, so no error is smaller."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""What it reserves for tensors of 1 to 10 MiB; a line through two peaks cannot know whether it takes one more."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory of a step on one rank, as its own small steps tell, in bytes.

    Attributes:
        live_peak_bytes: the highest live bytes, to which ``at_peak`` adds up by category.
        reserved_peak_bytes: what the caching allocator would hold from the device, beginning with an empty cache.
        fits: whether it stays within the rank's limit, perhaps after cached segments were given back.
        at_peak: live bytes at the peak by category.
        phase, module: what runs at the peak.
        how: ``recorded`` (a step of this very batch size), ``scaled`` (two smaller ones, allocation by allocation),
            ``scaled by operators`` (some operators' own memory as a whole), ``through two peaks`` (at most, where
            garbage is collected), or roughly, where samples differ in size.
        fits_recut: whether it also stays within the limit, error included, where a step of another size has cut the
            cache into other pieces. Training at the limit would run out there.
        longest_bytes: the most that will be reserved for micro-batches with the largest sample, where samples differ.
        sample: a sentence about that sample, if it is much larger than others.
        block_bytes: by how much the live peak would grow at most for each block more of the model; ``None`` where that
            is not known.
        host_bytes: what waits in host memory at most, of ``host_limit_bytes`` that this rank may have there.
    """

    live_peak_bytes: int
    reserved_peak_bytes: int
    fits: bool
    at_peak: Mapping[str, int]
    phase: str
    module: str
    how: str
    fits_recut: bool = True
    longest_bytes: int | None = None
    sample: str = ""
    block_bytes: int | None = None
    host_bytes: int = 0
    host_limit_bytes: int = 0

    @property
    def host_is_short(self) -> bool:
        """Whether more would have to wait in host memory than may."""
        return self.host_bytes > self.host_limit_bytes

    @property
    def live_error(self) -> float | None:
        """The share by which live bytes may come out higher or lower, where these decide what fits; else ``None``."""
        return LIVE_ERRORS.get(self.how)

    @property
    def deciding_bytes(self) -> tuple[int, int]:
        """Between which will be what must be within the limit: live bytes where these decide, else reserved ones."""
        error = self.live_error
        if error is None:
            return self.low_bytes, self.high_bytes
        return round(self.live_peak_bytes * (1 - error)), round(self.live_peak_bytes * (1 + error))

    def with_another_allocator(self) -> Forecast:
        """Return the same, marked as replayed under allocator settings that this process does not have."""
        return self if self.how in (VARYING, BY_PEAKS_AT_MOST) else replace(self, how=OTHERWISE_SET)

    @property
    def error(self) -> float:
        """The share by which reserved bytes may come out higher or lower."""
        return ERRORS[self.how]

    @property
    def error_bytes(self) -> int:
        """Return the error of the reserved bytes, up or down."""
        least = LARGE_SEGMENT_BYTES if self.how in (BY_PEAKS, BY_PEAKS_AT_MOST) else SEGMENT_BYTES
        return max(round(self.error * self.reserved_peak_bytes), least)

    @property
    def low_bytes(self) -> int:
        """The least that will be reserved; no less than what will be live at least."""
        least = round(self.live_peak_bytes * (1 - self.error))
        return max(least, self.reserved_peak_bytes - self.error_bytes)

    @property
    def high_bytes(self) -> int:
        """The most that will be reserved. A step fits for certain if this and any layout of the cache fit."""
        if self.longest_bytes is not None:
            return max(self.reserved_peak_bytes, self.longest_bytes)
        return self.reserved_peak_bytes + self.error_bytes


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The answer of one rank.

    Attributes:
        steps: that were done by then.
        reading: of the rank's device.
        seconds: what the steps took.
        limit_bytes: what this process may reserve, within its own limit and not taken by others; ``None`` for no limit.
        of: a forecast for each batch size that was asked for; none when a small step could not be done on some rank.
        largest: the largest batch size that fits for certain, if that was asked; 0 if none does.
        likely: the same without the error of forecasts.
        failure: why this rank could not do a small step.
        failed_batch: the batch size of the small step that could not be done; 0 if all could.
        update_undone: why the optimizer's update was taken and undone; empty where a dry run told what it needs.
    """

    steps: int
    reading: Reading
    seconds: float
    limit_bytes: int | None
    of: tuple[Forecast, ...] = ()
    largest: int = 0
    likely: int = 0
    failure: Failure | None = None
    failed_batch: int = 0
    update_undone: str = ""

    @property
    def least_bytes(self) -> int:
        """Return the least that the step needs that ran out of memory: more than the limit, whatever it said itself.

        A library may not say what it asked for, and other processes on the device may have taken what seemed free.
        """
        asked, free = (self.failure.asked_bytes or 0, self.failure.free_bytes or 0) if self.failure else (0, 0)
        return (self.limit_bytes or 0) + max(1, asked - free)

    def with_longest(self, others: Forecasts, sample: str, all_seen: bool) -> Forecasts:
        """Return the same with what micro-batches of the largest sample need.

        Args:
            others: forecasts of these, for the same batch sizes; or why they could not be done.
            sample: a sentence about it.
            all_seen: whether there is no larger one.
        """
        if others.failure and not self.of and others.failure.kind == "oom":
            return others  # no size can be looked for from there
        if len(others.of) != len(self.of) and (others.failure is None or others.failure.kind != "oom"):
            return self
        if others.failure:
            most = [max(others.least_bytes, one.high_bytes) for one in self.of]
            sample = f"{sample} A step of {others.failed_batch} of the largest runs out of memory.".lstrip()
        else:
            most = [
                other.high_bytes if all_seen else max(other.high_bytes, one.high_bytes)
                for one, other in zip(self.of, others.of, strict=True)
            ]
        on_host = [other.host_bytes for other in others.of] or [one.host_bytes for one in self.of]
        of = tuple(
            replace(one, longest_bytes=size, sample=sample, host_bytes=max(one.host_bytes, waits))
            for one, size, waits in zip(self.of, most, on_host, strict=True)
        )
        largest = others.largest if all_seen else min(self.largest, others.largest)
        return replace(self, of=of, largest=largest, likely=min(self.likely, others.likely))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Whole steps that were undone, on one rank.

    Attributes:
        forecasts: what the first of them needed, or why it could not be done.
        steps_s: how long each would have taken with its update, in seconds; none where one failed on some rank.
        update: how it is known what the update takes.
    """

    forecasts: Forecasts
    steps_s: tuple[float, ...] = ()
    update: str = ""


SEARCH_S = 120
"""For which the largest batches are looked for, once it is known what was asked for."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a GPU, as far as memory depends on them.

    Attributes:
        ampere: those of compute capability 8.0 and later, such as flash attention and fused attention of bf16.
        gemm_workspace_bytes: what cuBLAS keeps for each of its handles.
    """

    ampere: bool
    gemm_workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a question that is about one GPU.

    Attributes:
        kernels: that it has.
        held_bytes: each piece of memory that Horovod asks of torch's allocator and keeps.
        limit_bytes: of what may be reserved; ``None`` without a limit.
        limit_error_bytes: by how much that may be wrong.
        convolution_bytes: by how much it is less where convolutions are computed.
    """

    kernels: Kernels
    held_bytes: tuple[int, ...]
    limit_bytes: int | None
    limit_error_bytes: int
    convolution_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """A question.

    Attributes:
        workload: a ``Workload``, pickled, because it may be the user's own code.
        settings: under which to take the steps.
        gpus: what is asked for each GPU, by name.
        largest: whether the largest batch size that fits is asked for as well, and where nothing fits, what would.
        adapts: whether a batch size that the data brings comes before that of the settings, which was not named.
        ranks: how many train together.
        sources: of code that lies in no file, such as cells, by what stands in place of the file's name.
    """

    workload: bytes
    settings: Settings
    gpus: Mapping[str, Target]
    largest: bool
    adapts: bool = False
    ranks: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lighter:
    """Settings that need less memory than those that were asked for, of the same global batch, and what they need."""

    settings: Settings
    of: OnGpu


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The result for one GPU.

    Attributes:
        forecast: of a step.
        limit_bytes: of what may be reserved, with regard to convolutions; ``None`` without a limit.
        convolves: whether convolutions are computed.
        how: the steps were taken, in words.
        largest: the largest batch size that fits, 0 if none does; ``None`` if not asked for, the data says it, or it is
            not known.
        unknown: why the largest batch size is not known, as a sentence; empty if it is, or was not asked for.
        lighter: what was tried where it does not fit, the mildest first; ``None`` where that was not asked for, is not
            needed, or did not come to its end.
    """

    forecast: Forecast
    limit_bytes: int | None
    convolves: bool
    how: str
    largest: int | None = None
    unknown: str = ""
    lighter: tuple[Lighter, ...] | None = None


@dataclass(frozen=True, slots=True)
class DryAnswer:
    """An answer, whole in itself; a later one to the same question knows more.

    Attributes:
        of: what was found, by the GPU's name; nothing if there is a problem.
        settings: under which the steps were taken, with the data's own batch size.
        parameters: numbers in the model.
        problem: why there is no forecast, as a sentence; empty if there is.
        of_input: whether what was asked for cannot be used, and nothing is wrong with the workload.
        peak_rss_bytes: of the process that answers; what it needed to find this.
        next: what is looked for next, in words, and how much of everything is done (0 to 1).
    """

    of: Mapping[str, OnGpu]
    settings: Settings
    parameters: int = 0
    problem: str = ""
    of_input: bool = False
    peak_rss_bytes: int = 0
    next: tuple[str, float] = ("", 1.0)
