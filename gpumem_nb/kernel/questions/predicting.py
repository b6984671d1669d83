"""Asks the ranks what other settings would need, by small steps that are undone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...planning import fit
from ...planning.fit import Largest, Missed
from ...planning.prediction import DOES_NOT_FIT, Prediction
from ...planning.score import Asked, Scoreboard, score
from ...planning.what_if import AllocatorWhatIf, WhatIf, single_flips
from ...report.differences import arrows, splits
from ...shared.allocator_settings import DEFAULT, USUAL, AllocatorSettings, variable
from ...shared.answers import Progress
from ...shared.errors import InvalidInput, NotThisTime, WorkloadError
from ...shared.forecast import FEWEST, MOST_BATCH, SMALL, VARYING, Forecasts, Rehearsal
from ...shared.knobs.step import shortened
from ...shared.settings import Settings
from ...shared.workload import Splits
from .. import compatibility
from ..cluster import AsksRanks, Cluster

_FEWER = (FEWEST, (1, 2), (2,), (1,))  # the same where those run out of memory, too
_PASSING = ("interrupted", "stall", "diverged")  # failures after which another try may go well
HALVED, DOUBLED = 2, 3  # times, of the batch size in a line of peaks
LONGEST_S = 2.0  # whole steps that take longer, as far as is known, are not tried out: that would take too long
LONGEST_GUESSED_S = 10.0  # nor those that would take longer to judge by small ones, which take their time to begin


class Predicting(AsksRanks):
    """Predicts the memory of settings for what is loaded; training goes on afterwards as if nothing had been."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._sample_s: dict[tuple[int, Settings], float] = {}  # by model version, of a sample in small whole steps

    def predict(self, knobs: dict[str, Any]) -> Prediction:
        """Return what the present settings with these changes would need."""
        history, now = self._history, self._training.settings
        begun, model_version, settings = history.begun, history.model_version, self._checked(knobs)
        peak = tried.peak_bytes if (tried := history.now()) else None
        prediction = replace(self.answer(settings), before=now, before_bytes=peak, splits=self.splits(now, settings))
        history.predicted(Asked(prediction, model_version, now, begun))
        return prediction

    def splits(self, before: Settings | None = None, after: Settings | None = None) -> Splits:
        """Return what is known of training a micro-batch in parts, asking the ranks unless they answered before.

        Of a change that splits nothing, and while others wait for the ranks, they are not asked. Where no change is
        named they are: what a search may split depends on it.
        """
        version, answers = self._history.model_version, self._history.answers
        self._loaded()
        if before and after and (self._foreground.busy or not splits(before, after)):
            return self.known_splits
        if not answers.mean:
            with suppress(NotThisTime):
                found: list[bool | None] = self._foreground.call_alone("splits_to_mean", undone=True)
                if version == self._history.model_version:
                    answers.mean = found
        return self.known_splits

    @property
    def known_splits(self) -> Splits:
        """The same as far as it is known by now."""
        return self._history.answers.splits(self._training.workload)

    def answer(self, settings: Settings) -> Prediction:
        """Return what these settings would need, by small steps, and by whole ones where they are that quick."""
        return self._by_whole_steps_alone(settings) or self._rehearsed(
            self.by_small_steps(settings, [settings.batch_size])[0]
        )

    def _by_whole_steps_alone(self, settings: Settings) -> Prediction | None:
        """Return what whole steps need, where a small one would take as long; ``None`` where they say too little."""
        tried, size = self._history.now(), settings.batch_size
        known = tried and tried.samples_per_s and self._may_be_quick(settings)
        if not known or self._small([size]) != [size] or self._foreground.busy:
            return None
        with suppress(WorkloadError):
            found = self.by_whole_steps(settings)
            if not (found.lower_bound or found.basis.startswith(VARYING)):
                return found
        return None

    def score(self) -> Scoreboard:
        """Every prediction whose settings were tried afterwards, beside what came."""
        return score(self._history.asked, self._history.tried)

    def by_small_steps(
        self, settings: Settings, batch_sizes: Sequence[int], budget_bytes: int | None = None
    ) -> list[Prediction]:
        """Return what steps in micro-batches of these sizes would need, all from the same small steps.

        ``budget_bytes`` is a limit of each rank besides its own.

        Raises:
            WorkloadError: a small step failed for another reason than memory.
        """
        sizes, found = list(batch_sizes), dict[int, Prediction]()
        out: Forecasts | None = None
        failed: WorkloadError | None = None
        for small in (self._small(sizes), *_FEWER):
            most = out.failed_batch if out else math.inf
            left = [size for size in sizes if size < most and (len(small) > 1 or size == small[0])]
            if not left or max(small) >= most:
                continue
            answers = self._ask(settings, list(small), left, 0)
            try:
                out_now = self._ran_out(answers)
            except WorkloadError as error:
                if out is None or isinstance(error, NotThisTime):
                    raise
                failed = error  # one sample is too few for batch norm, say
                continue
            if not out_now:
                found = self._of_sizes(settings, left, answers, list(small), budget_bytes)
                break
            out = out_now
        if failed and not found:
            raise failed
        return [found.get(size) or self._ran_out_at(out, settings.replace(batch_size=size)) for size in sizes]

    def _of_sizes(
        self, settings: Settings, sizes: list[int], answers: list[Forecasts], small: list[int], budget_bytes: int | None
    ) -> dict[int, Prediction]:
        seconds = max(answer.seconds for answer in answers)  # without the waiting for what was under way
        answers = [_limited(answer, budget_bytes) for answer in answers]
        each = {size: [replace(answer, of=answer.of[at:]) for answer in answers] for at, size in enumerate(sizes)}
        return {
            size: self._settled(fit.of_ranks(of_one, settings.replace(batch_size=size), small, seconds), budget_bytes)
            for size, of_one in each.items()
        }

    def _ran_out_at(self, out: Forecasts | None, settings: Settings) -> Prediction:
        assert out
        return self._settled(fit.of_ranks([out], settings, [out.failed_batch], out.seconds))

    def by_whole_steps(self, settings: Settings, budget_bytes: int | None = None) -> Prediction:
        """Return what a few whole steps need, and how long they take: that they do not fit, if one runs out of memory.

        ``budget_bytes`` is a limit of each rank besides its own.

        Raises:
            WorkloadError: they failed for another reason; ``NotThisTime`` if it may be gone the next time.
        """
        began_s = time.perf_counter()
        rehearsals: list[Rehearsal] = self._foreground.call_alone("rehearse", settings, undone=True)
        seconds = time.perf_counter() - began_s
        answers = [_limited(one.forecasts, budget_bytes) for one in rehearsals]
        failures = [answer.failure for answer in answers if answer.failure]
        ran_out = [answer for answer in answers if answer.failure and answer.failure.kind == "oom"]
        if not ran_out and not all(answer.of for answer in answers):
            kind = NotThisTime if any(failure.kind in _PASSING for failure in failures) else WorkloadError
            raise kind(failures[0].message if failures else "a step could not be taken")
        found = fit.of_ranks(ran_out or answers, settings, [settings.batch_size], seconds)
        found = self._settled(replace(found, measured=True), budget_bytes)
        return found if ran_out else found.timed([one.steps_s for one in rehearsals])

    def _settled(self, prediction: Prediction, budget_bytes: int | None = None) -> Prediction:
        """Return the same after what is known of the model from earlier predictions, and from training."""
        history, running = self._history, self._history.running
        within = running is not None and (budget_bytes is None or (running.reserved_peak_bytes or 0) <= budget_bytes)
        came: tuple[int, int] | None = None
        if within and running is not None and running.settings == prediction.settings:
            came = running.peak_bytes or 0, running.reserved_peak_bytes or 0
        return fit.settled(prediction, Missed(*self.score().missed(history.model_version)), came)

    def _rehearsed(self, prediction: Prediction) -> Prediction:
        """Return what whole steps need and how long they take, unless they would not fit or take long."""
        settings = prediction.settings
        if prediction.verdict == DOES_NOT_FIT or not self._may_be_quick(settings):
            return prediction
        if self._foreground.busy:
            return replace(prediction, cut_short=True)
        try:
            if not self._is_quick(settings, prediction.seconds):
                return prediction
            found = self.by_whole_steps(settings)
        except NotThisTime:
            return replace(prediction, cut_short=True)
        except WorkloadError:
            return prediction
        return replace(fit.with_longest(found, prediction), seconds=prediction.seconds + found.seconds)

    def _may_be_quick(self, settings: Settings) -> bool:
        """Return whether a whole step takes no longer than that, as training goes; true before anything was trained."""
        speed = (tried := self._history.now()) and tried.samples_per_s
        return not speed or settings.samples_per_rank * len(self._ranks) / speed <= LONGEST_S

    def _is_quick(self, settings: Settings, small_s: float) -> bool:
        """Return whether it does, going by small steps where nothing was trained yet, which took ``small_s`` seconds.

        They are recorded, and take their time to begin: where they make a step seem long, some others are timed.
        """
        tried, small = self._history.now(), self._small([settings.batch_size])
        known = self._history.foreseen.get(settings.replace(compile="off"))
        if settings.compile != "off" and known and known.step_s:  # compiling was most of what small steps took
            return known.step_s <= LONGEST_S
        samples = settings.batch_size * min(2, settings.accumulation_steps)
        if (tried and tried.samples_per_s) or small_s * samples / sum(small) <= LONGEST_GUESSED_S:
            return True
        if len(small) == 1:  # it is itself one of them
            return small_s <= LONGEST_GUESSED_S
        few = settings.replace(batch_size=max(small), accumulation_steps=1)
        about = self._history.model_version, few
        if about not in self._sample_s:
            self._sample_s[about] = (self.by_whole_steps(few).step_s or math.inf) / few.samples_per_rank
        return self._sample_s[about] * settings.samples_per_rank <= LONGEST_S

    def what_if(self, progress: Progress) -> WhatIf:
        """Every single flip from the present settings; those that cannot be used with what is loaded are left out."""
        progress("the present settings", 0.0)
        now, flips = self.predict({}), []
        wanted = [flip for _, flip in single_flips(now.settings, self._loaded())]
        for place, flip in enumerate(wanted):
            progress(arrows(now.settings, flip), (place + 1) / (len(wanted) + 1))
            with suppress(InvalidInput, WorkloadError):
                flips.append(self.predict(flip.changed_from(now.settings)))
        return WhatIf(now, tuple(flips))

    def allocators(self, others: Sequence[str]) -> AllocatorWhatIf:
        """Return the present settings under other settings of the caching allocator, from one step.

        Args:
            others: as torch writes them; without any, each that is known, alone.

        Raises:
            InvalidInput: one that is not known.
            WorkloadError: nothing is loaded, or the step failed.
        """
        settings, now = self._checked({}), self._ranks[0].allocator
        if any(rank.allocator != now for rank in self._ranks):
            raise InvalidInput(f"The ranks' allocators are set differently: set {variable()} alike and %hvd_restart.")
        parsed = map(AllocatorSettings.parse, others) if others else (DEFAULT, *USUAL)
        wanted = [one for one in dict.fromkeys(parsed) if one != now]
        fewer = [] if self._loaded().data.batched else [list(SMALL), list(FEWEST)]
        for small in [[settings.batch_size], *(sizes for sizes in fewer if max(sizes) < settings.batch_size)]:
            about = shortened(settings), small, wanted
            answers: list[Forecasts] = self._foreground.call_alone("forecast_allocators", *about, undone=True)
            if not self._ran_out(answers):
                break
        else:
            raise WorkloadError("Not even a small step fits, so none can be followed: %hvd_what_if says what would.")
        seconds = max(answer.seconds for answer in answers)
        each = [[replace(answer, of=answer.of[at:]) for answer in answers] for at in range(len(wanted) + 1)]
        pairs = zip([now, *wanted], each, strict=True)
        found = [(one, fit.of_ranks(of_one, settings, small, seconds)) for one, of_one in pairs]
        varies = any(answer.of[0].how == VARYING for answer in answers)
        notes = tuple(dict.fromkeys(rank.note for rank in self._ranks if rank.note))
        return AllocatorWhatIf(found[0], tuple(found[1:]), varies, self._ranks[0].virtual, variable(), notes)

    def largest_fitting(self, knobs: dict[str, Any], progress: Progress = lambda what, done: None) -> Largest:
        """Return the largest micro-batch that fits every rank, error included, with these changes.

        Raises:
            InvalidInput: as :meth:`predict`, and where the data bring micro-batches of their own.
            WorkloadError: as :meth:`predict`, and where it cannot be said whether any fits.
        """
        found = self.largest(*self.of_any_batch(knobs), heard=lambda: progress("larger and smaller micro-batches", 0.0))
        if found.unknown:
            raise WorkloadError(str(found))
        return found

    def largest(self, settings: Settings, most: int, heard: Callable[[], None] = lambda: None) -> Largest:
        """Look for the largest micro-batch that fits, of at most so many samples, by predicting one after the other.

        Args:
            settings: everything but the size.
            most: samples for a micro-batch that there are.
            heard: called before each question to the ranks.
        """
        sure, likely, small_s = self._by_smallest_steps(settings, most)
        sure = max(sure, self._running(settings))
        search = fit.largest(sure, max(likely, sure), most)
        size = next(search)
        while True:
            heard()
            said = self._sized(settings.replace(batch_size=size), small_s)
            try:
                size = search.send(said)
            except StopIteration as end:
                found: Largest = end.value
                return found

    def _running(self, settings: Settings) -> int:
        """Return the samples of training's micro-batches if it runs under these settings otherwise; else 0."""
        running = self._history.running
        size = running.settings.batch_size if running else 0
        return size if running and running.settings == settings.replace(batch_size=size) else 0

    def _sized(self, settings: Settings, small_s: float) -> Prediction:
        """Return what settings need by whole steps, or by small ones where those would take long."""
        quick = self._may_be_quick(settings) and not self._foreground.busy
        try:
            if quick and self._is_quick(settings, small_s):
                whole = self.by_whole_steps(settings)
                if not whole.basis.startswith(VARYING):
                    return whole
                return fit.with_longest(whole, self.by_small_steps(settings, [settings.batch_size])[0])
        except WorkloadError:
            pass  # another batch may not come together
        return self.by_small_steps(settings, [settings.batch_size])[0]

    def _by_smallest_steps(self, settings: Settings, most: int) -> tuple[int, int, float]:
        """Return the largest sizes that fit certainly and likely by small steps, which took ``seconds``; 0 for none."""
        ran_out = False
        for small in (list(SMALL), list(FEWEST), [2], [1]):
            answers = self._ask(settings, small, [], most)
            try:
                failed = self._ran_out(answers)
            except WorkloadError as error:
                if not ran_out or isinstance(error, NotThisTime):
                    raise
                continue  # one sample is too few for batch norm, say
            if not failed:
                sure, likely = (min(getattr(one, name) for one in answers) for name in ("largest", "likely"))
                if sure or likely or len(small) > 1:
                    return sure, likely, max(answer.seconds for answer in answers)
            ran_out = True
        return 0, 0, 0.0

    def peaks_by_batch(self, knobs: dict[str, Any]) -> dict[int, int]:
        """Return reserved bytes of the rank with least room by batch size; those that ran out are left out.

        Raises:
            InvalidInput: as :meth:`largest_fitting`.
            WorkloadError: as :meth:`predict`, and where not even small steps fit.
        """
        settings, most = self.of_any_batch(knobs)
        middle = min(most, self._training.settings.replace(**knobs).batch_size)
        sizes = sorted({min(most, max(1, round(middle * 2.0**power))) for power in range(-HALVED, DOUBLED + 1)})
        found = self.by_small_steps(settings, sizes)
        peaks = {one.settings.batch_size: one.reserved_peak_bytes for one in found if not one.lower_bound}
        if not peaks:
            raise WorkloadError(f"Not even a step with batch_size={sizes[0]} fits: {found[0].basis}.")
        return peaks

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

    def _small(self, batch_sizes: Sequence[int]) -> list[int]:
        """Return the batch sizes to try: the very one if it is small, or if the data bring their own; else two."""
        workload, most = self._training.workload, max(batch_sizes)
        batched = workload is not None and workload.data.batched
        if not batched and most > max(SMALL):
            return list(SMALL)
        return [most] if min(batch_sizes) == most else [most // 2, most]

    def _ask(self, settings: Settings, small: list[int], batch_sizes: list[int], most: int) -> list[Forecasts]:
        asked = shortened(settings), small, batch_sizes, most
        answers: list[Forecasts] = self._foreground.call_alone("forecast", *asked, undone=True)
        return answers

    def _ran_out(self, answers: list[Forecasts]) -> Forecasts | None:
        """Return the answer of a rank that ran out of memory in a small step; raise for another failure."""
        failed = [answer for answer in answers if answer.failure]
        for answer in failed:
            if answer.failure and answer.failure.kind != "oom":
                what = f"A step with batch_size={answer.failed_batch}, from which larger ones follow, failed"
                kind = NotThisTime if answer.failure.kind in _PASSING else WorkloadError
                raise kind(f"{what}: {answer.failure.message}")
        return failed[0] if failed else None


def _limited(answer: Forecasts, budget_bytes: int | None) -> Forecasts:
    """Return the same with a budget, if that is less than the rank's limit, and it is not that which was passed."""
    limits = [limit for limit in (answer.limit_bytes, budget_bytes) if limit is not None]
    return answer if answer.failure else replace(answer, limit_bytes=min(limits, default=None))
