"""Logs of measurements for other programs."""

from __future__ import annotations

import os

from ..kernel.lifecycle import Lifecycle
from ..kernel.logs import Log


class WritesLogs:
    """The part of a session that logs for other programs."""

    _life: Lifecycle

    @property
    def logs(self) -> tuple[Log, ...]:
        """Return what is logged now, and what could not be logged any more."""
        return tuple(self._life.logs)

    def log_to(self, target: str | os.PathLike[str], to: str | None = None) -> Log:
        """Write steps, settings, evaluations and events from now on, until the session ends or is told to stop.

        A thread of its own does it, so training never waits; a target that fails ends its log, not the training. The
        log goes on through restarts and resuming; another workload, or one that is loaded afresh, begins another run.

        Args:
            target: a folder, a file, or ``project/run`` of trackio.
            to: ``tensorboard``, ``jsonl`` or ``trackio``; by default JSON lines for what ends in ``.jsonl`` and
                TensorBoard for anything else.

        Raises:
            InvalidInput: an unknown kind, a package that is not installed, or a target that cannot be written.
        """
        self._life.foreground.check_alive()
        return self._life.logs.begin(os.fspath(target), to, self._life.history.settings_now())

    def stop_logging(self, target: str | os.PathLike[str] | None = None) -> None:
        """Write what there is and end one log, or all of them.

        Raises:
            InvalidInput: nothing is logged there.
        """
        self._life.logs.stop(None if target is None else os.fspath(target))
