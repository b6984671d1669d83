"""Steps of one workload under one setting without memory: what they need, and the largest batch that fits."""

from __future__ import annotations

import bisect
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from ...memory.ledger.trace import Trace
from ...memory.prediction import SmallSteps, forecast, from_the_start
from ...shared.categories import COMMUNICATION
from ...shared.errors import GpumemError, WorkloadError, text_of
from ...shared.forecast import (
    DRY,
    DRY_CONVOLUTIONS,
    DRY_CONVOLUTIONS_16_BIT,
    DRY_RECURRENT,
    MOST_BATCH,
    ON_CPU,
    SCALED,
    VARYING,
    Forecast,
    Kernels,
    OnGpu,
    Target,
)
from ...shared.knobs.step import shortened
from ...shared.settings import Settings
from ...shared.units import DEFAULT_SEED, format_bytes
from ...shared.workload import Handles, Workload
from ..random_state import seeded
from . import kernels
from .batches import Batches
from .hollow import Given, made
from .step import DryStep, refused

MOST_REAL_BYTES = 2**30
_SMALL = (2, 4)  # batch sizes of the steps that are taken on the CPU
_FIX = "Fix that line, or start ranks (%hvd_start) and predict there."
_DO_WITHOUT = "Let the constructor do without that value, or start ranks (%hvd_start) and predict there."
BYTES_A_PARAMETER = 5 * 4  # weight, gradient, two of Adam's and a copy of one, in fp32


class Run:
    """Steps of one workload under one setting with one set of kernels, which operators have inside of ``with`` alone.

    A model that cannot be built without memory is built with it, and takes its steps without. One that cannot be run
    without memory takes two small steps with it, if they are not too large.

    Attributes:
        parameters: numbers in the model.
    """

    def __init__(self, given: Given, batches: Batches, settings: Settings, used: Kernels, ranks: int = 1) -> None:
        self._given, self._ranks = (given, batches, shortened(settings), used), ranks
        self._workload = given
        self._installed: list[Any] = []
        self._traces: dict[int, Trace] = {}
        self._step: DryStep | None = None
        self._pair: tuple[SmallSteps, Trace] | None = None
        self._line_holds_to = 0
        self._with_memory: list[Trace] = []
        self._convolves = False
        self._certainty = ON_CPU
        self._how = "a step on fake tensors"
        self.parameters = 0

    def __enter__(self) -> Self:
        self._install(fake=not self._with_memory)
        return self

    def __exit__(self, *_: object) -> None:
        self._installed = []

    def _install(self, fake: bool) -> None:
        self._installed = [kernels.install(self._given[3], fake), kernels.install_autocast()]

    @property
    def _begin(self) -> int:
        batch_size: int = self._given[2].batch_size
        return batch_size

    def take(self) -> None:
        """Take a step as the settings say, or small ones on the CPU if it cannot be taken without memory.

        Raises:
            WorkloadError: neither can be taken.
        """
        refusal = self._tried()
        if refusal and self._step is None:
            self._workload = self._built(refusal)
            self._how = f"a step on fake tensors, after building the model with memory for its weights. {refusal}"
            refusal = self._tried()
        if refusal:
            self._workload = self._given[0]
            self._take_with_memory(refusal)

    def _tried(self) -> WorkloadError | None:
        """Take a step without memory, or say why that cannot be done."""
        try:
            self._stepped(self._begin)
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            return refused(error, self._phase)
        return None

    def _built(self, refusal: WorkloadError) -> Workload:
        """Return the workload with memory for the model's weights, whose values its constructor asks for."""
        try:
            with seeded(DEFAULT_SEED):
                workload = made(self._given[0])
                model = workload.model()
                return replace(workload, model=lambda: model)
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            why, lacks = refused(error, "model", "built with memory"), lack(error)
            raise WorkloadError(f"{refusal} {why}{lacks} {_DO_WITHOUT if lacks else _FIX}") from None

    @property
    def handles(self) -> Handles:
        """Return what knobs that free memory can take hold of, as far as that is known without memory."""
        return self._step.handles if self._step else Handles()

    def found(self, asked: Target, batch_size: int | None = None) -> OnGpu:
        """Return what steps under these settings would need, or in micro-batches of another size."""
        forecast = self._forecast(asked, batch_size or self._begin, self._limit(asked))
        return OnGpu(forecast, self._limit(asked), self._convolves, self._how)

    def largest(self, asked: Target) -> int:
        """Return the largest batch size that fits with what a forecast may be wrong by; 0 if none does.

        Raises:
            WorkloadError: a step of another size cannot be taken, so it is not known.
        """
        limit = self._limit(asked)
        if limit is None:
            return MOST_BATCH
        try:
            return self._largest(asked, limit)
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            raise WorkloadError(f"With another batch_size: {refused(error, self._phase)}") from None

    def _largest(self, asked: Target, limit: int) -> int:
        def needs(size: int, stepped: bool = False) -> int:
            return self._forecast(asked, size, None, stepped).deciding_bytes[1] + asked.limit_error_bytes

        def fits(size: int, stepped: bool = False) -> bool:
            return surely_within(self._forecast(asked, size, limit, stepped), asked, limit)

        sizes = self._begin, 2 * self._begin
        first, second = map(needs, sizes)
        guess = self._begin + (limit - first) // max(1, (second - first) // self._begin)
        size = _last(fits, min(max(1, guess), MOST_BATCH))
        if size <= self._line_holds_to or self._with_memory:
            return size
        expected, real = needs(size), needs(size, stepped=True)
        if fits(size, stepped=True):
            self._line_holds_to = size if real == expected else self._line_holds_to
            return size
        # Some of it does not lie on a line, such as what grows with the square of the batch.
        roots = np.roots(np.polyfit((*sizes, size), (first - limit, second - limit, real - limit), 2))
        guess = int(max(roots.real, default=1))
        return _last(partial(fits, stepped=True), min(max(1, guess), size))

    def _forecast(self, asked: Target, batch_size: int, limit: int | None, stepped: bool = False) -> Forecast:
        """Forecast a step of this size; take it if ``stepped``, or if steps of other sizes do not tell."""
        if self._with_memory:
            steps = SmallSteps([small.with_held(asked.held_bytes, COMMUNICATION) for small in self._with_memory])
            return replace(forecast(steps, batch_size, limit), how=ON_CPU)
        trace = self._stepped(batch_size) if stepped else self._at(batch_size)
        return from_the_start(trace.with_held(asked.held_bytes, COMMUNICATION), limit, self._certainty)

    def _limit(self, asked: Target) -> int | None:
        """Return how many bytes may be reserved; a step must have been taken."""
        if asked.limit_bytes is None:
            return None
        return max(1, asked.limit_bytes - asked.convolution_bytes * self._convolves)

    def _at(self, batch_size: int) -> Trace:
        if batch_size not in self._traces and len(self._traces) > 1 and self._pair is None:
            self._pair = self._paired()
        if batch_size not in self._traces and self._pair and self._pair[0].how == SCALED:
            line = self._pair[0].continued(batch_size)
            return replace(self._pair[1], batch_size=batch_size, size=line.size, rest_bytes=line.rest_bytes)
        return self._stepped(batch_size)

    def _paired(self) -> tuple[SmallSteps, Trace]:
        """Two steps from which others follow, larger ones if some operator works otherwise on few samples."""
        small, large = sorted(self._traces.values(), key=lambda trace: trace.batch_size)[-2:]
        steps = SmallSteps([small, large])
        if steps.how == SCALED:
            return steps, large
        larger = self._stepped(2 * large.batch_size)
        return SmallSteps([large, larger]), larger

    def _stepped(self, batch_size: int) -> Trace:
        """Return a step without memory."""
        if batch_size not in self._traces:
            _, batches, settings, used = self._given
            self._step = self._step or DryStep(self._workload, batches, settings, used, self._ranks)
            self._traces[batch_size] = self._step.trace(batch_size)
            self._learn(self._step)
        return self._traces[batch_size]

    def _learn(self, step: DryStep) -> None:
        self.parameters, self._convolves = step.parameters, step.convolves
        if self._given[1].varies:
            self._certainty = VARYING
        elif step.recurs:
            self._certainty = DRY_RECURRENT
        elif step.convolves:
            self._certainty = DRY_CONVOLUTIONS_16_BIT if step.narrows else DRY_CONVOLUTIONS
        else:
            self._certainty = DRY

    @property
    def _phase(self) -> str:
        return self._step.phase if self._step else "model"

    def _take_with_memory(self, refusal: WorkloadError) -> None:
        """Small steps on the CPU; one, where batches have no other size."""
        given, batches, settings, used = self._given
        self.parameters = self._step.parameters if self._step else 0
        self._refuse_large(refusal)
        self._install(fake=False)
        sizes = (settings.batch_size,) if batches.fixed else _SMALL
        self._step = None
        try:
            self._step = DryStep(given, batches, settings, used, self._ranks, fake=False)
            self.parameters = self._step.parameters
            self._refuse_large(refusal)  # a model that could not be built without memory was not counted before
            self._with_memory = [self._step.trace(size) for size in sizes]
            self._convolves = self._step.convolves
        except GpumemError:
            raise
        except (Exception, SystemExit) as error:
            why = refused(error, self._phase, "run on the CPU")
            raise WorkloadError(f"{refusal} {why} {_FIX}") from None
        self._step = None  # and its memory
        named = " and ".join(map(str, sizes))
        steps = "a step" if len(sizes) == 1 else "steps"
        self._how = f"{steps} on the CPU with batch_size {named}. {refusal}"

    def _refuse_large(self, refusal: WorkloadError) -> None:
        if self.parameters * BYTES_A_PARAMETER > MOST_REAL_BYTES:
            raise WorkloadError(
                f"{refusal} Small steps on the CPU would need more than {format_bytes(MOST_REAL_BYTES)} of memory. "
                "Predict a smaller model of the same kind, or start ranks (%hvd_start) and predict there."
            )


def surely_within(found: Forecast, asked: Target, limit: int | None) -> bool:
    """Return whether steps fit, with what forecast and limit may be wrong by."""
    return limit is None or (found.deciding_bytes[1] + asked.limit_error_bytes <= limit and found.fits)


def _last(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest size that fits, looked for around a guess; 0 if none does."""
    step, low, high = max(1, guess // 64), 0, MOST_BATCH
    at = guess
    while low < at < high:
        low, high = (at, high) if fits(at) else (low, at)
        at, step = (at + step if low == at else at - step), 2 * step
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda size: not fits(size))


def lack(error: BaseException) -> str:
    """Return how much memory there may be, where an exception says that there was too little."""
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    lacks = most_bytes > 0 and (isinstance(error, MemoryError) or "memory" in text_of(error).lower())
    return f" A dry run may take at most {format_bytes(most_bytes)}." * lacks
