"""Asks the ranks what other settings would need, by small steps that are undone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..planning.allocators import AllocatorWhatIf
from ..planning.prediction import DOES_NOT_FIT, Prediction, out_of_memory, worst
from ..planning.score import Asked, Scoreboard, score
from ..planning.what_if import WhatIf, single_flips
from ..shared.allocator_settings import DEFAULT, USUAL, AllocatorSettings, variable
from ..shared.errors import InvalidInput, NotThisTime, WorkloadError
from ..shared.forecast import MOST_BATCH, SMALL, VARYING, Forecasts, Rehearsal
from ..shared.knobs.batch import shortened
from ..shared.messages import RankInfo
from ..shared.settings import Settings
from . import compatibility
from .foreground import Foreground
from .history import History
from .training import Training

FEWEST = [2, 4]  # samples of two steps, where larger ones run out of memory; some models mix pairs
_PASSING = ("interrupted", "stall", "diverged")  # failures after which another try may go well
HALVED, DOUBLED = 2, 3  # times, of the batch size in a line of peaks
LONGEST_S = 2.0  # whole steps that take longer, as far as is known, are not tried out: nobody would wait for that
LONGEST_GUESSED_S = 10.0  # nor those that would take longer to judge by small ones, which take their time to begin


class Predicting:
    """Predicts the memory of settings for what is loaded; training goes on afterwards as if nothing had been.

    Args:
        ranks: of the cluster.
        history: keeps what was predicted, and knows what came.
    """

    def __init__(self, foreground: Foreground, training: Training, ranks: Sequence[RankInfo], history: History) -> None:
        self._foreground = foreground
        self._training = training
        self._ranks = ranks
        self._history = history

    def predict(self, knobs: dict[str, Any]) -> Prediction:
        """What the present settings with these changes would need.

        Raises:
            InvalidInput: an unknown knob, or a value that cannot be used with what is loaded.
            WorkloadError: nothing is loaded, or a small step failed for another reason than memory.
        """
        history, now = self._history, self._training.settings
        begun, model_version = history.begun, history.model_version
        settings = self._checked(knobs)
        found = self._rehearsed(self.by_small_steps(settings, [settings.batch_size])[0])
        widened = found.widened(*self.score().missed(model_version))
        prediction = replace(widened, before=now, batch_norm=self._loaded().batch_norm)
        history.predicted(Asked(prediction, model_version, now, begun))
        return prediction

    def score(self) -> Scoreboard:
        """Every prediction whose settings were tried afterwards, beside what came."""
        return score(self._history.asked, self._history.tried)

    def by_small_steps(
        self, settings: Settings, batch_sizes: Sequence[int], budget_bytes: int | None = None
    ) -> list[Prediction]:
        """What steps under these settings would need in micro-batches of these sizes, which all follow from the same.

        ``budget_bytes`` is a limit of each rank besides its own.

        Raises:
            WorkloadError: a small step failed for another reason than memory.
        """
        small = self._small(max(batch_sizes))
        answers = self._ask(settings, small, list(batch_sizes), 0)
        seconds = max(answer.seconds for answer in answers)  # without the waiting for what was under way
        sized = [settings.replace(batch_size=size) for size in batch_sizes]
        if answer := self._ran_out(answers):
            return [self._too_large(answer, one, seconds) for one in sized]
        answers = [_limited(answer, budget_bytes) for answer in answers]
        each = [[replace(answer, of=answer.of[at:]) for answer in answers] for at in range(len(sized))]
        return [self._prediction(one, of_one, small, seconds) for one, of_one in zip(sized, each, strict=True)]

    def by_whole_steps(self, settings: Settings, budget_bytes: int | None = None) -> Prediction:
        """What a few whole steps need, and how long they take: that they do not fit, if one runs out of memory.

        ``budget_bytes`` is a limit of each rank besides its own.

        Raises:
            WorkloadError: they failed for another reason; ``NotThisTime`` if it may be gone the next time.
        """
        began_s = time.perf_counter()
        rehearsals: list[Rehearsal] = self._foreground.call_alone("rehearse", settings, undone=True)
        seconds = time.perf_counter() - began_s
        answers = [one.forecasts for one in rehearsals]
        failures = [answer.failure for answer in answers if answer.failure]
        if answer := next((answer for answer in answers if answer.failure and answer.failure.kind == "oom"), None):
            return self._too_large(answer, settings, seconds)
        if not all(answer.of for answer in answers):
            kind = NotThisTime if any(failure.kind in _PASSING for failure in failures) else WorkloadError
            raise kind(failures[0].message if failures else "a step could not be taken")
        answers = [_limited(answer, budget_bytes) for answer in answers]
        found = self._prediction(settings, answers, [settings.batch_size], seconds)
        return found.timed([one.steps_s for one in rehearsals])

    def _rehearsed(self, prediction: Prediction) -> Prediction:
        """What whole steps need and how long they take, unless they would not fit or take long."""
        settings = prediction.settings
        if prediction.verdict == DOES_NOT_FIT or self._takes_long(prediction):
            return prediction
        if self._foreground.busy:
            return replace(prediction, cut_short=True)
        try:
            found = self.by_whole_steps(settings)
        except NotThisTime:
            return replace(prediction, cut_short=True)
        except WorkloadError:
            return prediction
        return replace(found, seconds=prediction.seconds + found.seconds)

    def _takes_long(self, prediction: Prediction) -> bool:
        """Whether nobody would wait for a whole step."""
        tried, settings = self._history.now(), prediction.settings
        speed: float | None = tried.samples_per_s if tried else None
        if speed:
            return settings.samples_per_rank * len(self._ranks) / speed > LONGEST_S
        small = self._small(settings.batch_size)
        samples = settings.batch_size * min(2, settings.accumulation_steps)
        guessed_s: float = prediction.seconds * samples / sum(small)
        return guessed_s > LONGEST_GUESSED_S

    def _too_large(self, answer: Forecasts, settings: Settings, seconds: float) -> Prediction:
        assert answer.failure
        return out_of_memory(answer.failure, answer.failed_batch, answer.limit_bytes, settings, seconds)

    def what_if(self) -> WhatIf:
        """Every single flip from the present settings; those that cannot be used with what is loaded are left out.

        Raises:
            WorkloadError: nothing is loaded, or a small step under the present settings failed, but not for memory.
        """
        now, flips = self.predict({}), []
        for _, flip in single_flips(now.settings, self._loaded()):
            with suppress(InvalidInput, WorkloadError):
                flips.append(self.predict(flip.changed_from(now.settings)))
        return WhatIf(now, tuple(flips))

    def allocators(self, others: Sequence[str]) -> AllocatorWhatIf:
        """The present settings under other settings of the caching allocator, from one step.

        Args:
            others: as torch writes them; without any, each that is known, alone.

        Raises:
            InvalidInput: one that is not known.
            WorkloadError: nothing is loaded, or the step failed.
        """
        settings, now = self._checked({}), self._ranks[0].allocator
        if any(rank.allocator != now for rank in self._ranks):
            raise InvalidInput(
                f"The ranks' caching allocators are set differently: set {variable()} alike and %hvd_restart."
            )
        parsed = map(AllocatorSettings.parse, others) if others else (DEFAULT, *USUAL)
        wanted = [one for one in dict.fromkeys(parsed) if one != now]
        fewer = [] if self._loaded().data.batched else [list(SMALL), FEWEST]
        for small in [[settings.batch_size], *(sizes for sizes in fewer if max(sizes) < settings.batch_size)]:
            answers: list[Forecasts] = self._foreground.call_alone(
                "forecast_allocators", shortened(settings), small, wanted, undone=True
            )
            if not self._ran_out(answers):
                break
        else:
            raise WorkloadError("Not even a small step fits, so none can be followed: %hvd_what_if says what would.")
        seconds = max(answer.seconds for answer in answers)
        each = [[replace(answer, of=answer.of[at:]) for answer in answers] for at in range(len(wanted) + 1)]
        found = [
            (one, self._prediction(settings, of_one, small, seconds))
            for one, of_one in zip([now, *wanted], each, strict=True)
        ]
        varies = any(answer.of[0].how == VARYING for answer in answers)
        notes = tuple(dict.fromkeys(rank.note for rank in self._ranks if rank.note))
        return AllocatorWhatIf(found[0], tuple(found[1:]), varies, self._ranks[0].virtual, variable(), notes)

    def largest_batch(self, knobs: dict[str, Any]) -> int:
        """The largest ``batch_size`` that fits every rank, error included, with these changes; 0 if none does.

        Raises:
            InvalidInput: as :meth:`predict`, and where the data bring micro-batches of their own.
            WorkloadError: as :meth:`predict`.
        """
        settings, most = self.of_any_batch(knobs)
        ran_out = False
        for small in (list(SMALL), FEWEST, [2], [1]):
            answers = self._ask(settings, small, [], most)
            try:
                failed = self._ran_out(answers)
            except WorkloadError as error:
                if not ran_out or isinstance(error, NotThisTime):
                    raise
                continue  # one sample is too few for batch norm, say
            found = 0 if failed else min(answer.largest for answer in answers)
            if found or (not failed and len(small) > 1):
                return found
            ran_out = True
        return 0

    def peaks_by_batch(self, knobs: dict[str, Any]) -> dict[int, int]:
        """Reserved bytes of the rank that needs most, by batch size: halved and doubled a few times.

        Raises:
            InvalidInput: as :meth:`largest_batch`.
            WorkloadError: as :meth:`predict`, and where not even small steps fit.
        """
        settings, most = self.of_any_batch(knobs)
        middle = min(most, self._training.settings.replace(**knobs).batch_size)
        sizes = sorted({min(most, max(1, round(middle * 2.0**power))) for power in range(-HALVED, DOUBLED + 1)})
        answers = self._ask(settings, list(SMALL), sizes, 0)
        if self._ran_out(answers):
            answers = self._ask(settings, FEWEST, sizes, 0)
        if failed := self._ran_out(answers):
            raise WorkloadError(f"Not even a step with batch_size={failed.failed_batch} fits.")
        peaks = [[one.reserved_peak_bytes for one in answer.of] for answer in answers]
        return {size: max(of_size) for size, *of_size in zip(sizes, *peaks, strict=True)}

    def of_any_batch(self, knobs: dict[str, Any]) -> tuple[Settings, int]:
        """Checked settings whose batch size is for a knob to say, and the largest that the data have samples for.

        Raises:
            InvalidInput: the data bring micro-batches of their own, or the knobs cannot be used.
        """
        workload = self._loaded()
        if workload.data.batched:
            raise InvalidInput("The data bring micro-batches of their own: their size is not for a knob to say.")
        settings = self._checked(knobs | {"batch_size": 1})
        samples = workload.samples_per_micro_batch(len(self._ranks), settings.accumulation_steps)
        return settings, MOST_BATCH if samples is None else max(1, samples)

    def _loaded(self) -> Any:
        self._foreground.check_loaded()
        return self._training.workload

    def _checked(self, knobs: dict[str, Any]) -> Settings:
        workload = self._loaded()
        settings = compatibility.asked(self._training.settings, knobs, len(self._ranks))
        compatibility.check(settings, workload, len(self._ranks))
        return settings

    def _small(self, batch_size: int) -> list[int]:
        """The batch sizes to try: the very one if it is small, or if the data bring their own."""
        workload = self._training.workload
        batched = workload is not None and workload.data.batched
        return [batch_size] if batched or batch_size <= max(SMALL) else list(SMALL)

    def _ask(self, settings: Settings, small: list[int], batch_sizes: list[int], most: int) -> list[Forecasts]:
        answers: list[Forecasts] = self._foreground.call_alone(
            "forecast", shortened(settings), small, batch_sizes, most, undone=True
        )
        return answers

    def _ran_out(self, answers: list[Forecasts]) -> Forecasts | None:
        """The answer of a rank that ran out of memory in a small step; raises if any failed for another reason."""
        failed = [answer for answer in answers if answer.failure]
        for answer in failed:
            if answer.failure and answer.failure.kind != "oom":
                raise (NotThisTime if answer.failure.kind in _PASSING else WorkloadError)(
                    f"A step with batch_size={answer.failed_batch}, from which larger ones follow, failed: "
                    f"{answer.failure.message}"
                )
        return failed[0] if failed else None

    def _prediction(self, settings: Settings, answers: list[Forecasts], small: list[int], seconds: float) -> Prediction:
        readings = [answer.reading for answer in answers]
        beside = [
            None if reading.device_used_bytes is None else reading.device_used_bytes - reading.reserved_bytes
            for reading in readings
        ]
        limits = [answer.limit_bytes for answer in answers]
        sizes = " and ".join(map(str, small))
        steps = "a step" if len(small) == 1 else "steps"
        basis = f"from {steps} with batch_size {sizes}, undone after step {answers[0].steps}"
        return worst([answer.of[0] for answer in answers], limits, beside, settings, basis, seconds)


def _limited(answer: Forecasts, budget_bytes: int | None) -> Forecasts:
    """The same with a budget, if that is less than the rank's limit."""
    limits = [limit for limit in (answer.limit_bytes, budget_bytes) if limit is not None]
    return replace(answer, limit_bytes=min(limits, default=None))
