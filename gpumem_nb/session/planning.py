"""Predictions and advice before a flip."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..kernel.lifecycle import Lifecycle
from ..planning.allocators import AllocatorWhatIf
from ..planning.doctor.checklist import Checklist
from ..planning.doctor.diagnosis import Diagnosis
from ..planning.prediction import Prediction
from ..planning.score import Scoreboard
from ..planning.tuning.result import TuneResult
from ..planning.what_fits import WhatFits
from ..planning.what_if import WhatIf
from ..shared.answers import Progress
from ..shared.errors import InvalidInput
from ..shared.settings import Settings


class PredictsSettings:
    """The part of a session that says what other settings would need."""

    _life: Lifecycle

    def predict(self, **knobs: Any) -> Prediction:
        """Return what the present settings with these changes would need, and whether it fits the rank with least room.

        Found by small steps on all ranks that are undone; training goes on afterwards.

        Raises:
            InvalidInput: an unknown knob, or a value that cannot be used with what is loaded.
            WorkloadError: nothing is loaded, or a small step failed.
        """
        return self._life.predicting.predict(knobs)

    def largest_batch(self, **knobs: Any) -> int:
        """Return the largest ``batch_size`` that fits every rank with these changes, error included; 0 if none does.

        Raises:
            InvalidInput: as :meth:`predict`, and where the data bring micro-batches of their own.
            WorkloadError: as :meth:`predict`.
        """
        return self._life.predicting.largest_batch(knobs)

    def allocator_what_if(self, *settings: str) -> AllocatorWhatIf:
        """Return how much the caching allocator would reserve for a step under other settings, by a model of it.

        Args:
            settings: each as torch's PYTORCH_CUDA_ALLOC_CONF has it, such as ``expandable_segments:True`` or
                ``max_split_size_mb:128,roundup_power2_divisions:4``; without any, the usual ones.

        Raises:
            InvalidInput: one that is not known.
            WorkloadError: nothing is loaded, or a step failed.
        """
        return self._life.predicting.allocators(settings)

    def foreseen(self, settings: Settings | None = None) -> Prediction | None:
        """Return what was predicted last for these settings, or the present ones; ``None`` if nothing was.

        What was predicted before a cell ran on the ranks or something was loaded does not count.
        """
        return self._life.history.foreseen.get(self._life.training.settings if settings is None else settings)

    def peaks_by_batch(self, **knobs: Any) -> dict[int, int]:
        """Return what the caching allocator would reserve on the rank that needs most, in bytes, by ``batch_size``.

        A few sizes around the present one, or the one that is given, halved and doubled.

        Raises:
            InvalidInput: as :meth:`largest_batch`.
            WorkloadError: as :meth:`predict`, and where not even small steps fit.
        """
        return self._life.predicting.peaks_by_batch(knobs)

    def doctor(self, progress: Progress = lambda what, done: None) -> Diagnosis:
        """Return what is wrong with this session as it is, the worst first, with the flips that would fix it.

        Each finding has numbers of this session, and of its flip what that saves and costs, from steps that are undone;
        training goes on meanwhile. Nothing is found in a healthy session.

        Args:
            progress: told what is being looked at.

        Raises:
            WorkloadError: nothing is loaded, nothing was trained yet, or settings were changed meanwhile.
        """
        return self._life.doctoring.examine(progress)

    def checklist(self, progress: Progress = lambda what, done: None) -> Checklist:
        """Return the checklist of training on several devices: builds agree, gradients are synchronised, data is split.

        Raises:
            WorkloadError: the step whose gradients would be compared could not be taken.
        """
        return self._life.doctoring.checklist(progress)

    def score(self) -> Scoreboard:
        """Every prediction of this session whose settings were tried afterwards, beside what came."""
        return self._life.predicting.score()

    def what_if(self) -> WhatIf:
        """Every single flip from here: what it would need, and whether it fits.

        Raises:
            WorkloadError: nothing is loaded, or a small step failed.
        """
        return self._life.predicting.what_if()

    def what_fits(self, *, progress: Progress = lambda what, done: None) -> WhatFits:
        """Return the largest micro-batch that fits under each precision and checkpointing, and samples/s with it.

        Found by small steps and tried out by whole ones, all undone; ``apply`` of the answer sets one of them.

        Raises:
            InvalidInput: the data bring micro-batches of their own.
            WorkloadError: nothing is loaded, or no small step was possible.
        """
        self._life.foreground.check_loaded()
        return self._life.fitting.what_fits(progress, self._change_what_is_loaded(), lambda: self._life.training)

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
        apply, latest = self._change_what_is_loaded(), lambda: self._life.training
        return self._life.tuning.tune(budget, global_batch, seconds, knobs, same_mathematics, progress, apply, latest)

    def _change_what_is_loaded(self) -> Callable[[dict[str, Any]], None]:
        """Sets knobs as long as what is loaded now still is, perhaps after a restart."""
        loaded, history, loaded_as = self._life.training.workload, self._life.history, self._life.history.loaded_as

        def change(knobs: dict[str, Any]) -> None:
            if self._life.history.loaded_again(history, loaded_as) or self._life.training.workload != loaded:
                name = loaded.name if loaded else "nothing"
                raise InvalidInput(f"This result is for {name}, but another workload is loaded now. Run it again.")
            self._life.set(knobs)

        return change
