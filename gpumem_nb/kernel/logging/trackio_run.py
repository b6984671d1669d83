"""A log as runs of a trackio project, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from typing import Any

from ...report.configurations import Tried
from ...report.evaluation import Evaluation
from ...shared.errors import InvalidInput
from ...shared.messages import Sample
from ..history import Event
from .target import of_evaluation, of_settings, of_step


class TrackioRun:
    """Logs to ``project`` or ``project/name``; further runs are called ``name-2`` and so on.

    A run of the same name is gone on with. No dashboard is started and nothing is measured by trackio itself; where its
    own environment variables name a server or a Space, it sends to that.

    Raises:
        InvalidInput: the package is missing, or trackio refuses the name.
    """

    NAME = "run"  # where only a project is named

    def __init__(self, target: str) -> None:
        try:
            import trackio
        except ImportError:
            raise InvalidInput("trackio is not installed. Type: pip install trackio") from None
        self._trackio: Any = trackio
        self._project, _, name = target.partition("/")
        self._name = name or self.NAME
        self.about = f"run {self._name} of the trackio project {self._project} (trackio show --project {self._project})"
        self._run = self._opened(self._name)

    def new_run(self, number: int) -> None:
        """Go on under a name of its own."""
        self._run.finish()
        self._run = self._opened(f"{self._name}-{number}")

    def go_on_from(self, step: int) -> None:
        """Nothing: trackio takes no step back."""

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """Numbers as metrics."""
        self._run.log(dict(of_settings(tried)), step=step)

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """The metrics of a finished step; a discarded one has none."""
        if samples[0].done:
            self._run.log(dict(of_step(samples)), step=samples[0].step)

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """Metrics."""
        self._run.log(dict(of_evaluation(evaluation)), step=evaluation.step)

    def event(self, time_s: float, event: Event) -> None:
        """A text beside the metrics."""
        self._run.log({"events": f"{event.kind}: {event.text}"}, step=event.step)

    def flush(self) -> None:
        """Nothing: trackio's own thread sends several times a second."""

    def close(self) -> None:
        """Wait for trackio to write what it has."""
        self._run.finish()

    def _opened(self, name: str) -> Any:
        try:
            # In a context of its own: in the notebook's, it would replace a run that a cell logs to there.
            return Context().run(
                self._trackio.init,
                self._project,
                name=name,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except ValueError as error:
            raise InvalidInput(f"trackio refuses the project {self._project!r}: {error}") from None
