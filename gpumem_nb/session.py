"""Session: the one object a notebook holds for a running cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .cluster.calls import Call
from .kernel import starting
from .kernel.history import History
from .kernel.lifecycle import Lifecycle
from .kernel.policy import Policy
from .report.configurations import Runs
from .report.memory import MemoryReport
from .report.run_summary import Run
from .report.status import StateFile, Status
from .report.waits import WaitReport
from .shared.errors import InvalidInput, NoSession
from .shared.messages import RankInfo, Timeline
from .shared.progress import Progress
from .shared.ranklist import RankChoice
from .shared.settings import Settings
from .shared.workload import Workload, WorkloadInfo

if TYPE_CHECKING:
    from .ui.panel import Panel


_current: Session | None = None


def current() -> Session:
    """The running session. Raises ``NoSession`` when there is none."""
    if _current is None:
        raise NoSession
    return _current


def start(n: int | None = None, *, progress: Progress = lambda what, done: None, **options: Any) -> Session:
    """As :func:`gpumem_nb.start`; ``progress`` is told what is being waited for."""
    _check_free(None)
    if _current is not None:
        _current.stop()
    return Session(starting.plan(n, progress=progress, **options), progress)


def _check_free(own: Session | None) -> None:
    if _current is not None and _current is not own and not _current.ended:
        raise InvalidInput(
            f"{_current.size} ranks are running already. Use them, or stop them first with %hvd_stop "
            "(%hvd_restart starts afresh)."
        )


class Session:
    """A running cluster and what is trained on it; made by :func:`start`, ended by :meth:`stop` or a ``with`` block.

    Whatever needs the ranks raises ``NoSession`` after :meth:`stop`, ``ClusterDied`` when they are gone, and
    ``Interrupted`` when stop is pressed while it waits for them; what else a method raises is said there.
    """

    def __init__(self, plan: starting.Plan, progress: Progress) -> None:
        global _current
        self._life = Lifecycle(plan)
        self._panel: Panel | None = None
        self._life.start(progress)
        _current = self

    @property
    def history(self) -> History:
        """What has been measured since the ranks were started."""
        return self._life.history

    @property
    def restored(self) -> str:
        """What the last :meth:`restart` brought back, in words."""
        return self._life.restored

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._life.plan.size

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Who the ranks are, in rank order."""
        return tuple(self._life.ranks.infos)

    def status(self) -> Status:
        """Which ranks run where, on which devices, and what they are doing; also of a session that has ended."""
        return self._life.status()

    @property
    def doing(self) -> str:
        """What is happening, in one line of words."""
        return self._life.doing

    @property
    def wait_report(self) -> WaitReport | None:
        """What takes long, and who waits for whom; ``None`` when nothing does."""
        return self._life.foreground.wait_report

    @property
    def workload(self) -> WorkloadInfo | None:
        """What is loaded."""
        return self._life.training.workload

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: RankChoice = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run on ranks and return the results in rank order.

        Results travel as pickles. Tensors on a GPU, also those inside other objects, come back as tensors on the CPU.

        Args:
            code_or_function: source code, whose last expression gives the result, or a function.
            *args: arguments of the function.
            ranks: which ones, as a number, several numbers or text such as ``"0,2-3"``; all by default.
            timeout: seconds to wait; no limit by default.

        Raises:
            InvalidInput: neither code nor a function, a syntax error in the code, or ranks that do not exist.
            WorkloadError: the function or its arguments cannot be sent to the ranks.
            RankError: code failed on a rank, or gave what cannot be read here (an object of a class that only the ranks
                can import); raised as soon as the first one failed (``Stalled`` if that was because other ranks did
                not come).
            TimeoutError: it took too long; the ranks were interrupted.
        """
        return self._life.foreground.run(code_or_function, args, ranks, timeout)

    def run_cell(
        self,
        source: str,
        *,
        ranks: RankChoice = None,
        timeout: float | None = None,
        title: str = "<code>",
        result: str = "value",
        memory: bool = False,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Run code on ranks, showing its output while it runs; returns the finished call.

        Args:
            source: plain Python.
            ranks, timeout: as in :meth:`run`.
            title: stands in tracebacks in place of a file name, with a number of its own: ``<code 3>``.
            result: ``value`` to send back what the last expression gives, ``text`` for its representation.
            memory: let each rank print what the code did to its memory.
            show: called ten times a second and at the end.

        Raises:
            InvalidInput: a syntax error in the code, or ranks that do not exist.
            RankError, TimeoutError: as in :meth:`run`.
        """
        return self._life.foreground.run_cell(source, title, result, memory, ranks, timeout, show)

    def push(self, variables: Mapping[str, Any], ranks: RankChoice = None) -> None:
        """Define variables on the ranks, all of them by default.

        Raises:
            InvalidInput: a name that cannot be a variable's, or ranks that do not exist.
            WorkloadError: a value that cannot be sent to the ranks.
            RankError: a value that a rank cannot receive, for example because a module is missing there.
        """
        self._life.foreground.push(variables, ranks)

    def pull(self, name: str, ranks: RankChoice = None) -> list[Any]:
        """The values of a variable, in rank order. What lies on a GPU comes back on the CPU, as :meth:`run` says.

        Raises:
            InvalidInput: ranks that do not exist.
            WorkloadError: there is no such variable on a rank.
            RankError: a value that cannot be sent, or that cannot be read here.
        """
        return self._life.foreground.call("pull", name, ranks=ranks)

    def load(self, name_or_workload: str | Workload, **options: Any) -> WorkloadInfo:
        """Load a ready-made workload by name with options, or your own :class:`Workload`; training starts afresh.

        Raises:
            InvalidInput: an unknown name, option or value.
            WorkloadError: it cannot be sent to the ranks, or not be trained there.
            RankError: its code failed on a rank.
        """
        return self._life.loading.load(name_or_workload, options)

    def attach(self, model: str, data: str, loss: str | None = None, optimizer: str | None = None) -> WorkloadInfo:
        """Train objects that live on the ranks, named by their variables.

        Args:
            model: a ``torch.nn.Module``. Rank 0's weights are broadcast.
            data: a map-style dataset, or a ``DataLoader`` whose dataset and collate function are used.
            loss: a function ``loss(model, batch)``, or a criterion called as ``criterion(model(inputs), targets)``;
                left out when the model returns its own loss.
            optimizer: the optimizer to train with (``optimizer=own``); AdamW by default.

        Raises:
            WorkloadError: there is no such variable, or what it holds cannot be trained.
            RankError: its code failed on a rank.
        """
        return self._life.loading.attach({"model": model, "data": data, "loss": loss, "optimizer": optimizer})

    def save(self, path: str | os.PathLike[str], progress: Progress = lambda what, done: None) -> StateFile:
        """Write model, optimizer, scaler, data position, random numbers and settings to one file.

        Training goes on afterwards: the state is that between two chunks.

        Raises:
            InvalidInput: not a path.
            WorkloadError: nothing is loaded.
            StateFileError: it cannot be written there; an older file of that name is as it was.
        """
        self._life.foreground.check_loaded()
        return self._life.loading.save(path, progress)

    def resume(
        self, path: str | os.PathLike[str] | None = None, progress: Progress = lambda what, done: None
    ) -> StateFile:
        """Go on from a saved state, on any number of ranks; without a path from the newest automatic snapshot.

        What is loaded must be the workload that was saved; when nothing is loaded, a ready-made one is loaded first.

        Raises:
            InvalidInput: not a path.
            StateFileError: the file cannot be used, or there is no snapshot; nothing was changed.
        """
        self._life.foreground.check_alive()
        return self._life.loading.resume(path, progress)

    @property
    def settings(self) -> Settings:
        """The knobs as they are now."""
        return self._life.training.settings

    @property
    def policy(self) -> Policy:
        """What the session does by itself: after an out-of-memory error, when ranks stall, when it is idle."""
        return self._life.policy

    def set(self, **knobs: Any) -> Settings:
        """Change knobs; while training, from the next chunk on. Rules of :attr:`policy` change at once.

        Raises:
            InvalidInput: an unknown knob, or a value that cannot be used with what is loaded; nothing was changed.
            TrainingFailed: while nothing trains, the ranks could not switch to these settings.
        """
        self._life.set(knobs)
        return self.settings

    def train(self, steps: int) -> Run:
        """Train that many optimizer steps and wait for them; stop pauses, and returns what was done by then.

        Raises:
            InvalidInput: not a whole number of at least 1.
            WorkloadError: nothing is loaded.
            TrainingFailed: a step could not be done and training paused.
        """
        self._life.foreground.check_loaded()
        # What training could not interrupt by itself will not be by a second try.
        with self._life.foreground.interruptible(lambda: not self.waiting_for):
            return self._life.training.train(steps)

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
        """Whether training runs."""
        return not self._life.ended and self._life.training.playing

    @property
    def ended(self) -> str:
        """Why the session is over, in words; empty while it lives."""
        return self._life.ended

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not answered yet what training asked of them."""
        return [] if self._life.ended else self._life.training.waiting_for()

    def memory(self, by: str | None = None, timeline: bool = False) -> MemoryReport:
        """Live, reserved and device bytes of every rank, its limit, and what the latest known peak is made of.

        Args:
            by: what the report shows of the peak: ``None`` for the worst rank's categories, ``category`` for those of
                all ranks, ``module`` for the worst rank's modules.
            timeline: record one step, as :meth:`timeline` does.

        Raises:
            InvalidInput: ``by`` is none of these.
            WorkloadError: with ``timeline``, nothing is loaded, or the step could not be recorded.
        """
        return self._life.inspection.report(by, timeline)

    def timeline(self) -> list[Timeline]:
        """Record one step of every rank, allocation by allocation; the step is undone.

        Raises:
            WorkloadError: nothing is loaded, or the step could not be recorded.
        """
        return self._life.inspection.timeline()

    def memory_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write torch's own snapshot of the memory of rank 0's GPU, for its visualiser (pytorch.org/memory_viz).

        With something loaded it shows one step, which is undone; it is written even when that step fails.

        Raises:
            InvalidInput: the ranks have virtual GPUs, or the file cannot be written.
        """
        self._life.foreground.check_alive()
        return self._life.inspection.write_snapshot(path)

    @property
    def runs(self) -> Runs:
        """Every configuration tried, side by side."""
        return Runs(self.history.tried, self.size)

    def panel(self) -> Panel:
        """Controls and live charts; the same panel each time, until it is closed."""
        from .ui.panel import Panel

        if self._panel is None or self._panel.closed:
            self._panel = Panel(self)
            self._panel.watch()
        return self._panel

    def interrupt(self) -> None:
        """Interrupt what the ranks are doing: a cell raises ``KeyboardInterrupt``, a training step is discarded."""
        self._life.foreground.check_alive()
        self._life.training.interrupt()

    def restart(self, progress: Progress = lambda what, done: None) -> Session:
        """Stop the ranks and start the same number again, with what was trained restored.

        Ranks that still answer are asked for a snapshot first; otherwise the last automatic one is used.
        :attr:`restored` says what came back.

        Raises:
            StartError, SetupError: the ranks could not be started again; :meth:`restart` may be tried once more.
            WorkloadError, RankError: what was loaded cannot be loaded again.
        """
        global _current
        _check_free(self)
        _current = self
        self._life.restart(progress)
        if self._panel is not None:
            self._panel.watch()
        return self

    def stop(self) -> None:
        """End all ranks and everything started with them; without effect on a session that has ended.

        The newest automatic snapshot is kept for a later session.
        """
        global _current
        if _current is self:
            _current = None
        self._life.end()
        self._life.tidy_up()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session: {self.size} ranks, {self.doing}>"

    def touch(self) -> None:
        """Somebody works here: the session is not idle."""
        self._life.idle.touch()
