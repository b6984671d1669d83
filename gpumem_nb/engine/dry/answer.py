"""Answers of a dry run: forecasts for each GPU, and the largest batch that fits it."""

from __future__ import annotations

import bisect
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...memory.ledger.trace import Trace
from ...memory.prediction.forecast import forecast, from_the_start
from ...memory.prediction.scaling import SmallSteps
from ...shared.categories import COMMUNICATION
from ...shared.dry_run import DryAnswer, DryRun, Kernels, OnGpu, Target
from ...shared.errors import GpumemError, InvalidInput, WorkloadError, text_of
from ...shared.forecast import (
    DRY,
    DRY_CONVOLUTIONS,
    DRY_RECURRENT,
    MOST_BATCH,
    ON_CPU,
    SCALED,
    SMALL,
    VARYING,
    Forecast,
)
from ...shared.knobs.batch import shortened, why_fixed
from ...shared.seeds import DEFAULT_SEED
from ...shared.settings import Settings
from ...shared.units import format_bytes
from ...shared.workload import DataInfo, Workload
from .. import cells
from ..random_state import seeded
from . import cuda_autocast, kernels
from .batches import Batches
from .refusals import refused
from .step import DryStep

MOST_REAL_BYTES = 2**30
BYTES_A_PARAMETER = 5 * 4  # weight, gradient, two of Adam's and a copy of one, in fp32


def answer(question: DryRun) -> DryAnswer:
    """What these GPUs would need; a problem is said in the answer, and not raised."""
    torch.set_num_threads(1)
    try:
        given = _answered(question)
    except GpumemError as error:
        given = DryAnswer({}, question.settings, problem=str(error), of_input=isinstance(error, InvalidInput))
    except MemoryError as error:
        problem = f"The dry run needs more memory than it may take ({error})."
        given = DryAnswer({}, question.settings, problem=problem)
    return replace(given, peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _answered(question: DryRun) -> DryAnswer:
    for title, source in question.sources.items():
        cells.remember(source, title)
    workload: Workload = _unpickled(question.workload)
    batches = _batches(workload)
    settings = _settled(question, batches.info)
    found: dict[str, OnGpu] = {}
    parameters = 0
    for used in dict.fromkeys(asked.kernels for asked in question.gpus.values()):
        run = _Run(workload, batches, settings, used)
        for name, asked in question.gpus.items():
            if asked.kernels == used:
                found[name] = run.found(asked, question.largest)
        parameters = run.parameters
        run.close()
    return DryAnswer(found, settings, parameters)


def _unpickled(workload: bytes) -> Any:
    try:
        return pickle.loads(workload)
    except Exception as error:
        raise InvalidInput(
            f"The workload cannot be sent to another process ({type(error).__name__}: {error}). Define its factories "
            "in a cell or in a module that can be imported."
        ) from None


def _batches(workload: Workload) -> Batches:
    try:
        with seeded(DEFAULT_SEED):  # as on ranks
            return Batches(workload.data())
    except GpumemError:
        raise
    except (Exception, SystemExit) as error:
        most_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
        lacks = most_bytes > 0 and (isinstance(error, MemoryError) or "memory" in text_of(error).lower())
        why = f" A dry run may take at most {format_bytes(most_bytes)}: a few samples are enough for it." * lacks
        raise WorkloadError(f"{refused(error, 'data', 'made')}{why}") from None


def _settled(question: DryRun, info: DataInfo) -> Settings:
    """The settings with the data's own batch size, as ranks begin with it.

    Raises:
        InvalidInput: another size was named than that of the micro-batches that the data brings.
    """
    settings = question.settings
    if info.batch_size is None or settings.batch_size == info.batch_size:
        return settings
    if question.adapts:
        return settings.replace(batch_size=info.batch_size)
    if info.batched:
        raise InvalidInput(why_fixed(settings.batch_size, info))
    return settings


class _Run:
    """Steps of one workload under one setting with one set of kernels, taken when they are asked for.

    A model that cannot be run without memory takes two small steps with it, if they are not too large.

    Attributes:
        parameters: numbers in the model.
    """

    def __init__(self, workload: Workload, batches: Batches, settings: Settings, used: Kernels) -> None:
        self._given = workload, batches, shortened(settings), used
        self._installed = [kernels.install(used, fake=True), cuda_autocast.install()]
        self._traces: dict[int, Trace] = {}
        self._step: DryStep | None = None
        self._pair: tuple[SmallSteps, Trace] | None = None
        self._with_memory: list[Trace] = []
        self._how = "a step on fake tensors"
        self.parameters = 0

    def close(self) -> None:
        """Let operators be what they were."""
        self._installed = []

    def found(self, asked: Target, largest: bool) -> OnGpu:
        """What steps under these settings would need, and whether that fits."""
        forecast = self._forecast(asked, self._given[2].batch_size)
        assert self._step
        most = self._largest(asked) if largest and not self._given[1].fixed else None
        return OnGpu(forecast, self._limit(asked), self._step.convolves, self._how, most)

    def _forecast(self, asked: Target, batch_size: int) -> Forecast:
        trace = None if self._with_memory else self._at(batch_size)
        limit = self._limit(asked)
        if trace is None:
            steps = SmallSteps([small.with_held(asked.held_bytes, COMMUNICATION) for small in self._with_memory])
            return replace(forecast(steps, batch_size, limit), how=ON_CPU)
        return from_the_start(trace.with_held(asked.held_bytes, COMMUNICATION), limit, self._certainty)

    def _largest(self, asked: Target) -> int:
        """The largest batch size that fits with what a forecast may be wrong by; 0 if none does."""
        limit = self._limit(asked)
        if limit is None:
            return MOST_BATCH
        unlimited = replace(asked, limit_bytes=None)

        def needs(size: int) -> int:
            found = self._forecast(unlimited, size)
            return round(found.reserved_peak_bytes * (1 + found.error)) + asked.limit_error_bytes

        begin = self._given[2].batch_size
        first, second = needs(begin), needs(2 * begin)
        guess = begin + (limit - first) // max(1, (second - first) // begin)
        return _last(lambda size: needs(size) <= limit, min(max(1, guess), MOST_BATCH))

    def _limit(self, asked: Target) -> int | None:
        """Of what may be reserved, once a step was taken."""
        if asked.limit_bytes is None:
            return None
        convolves = bool(self._step and self._step.convolves)
        return max(1, asked.limit_bytes - asked.convolution_bytes * convolves)

    @property
    def _certainty(self) -> str:
        if self._given[1].varies:
            return VARYING
        if self._step and self._step.recurs:
            return DRY_RECURRENT
        return DRY_CONVOLUTIONS if self._step and self._step.convolves else DRY

    def _at(self, batch_size: int) -> Trace | None:
        if batch_size not in self._traces and len(self._traces) > 1 and self._pair is None:
            self._pair = self._paired()
        if batch_size not in self._traces and self._pair and self._pair[0].how == SCALED:
            line = self._pair[0].continued(batch_size)
            return replace(self._pair[1], batch_size=batch_size, size=line.size, rest_bytes=line.rest_bytes)
        if batch_size not in self._traces:
            trace = self._dry(batch_size)
            if trace is None:
                return None
            self._traces[batch_size] = trace
        return self._traces[batch_size]

    def _paired(self) -> tuple[SmallSteps, Trace]:
        """Two steps from which others follow, larger ones if some operator works otherwise on few samples."""
        small, large = sorted(self._traces.values(), key=lambda trace: trace.batch_size)[-2:]
        steps = SmallSteps([small, large])
        larger = self._dry(2 * large.batch_size) if steps.how != SCALED else None
        return (SmallSteps([large, larger]), larger) if larger else (steps, large)

    def _dry(self, batch_size: int) -> Trace | None:
        """A step without memory; ``None`` if it cannot be taken, and small steps were taken with memory instead."""
        try:
            self._step = self._step or DryStep(*self._given)
            self.parameters = self._step.parameters
            return self._step.trace(batch_size)
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            self._take_with_memory(refused(error, self._step.phase if self._step else "model"))
            return None

    def _take_with_memory(self, refusal: WorkloadError) -> None:
        """Small steps on the CPU; one, where batches have no other size."""
        workload, batches, settings, used = self._given
        self._refuse_large(refusal)
        self._installed = [kernels.install(used, fake=False), cuda_autocast.install()]
        sizes = (settings.batch_size,) if batches.fixed else SMALL
        self._step = None
        try:
            self._step = DryStep(workload, batches, settings, used, fake=False)
            self.parameters = self._step.parameters
            self._refuse_large(refusal)  # a model that could not be built without memory was not counted before
            self._with_memory = [self._step.trace(size) for size in sizes]
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            why = refused(error, self._step.phase if self._step else "model", "run on the CPU")
            raise WorkloadError(f"{refusal} {why} Mend that line, or start ranks and predict there.") from None
        named = " and ".join(map(str, sizes))
        steps = "a step" if len(sizes) == 1 else "steps"
        self._how = f"{steps} on the CPU with batch_size {named} (attention as there). {refusal}"

    def _refuse_large(self, refusal: WorkloadError) -> None:
        if self.parameters * BYTES_A_PARAMETER > MOST_REAL_BYTES:
            raise WorkloadError(
                f"{refusal} Small steps on the CPU would need more than {format_bytes(MOST_REAL_BYTES)} of memory. "
                "Predict a smaller model of the same kind, or start ranks (%hvd_start) and predict there."
            )


def _last(fits: Callable[[int], bool], guess: int) -> int:
    """The largest size that fits, looked for around a guess; 0 if none does."""
    step, low, high = max(1, guess // 64), 0, MOST_BATCH
    at = guess
    while low < at < high:
        low, high = (at, high) if fits(at) else (low, at)
        at, step = (at + step if low == at else at - step), 2 * step
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda size: not fits(size))
