"""Predictions and advice before a flip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, overload

from ..kernel.lifecycle import Lifecycle
from ..kernel.questions.doctoring import Doctoring
from ..kernel.questions.elsewhere import Elsewhere
from ..kernel.questions.fitting import Fitting
from ..kernel.questions.instead import FindingInstead
from ..kernel.questions.laddering import Laddering
from ..kernel.questions.tuning import Tuning
from ..planning.cold_table import ColdPredictions
from ..planning.doctor.checklist import Checklist
from ..planning.doctor.finding import Diagnosis
from ..planning.fit import Largest, fits
from ..planning.ladder import Ladder
from ..planning.prediction import Prediction
from ..planning.score import Scoreboard
from ..planning.tuning.result import TuneResult
from ..planning.what_if import AllocatorWhatIf, WhatFits, WhatIf
from ..shared.answers import Progress
from ..shared.errors import InvalidInput
from ..shared.settings import Settings
from ..shared.units import checked_flag
from ..ui.cells import shows_progress


class PredictsSettings:
    """The part of a session that says what other settings would need."""

    _life: Lifecycle

    @overload
    def predict(
        self,
        /,
        *,
        gpu: str | Sequence[str],
        memory: str | int | None = None,
        ranks: int | None = None,
        progress: Progress | None = None,
        **knobs: Any,
    ) -> Prediction | ColdPredictions: ...

    @overload
    def predict(self, /, **knobs: Any) -> Prediction: ...

    def predict(
        self,
        /,
        *,
        gpu: str | Sequence[str] | None = None,
        memory: str | int | None = None,
        ranks: int | None = None,
        progress: Progress | None = None,
        **knobs: Any,
    ) -> Prediction | ColdPredictions:
        """Return what the present settings with these changes would need, and whether it fits the rank with least room.

        Found by small steps on all ranks that are undone; training goes on afterwards. With one of the three arguments
        below it is found without ranks, from the model as it is now, for GPUs that need not be here; see
        :func:`gpumem_nb.predict`.

        Args:
            gpu: their names, as :func:`gpumem_nb.predict` has them.
            memory: of each, in place of what the table says.
            ranks: how many train together there; by default as many as here.
            progress: told what is being looked for.
            **knobs: what to change.

        Raises:
            InvalidInput: an unknown knob or GPU, or a value that cannot be used with what is loaded.
            WorkloadError: nothing is loaded, a small step failed, or what is loaded cannot be run without memory.
        """
        if gpu is None and memory is None and ranks is None:
            return self._life.cluster.predicting.predict(knobs)
        return self._predict_elsewhere(knobs, gpu, memory, ranks, **({"progress": progress} if progress else {}))

    @shows_progress("Predicting")
    def _predict_elsewhere(
        self,
        knobs: dict[str, Any],
        gpu: str | Sequence[str] | None,
        memory: str | int | None,
        ranks: int | None,
        progress: Progress = lambda what, done: None,
    ) -> Prediction | ColdPredictions:
        return Elsewhere(self._life.cluster).predict(knobs, gpu, memory, ranks, progress)

    @shows_progress("What would fit")
    def instead(self, predicted: Prediction, progress: Progress = lambda what, done: None) -> Prediction:
        """Return a prediction with what to train with in its place, in ``.instead``; the same where it fits.

        That is the fastest that fits at the same global batch, what frees most, and why: what the card after memory
        ran out, the doctor and the tuner say, too. An interrupt leaves it out.

        Args:
            predicted: by :meth:`predict`.
            progress: told what is being predicted.

        Raises:
            InvalidInput: it is no prediction, or not of what is loaded now on these ranks.
            WorkloadError: nothing is loaded.
        """
        if not isinstance(predicted, Prediction):
            raise InvalidInput(
                f"A {type(predicted).__name__} is not a prediction: session.instead(session.predict(batch_size=8)) "
                "takes one."
            )
        history = self._life.history
        as_asked = replace(predicted, instead=None), history.model_version
        if as_asked not in [(one.prediction, one.model_version) for one in list(history.asked)]:
            raise InvalidInput(
                "This prediction is not of what is loaded now on these ranks, or a cell ran since: predict again, then "
                "ask what fits instead. Of GPUs that are not here a table says it: session.predict(gpu=['T4-16GB'])."
            )
        with suppress(KeyboardInterrupt):
            if not fits(predicted):
                found = FindingInstead(self._life.cluster).find(predicted, progress)
                return replace(predicted, instead=found)
        return predicted

    def largest_batch(self, /, **knobs: Any) -> int:
        """Return the largest ``batch_size`` that fits every rank with these changes, error included; 0 if none does.

        Raises:
            InvalidInput: as :meth:`predict`, and where the data bring micro-batches of their own.
            WorkloadError: as :meth:`predict`.
        """
        return self.largest(**knobs).size

    @shows_progress("Largest batch")
    def largest(self, /, *, progress: Progress = lambda what, done: None, **knobs: Any) -> Largest:
        """Return the same with what it needs of which limit; as text it is a sentence.

        Args:
            progress: told what is being looked for.
            **knobs: as :meth:`largest_batch`.

        Raises:
            InvalidInput, WorkloadError: as :meth:`largest_batch`.
        """
        return self._life.cluster.predicting.largest_fitting(knobs, progress)

    def allocator_what_if(self, *settings: str) -> AllocatorWhatIf:
        """Return how much the caching allocator would reserve for a step under other settings, by a model of it.

        Args:
            settings: each as torch's PYTORCH_CUDA_ALLOC_CONF has it, such as ``expandable_segments:True`` or
                ``max_split_size_mb:128,roundup_power2_divisions:4``; without any, the usual ones.

        Raises:
            InvalidInput: one that is not known.
            WorkloadError: nothing is loaded, or a step failed.
        """
        return self._life.cluster.predicting.allocators(settings)

    def foreseen(self, settings: Settings | None = None) -> Prediction | None:
        """Return what was predicted last for these settings, or the present ones; ``None`` if nothing was.

        What was predicted before a cell ran on the ranks or something was loaded does not count.

        Raises:
            InvalidInput: these are no settings.
        """
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidInput(f"A {type(settings).__name__} is not Settings: give none, or such as session.settings.")
        return self._life.history.foreseen.get(self._life.training.settings if settings is None else settings)

    def peaks_by_batch(self, /, **knobs: Any) -> dict[int, int]:
        """Return what the caching allocator would reserve on the rank that needs most, in bytes, by ``batch_size``.

        A few sizes around the present one, or the one that is given, halved and doubled.

        Raises:
            InvalidInput: as :meth:`largest_batch`.
            WorkloadError: as :meth:`predict`, and where not even small steps fit.
        """
        return self._life.cluster.predicting.peaks_by_batch(knobs)

    @shows_progress("Examining")
    def doctor(self, progress: Progress = lambda what, done: None) -> Diagnosis:
        """Return what is wrong with this session as it is, the worst first, with the flips that would fix it.

        Each finding has numbers of this session, and of its flip what that saves and costs, from steps that are undone;
        training goes on meanwhile. Nothing is found in a healthy session.

        Args:
            progress: told what is being looked at.

        Raises:
            WorkloadError: nothing is loaded, nothing was trained yet, or settings were changed meanwhile.
        """
        return Doctoring(self._life.cluster).examine(progress)

    @shows_progress("Examining")
    def checklist(self, progress: Progress = lambda what, done: None) -> Checklist:
        """Return the checklist of training on several devices: builds agree, gradients are synchronised, data is split.

        Raises:
            WorkloadError: the step whose gradients would be compared could not be taken.
        """
        return Doctoring(self._life.cluster).checklist(progress)

    def score(self) -> Scoreboard:
        """Every prediction of this session whose settings were tried afterwards, beside what came."""
        return self._life.cluster.predicting.score()

    @shows_progress("What if")
    def what_if(self, *, progress: Progress = lambda what, done: None) -> WhatIf:
        """Every single flip from here: what it would need, and whether it fits.

        Args:
            progress: told which of them is being predicted.

        Raises:
            WorkloadError: nothing is loaded, or a small step failed.
        """
        return self._life.cluster.predicting.what_if(progress)

    @shows_progress("What fits")
    def what_fits(self, *, progress: Progress = lambda what, done: None) -> WhatFits:
        """Return the largest micro-batch that fits under each precision and checkpointing, and samples/s with it.

        Found by small steps and tried out by whole ones, all undone; ``apply`` of the answer sets one of them.

        Raises:
            InvalidInput: the data bring micro-batches of their own.
            WorkloadError: nothing is loaded, or no small step was possible.
        """
        return Fitting(self._life.cluster).what_fits(progress, self._life.applying)

    @shows_progress("Memory ladder")
    def ladder(self, *, same_mathematics: bool = False, progress: Progress = lambda what, done: None) -> Ladder:
        """Return the memory ladder: changes from here on, each on top of those before it, down to the least memory.

        The change that frees most of the live peak for the time that it costs comes first. Each is predicted, as by
        :meth:`predict`; ``apply`` of the answer takes a rung. An interrupt ends it with those found.

        Args:
            same_mathematics: whether only what keeps the mathematics, to rounding, is a rung.
            progress: told which change is being predicted.

        Raises:
            InvalidInput: ``same_mathematics`` is neither true nor false.
            WorkloadError: nothing is loaded, or a small step failed.
        """
        same = checked_flag("same_mathematics", same_mathematics)
        return Laddering(self._life.cluster).ladder(same, progress, self._life.applying)

    @shows_progress("Tuning")
    def tune(
        self,
        *,
        budget: str | int | None = None,
        global_batch: int | None = None,
        seconds: float = 60.0,
        knobs: Iterable[str] | None = None,
        same_mathematics: bool = True,
        progress: Progress = lambda what, done: None,
    ) -> TuneResult:
        """Look for the fastest settings that fit every rank, by steps that are undone.

        What fits is predicted; what should be fast is measured on all ranks, the best in turns with the present
        settings. Nothing is changed before :meth:`TuneResult.apply`. An interrupt ends it with the best so far.

        Args:
            budget: what may be reserved on a rank, such as ``"512 MiB"`` or a number of bytes, if that is less than the
                rank's limit.
            global_batch: samples of a step of all ranks, which is the present one by default and stays as it is.
            seconds: how long it may take, about.
            knobs: what may be changed, of ``precision``, ``checkpointing``, ``batch_size`` and ``accumulation_steps``
                (together), ``optimizer_impl`` and ``optimizer``; by default all but the last.
            same_mathematics: whether only that is considered which keeps the mathematics, to rounding.
            progress: told what is being done and what is best so far; ``KeyboardInterrupt`` raised there ends tuning.

        Raises:
            InvalidInput: an argument that cannot be used.
            WorkloadError: nothing is loaded, or no step is possible.
        """
        same, ask = checked_flag("same_mathematics", same_mathematics), Tuning(self._life.cluster).tune
        return ask(budget, global_batch, seconds, knobs, same, progress, self._life.applying)
