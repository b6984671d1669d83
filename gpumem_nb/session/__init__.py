"""Session: the one object a notebook holds for a running cluster."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..kernel import starting, state_files
from ..kernel.history import History
from ..kernel.lifecycle import Lifecycle
from ..report.written import Snapshots, StateFile, Written
from ..shared import snapshot_folder
from ..shared.answers import Progress
from ..shared.errors import InvalidInput, NoSession
from ..shared.messages import RankInfo
from ..shared.units import checked_flag
from ..ui.cells import import_panel
from .looking import ReportsState
from .planning import PredictsSettings
from .training import TrainsWorkload
from .workload import HoldsWorkload

if TYPE_CHECKING:
    from ..ui.panel import Panel


_current: Session | None = None
_latest: Session | None = None
_panel: Panel | None = None  # the notebook's; one session after the other is shown in it


def current() -> Session:
    """Return the running session. Raises ``NoSession`` when there is none."""
    if _current is None:
        raise NoSession
    return _current


def latest() -> Session:
    """Return the running session, or the one that was stopped last, whose measurements are still there.

    Raises ``NoSession`` when there was none.
    """
    return _latest if _current is None and _latest is not None else current()


def start(n: int | None = None, *, progress: Progress = lambda what, done: None, **options: Any) -> Session:
    """As :func:`gpumem_nb.start`; ``progress`` is told what is being waited for."""
    _check_free(None)
    if _current is not None:
        _current.stop()
    started = Session(starting.plan(n, progress=progress, **options), progress)
    import_panel()
    return started


def resume(path: str | os.PathLike[str] | None, progress: Progress) -> StateFile:
    """Resume as :meth:`Session.resume` does; without a session, start ranks first."""
    if _current is None:
        source, ranks, limit = state_files.ranks_for(path)
        start(ranks, memory_limit=limit, progress=progress)
        path = source
    return current().resume(path, progress)


def snapshots() -> Snapshots:
    """As :meth:`Session.snapshots`, also without a session."""
    return state_files.snapshots(snapshot_folder.for_session(0)) if _current is None else _current.snapshots()


def _check_free(own: Session | None) -> None:
    if _current is not None and _current is not own and not _current.ended:
        raise InvalidInput(
            f"{_current.size} ranks are running already. Use them, or stop them first with %hvd_stop "
            "(%hvd_restart starts afresh)."
        )


class Session(HoldsWorkload, TrainsWorkload, ReportsState, PredictsSettings):
    """A running cluster and what is trained on it; made by :func:`start`, ended by :meth:`stop` or a ``with`` block.

    Whatever needs the ranks raises ``NoSession`` after :meth:`stop`, ``ClusterDied`` when they are gone, and
    ``Interrupted`` when stop is pressed while it waits for them; what else a method raises is said there.
    """

    def __init__(self, plan: starting.Plan, progress: Progress) -> None:
        global _current, _latest
        self._life = Lifecycle(plan)
        self._life.start(progress)
        _current = _latest = self
        if _panel is not None:
            _panel.show(self)

    @property
    def history(self) -> History:
        """Return what has been measured since the ranks were started."""
        return self._life.history

    @property
    def restored(self) -> str:
        """Return what the last :meth:`restart` brought back, in words."""
        return self._life.restored

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._life.plan.size

    @property
    def chosen(self) -> str:
        """Return how many ranks were started and why, in a sentence; empty where a number was named."""
        return self._life.plan.chosen

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Return who the ranks are, in rank order."""
        return tuple(self._life.ranks.infos)

    @property
    def ended(self) -> str:
        """Return why the session is over, in words; empty while it lives."""
        return self._life.ended

    def panel(self, big: bool = False) -> Panel:
        """Controls and live charts; the same panel each time, until it is closed, also for the session after this one.

        Args:
            big: in type that can be read from the back of a room.

        Raises:
            InvalidInput: ``big`` is neither true nor false.
        """
        global _panel
        from ..ui.panel import Panel

        big = checked_flag("big", big)
        if _panel is not None and _panel.big != big:
            _panel.close()
        if _panel is None or _panel.closed:
            _panel = Panel(self, big)
        _panel.show(self)
        return _panel

    def report(self, path: str | os.PathLike[str], progress: Progress = lambda what, done: None) -> Written:
        """Write the session as one page: charts, runs, findings, what was predicted, versions.

        It opens in any browser, without a network and without a kernel, and can be written of a session that has ended.
        For the findings the ranks are asked as by :meth:`doctor`; interrupted meanwhile, the page is written without.

        Args:
            path: of the file, which ends in ``.html``.
            progress: told what is being looked at.

        Raises:
            InvalidInput: not such a path, or the file cannot be written or is of something else.
        """
        from .reports import write_report

        return write_report(self, path, progress)

    def interrupt(self) -> None:
        """Interrupt what the ranks are doing: a cell raises ``KeyboardInterrupt``, a training step is discarded.

        A state that is being put in place is finished.
        """
        self._life.foreground.check_ranks()
        self._life.training.interrupt()

    def restart(self, progress: Progress = lambda what, done: None) -> Session:
        """Stop the ranks and start the same number again, with what was trained restored.

        Ranks that still answer are asked for a snapshot first; otherwise the last automatic one is used.
        :attr:`restored` says what came back.

        Raises:
            StartError, SetupError: the ranks could not be started again; :meth:`restart` may be tried once more.
            WorkloadError, RankError: what was loaded cannot be loaded again.
        """
        global _current, _latest
        _check_free(self)
        _current = _latest = self
        try:
            self._life.restart(progress)
        finally:
            if _panel is not None:
                _panel.show(self)
        return self

    def stop(self) -> None:
        """End all ranks and everything started with them; without effect on a session that has ended.

        The newest automatic snapshot is kept for a later session.
        """
        global _current
        if _current is self:
            _current = None
        self._life.stop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session: {self.size} ranks, {self.doing}>"

    def touch(self) -> None:
        """Note that the session is in use, not idle."""
        self._life.idle.touch()
