"""The messages that the ranks are sent: chunks of steps under the settings of the moment, and trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...cluster.calls import Call
from ...shared.messages import Chunk
from ...shared.settings import Settings
from ..history import History
from ..policy import Policy
from ..snapshot_plan import SnapshotPlan
from .in_flight import InFlight
from .state import TrainingState


class Chunks:
    """Makes chunks and sends them. Used under the training lock.

    Args:
        policy: what the session does by itself, as it is now.
    """

    def __init__(
        self,
        state: TrainingState,
        in_flight: InFlight,
        history: History,
        snapshots: SnapshotPlan,
        policy: Callable[[], Policy],
    ) -> None:
        self._state = state
        self._in_flight = in_flight
        self._history = history
        self._snapshots = snapshots
        self._policy = policy

    def send(self, steps: int, evaluate: bool = False, traced: bool = False) -> Call:
        """Send a chunk; one without steps applies the settings, and may evaluate.

        Recording where memory goes takes time of its own, which has no place in a trace.
        """
        recorded = 0 if traced else _or_never(self._policy().ledger_steps)
        chunk = self._chunk(self._state.settings, self._state.settings_id, steps, ledger_steps=recorded)
        return self._in_flight.send(replace(chunk, evaluate=evaluate, traced=traced))

    def send_turn(self, settings: Settings, settings_id: int, steps: int) -> None:
        """Send steps of autotune, under settings that it tries or those that were asked for."""
        chunk = self._chunk(settings, settings_id, steps)
        self._in_flight.send(replace(chunk, instead_of=self._state.settings.changed_from(settings)))

    def _chunk(self, settings: Settings, settings_id: int, steps: int, ledger_steps: int = 0) -> Chunk:
        return Chunk(
            settings,
            settings_id,
            steps,
            self._in_flight.nudges,
            snapshot=self._snapshots.order(self._steps),
            ledger_steps=ledger_steps,
            eval_every=_or_never(self._policy().eval_every),
        )

    def send_trial(self, settings: Settings, trial_id: int) -> None:
        """Ask for a forecast of the next step under these settings, of all of its micro-batches."""
        chunk = Chunk(settings, trial_id, 1, self._in_flight.nudges, trial=True)
        size = settings.batch_size
        self._in_flight.send(chunk, "forecast", settings, [size], [size], 0, False)

    @property
    def none_left_over(self) -> bool:
        """Return whether no rank still works on what was given up: it would meet others in the wrong reduction."""
        return self._in_flight.leftover is None

    @property
    def steps_to_snapshot(self) -> float:
        """The steps that the next chunk may have so as not to pass the moment for a snapshot."""
        return self._snapshots.steps_left(self._steps)

    @property
    def _steps(self) -> int:
        """After which the next chunk begins."""
        return self._history.steps + self._in_flight.steps


def _or_never(every: int | str) -> int:
    return 0 if every == "never" else int(every)
