"""Training, and the knobs that can be switched meanwhile."""

from __future__ import annotations

import os
from typing import Any

from ..kernel.lifecycle import Lifecycle
from ..kernel.policy import Policy
from ..report.run_summary import Evaluation, Run
from ..report.runs import Runs
from ..report.runs.comparing import Comparison
from ..report.runs.files import ImportedRuns
from ..shared.answers import Progress
from ..shared.errors import InvalidInput, WorkloadError
from ..shared.settings import Settings
from ..shared.units import as_whole, checked_flag

MOST_STEPS = 10**9


class TrainsWorkload:
    """The part of a session that trains."""

    _life: Lifecycle

    @property
    def settings(self) -> Settings:
        """The knobs as they are now."""
        return self._life.training.settings

    @property
    def policy(self) -> Policy:
        """Return what the session does by itself: after an out-of-memory error, when ranks stall, when it is idle."""
        return self._life.policy

    def set(self, /, **knobs: Any) -> Settings:
        """Change knobs; while training, from the next chunk on. Rules of :attr:`policy` change at once.

        Raises:
            InvalidInput: an unknown knob, or a value that cannot be used with what is loaded; nothing was changed.
            TrainingFailed: while nothing trains, the ranks could not switch to these settings.
        """
        self._life.set(knobs)
        return self.settings

    def train(self, steps: int, progress: Progress = lambda what, done: None) -> Run:
        """Train that many optimizer steps and wait for them; stop pauses, and returns what was done by then.

        Args:
            steps: a whole number of at least 1.
            progress: told of the latest step, and of the share that is done; what it raises pauses training.

        Raises:
            InvalidInput: not a whole number of at least 1.
            WorkloadError: nothing is loaded.
            TrainingFailed: a step could not be done and training paused.
        """
        if (count := as_whole(steps, 1, MOST_STEPS)) is None:
            raise InvalidInput(f"{steps!r} steps cannot be trained: write a whole number of at least 1, such as 100.")
        self._life.foreground.check_loaded()
        # What training could not interrupt by itself will not be by a second try.
        with self._life.foreground.interruptible(lambda: not self.waiting_for):
            return self._life.training.train(count, progress)

    def evaluate(self) -> Evaluation:
        """Loss and metrics on the validation data, between two steps; training goes on afterwards, as without it.

        Each sample is seen once, on one of the ranks, in micro-batches of ``batch_size``, in eval mode and without
        gradients, under the precision of the moment. Weights, buffers, modes and random numbers stay as they are.
        ``eval_every`` of :attr:`policy` does the same by itself; all evaluations are in ``history.evaluations``.

        Raises:
            WorkloadError: nothing is loaded.
            InvalidInput: what is loaded has no validation data.
            TrainingFailed: a rank could not evaluate; nothing was changed.
        """
        self._life.foreground.check_loaded()
        with self._life.foreground.interruptible():
            return self._life.training.requests.evaluate()

    def play(self) -> None:
        """Train in the background until :meth:`pause`.

        Raises:
            WorkloadError: nothing is loaded.
            TrainingFailed: some rank is stuck since the last stall.
        """
        self._life.foreground.check_loaded()
        self._life.training.play()

    def pause(self) -> None:
        """Stop training after the steps under way, and wait for them; without effect while nothing trains."""
        self._life.foreground.pause()

    def step(self) -> None:
        """Train one step in the background; raises what :meth:`play` raises."""
        self._life.foreground.check_loaded()
        self._life.training.play(1)

    @property
    def playing(self) -> bool:
        """Return whether training runs."""
        return not self._life.ended and self._life.training.playing

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not answered yet what training asked of them."""
        return [] if self._life.ended else self._life.training.waiting_for()

    def pin(self, wanted: bool = True) -> None:
        """Compare all further settings with those of now, in the panel and in ``history.effect()``.

        Args:
            wanted: ``False`` compares again with the settings before each flip.

        Raises:
            InvalidInput: ``wanted`` is neither true nor false.
            WorkloadError: nothing is loaded, or no step was done under these settings.
        """
        wanted = checked_flag("wanted", wanted)
        self._life.foreground.check_loaded()
        if not self._life.history.pin(wanted):
            raise WorkloadError("Nothing was measured under these settings yet. Train some steps first: %hvd_train 20")

    @property
    def runs(self) -> Runs:
        """Every configuration tried, side by side: now, before a restart, and what :meth:`resume` brought back."""
        record = self._life.record
        return Runs(record.rows(), record.note, _draw, answers=record.answers)

    @property
    def runs_version(self) -> tuple[object, ...]:
        """Another one whenever a row of :attr:`runs` or a note may have changed, for what shows them."""
        return self._life.record.version

    def load_runs(self, path: str | os.PathLike[str]) -> ImportedRuns:
        """Bring back the runs alone that a saved state holds, whatever is loaded; says how many were not there yet.

        Raises:
            InvalidInput: not a path.
            StateFileError: it is not such a file, or holds none.
        """
        self._life.foreground.check_alive()
        return self._life.state_files.load_runs(path)


def _draw(comparison: Comparison) -> None:
    from ..ui.figures import show_comparison  # plotly takes long to import

    show_comparison(comparison)
