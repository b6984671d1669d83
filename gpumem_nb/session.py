"""Session: the one object a notebook holds for a running cluster."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .cluster.calls import Call
from .kernel import compatibility, starting
from .kernel.foreground import Foreground, pickled
from .kernel.history import History
from .kernel.idle import IdleWatch
from .kernel.inspection import Inspection
from .kernel.loading import Loading, Origin
from .kernel.policy import RULES, Policy
from .kernel.snapshot_plan import SnapshotPlan
from .kernel.stop_button import finish_anyway
from .kernel.training import Training
from .report.configurations import Runs
from .report.memory import MemoryReport
from .report.run_summary import Run
from .report.status import StateFile, Status, describe_ledger
from .report.waits import WaitReport
from .shared import snapshot_folder
from .shared.errors import Interrupted, InvalidInput, NoSession, nearest
from .shared.messages import RankInfo, Timeline, WorkloadInfo
from .shared.progress import Progress
from .shared.ranklist import RankChoice
from .shared.settings import KNOBS, Settings
from .shared.workload import Workload

if TYPE_CHECKING:
    from .ui.panel import Panel

LONGEST_TRAINING_STEPS = 10**9
_numbers = itertools.count(1)


_current: Session | None = None


def current() -> Session:
    """The running session. Raises ``NoSession`` when there is none."""
    if _current is None:
        raise NoSession
    return _current


def start(
    n: int | None = None,
    *,
    device: str = "auto",
    memory_limit: str | int | None = None,
    hosts: str | None = None,
    launcher: str = "mpi",
    threads: int | None = None,
    timeout: float = 120.0,
    progress: Progress = lambda what, done: None,
) -> Session:
    """Start ranks and connect to them.

    Args:
        n: number of ranks; ``None`` for one per visible GPU, or two without GPUs.
        device: ``auto``, ``cuda`` or ``cpu`` (a virtual GPU for every rank).
        memory_limit: for each rank, such as ``"2GiB"`` or a number of bytes; ``None`` for the whole GPU, or 2 GiB of a
            virtual one.
        hosts: where, such as ``"a:2,b:2"``, this machine among them; all on this machine by default. On the others
            everything must lie at the same paths, and ssh must reach them without a password.
        launcher: how they are started, by its name in :data:`gpumem_nb.cluster.launchers.LAUNCHERS`: ``mpi``.
        threads: CPU threads of each rank; by default the cores are shared out evenly.
        timeout: seconds for the whole start.
        progress: told what is being waited for.

    Raises:
        InvalidInput: an argument that cannot be used, or ranks that are running already.
        StartError, SetupError: the start failed; nothing is left running.
        Interrupted: stop was pressed; nothing is left running.
    """
    if _current is not None and _current.ended:
        _current.stop()
    if _current is not None:
        raise InvalidInput(
            f"{_current.size} ranks are running already. Use them, or stop them first with %hvd_stop "
            "(%hvd_restart starts afresh)."
        )
    plan = starting.plan(n, device, memory_limit, hosts, launcher, threads, timeout, progress)
    return Session(plan, progress)


class Session:
    """A running cluster and what is trained on it; made by :func:`start`, ended by :meth:`stop` or a ``with`` block.

    Whatever needs the ranks raises ``NoSession`` after :meth:`stop`, ``ClusterDied`` when they are gone, and
    ``Interrupted`` when stop is pressed while it waits for them; what else a method raises is said there.

    Attributes:
        history: what has been measured since the ranks were started.
        restored: what the last :meth:`restart` brought back, in words.
    """

    def __init__(self, plan: starting.Plan, progress: Progress) -> None:
        self._plan = plan
        self._origin = Origin()
        self._policy = Policy()
        self._changing_policy = threading.Lock()
        self._snapshots = SnapshotPlan(
            snapshot_folder.for_session(next(_numbers)),
            lambda: self._policy,
            lambda text: self.history.mark("note", text),
        )
        self.restored = ""
        self._ended = ""
        self._panel: Panel | None = None
        self._connect(progress)
        with suppress(OSError):
            snapshot_folder.make_room(self._snapshots.folder, 0, self._policy.snapshot_space)

    def _connect(self, progress: Progress) -> None:
        global _current
        history = History(self._plan.size)
        try:
            self._ranks = self._plan.start(history.started_s, self._policy.stall_limit_s, progress)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while the ranks were starting. What had been started was ended.") from None
        self.history = history  # only now: a start that fails leaves what was measured before
        self._training = Training(self._ranks, self.history, self._snapshots, lambda: self._policy, self._lost)
        self._foreground = Foreground(
            self._ranks, self._training, self.history, lambda: self._policy, lambda: self._ended, self.touch
        )
        self._inspection = Inspection(self.ranks, self._foreground, self._training, self.history)
        self._loading = Loading(self._foreground, self._training, self.history, self._snapshots, self._origin)
        self._ended = ""
        self._training.start()
        self._ranks.look_after(self._training.give_up)
        self._idle = IdleWatch(lambda: self._policy.idle_minutes, self._works, self._stop_idle)
        self._idle.start()
        _current = self

    # Who runs ---------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._plan.size

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Who the ranks are, in rank order."""
        return tuple(self._ranks.infos)

    def status(self) -> Status:
        """Which ranks run where, on which devices, and what they are doing; also of a session that has ended."""
        training = self._training
        return Status(
            doing=self.doing,
            ranks=self.ranks,
            workload=training.workload,
            settings=training.settings,
            steps=self.history.steps,
            snapshots=self._snapshots.describe(),
            ledger=describe_ledger(self._policy.ledger_steps, self.history.ledger_cost()),
            start_seconds=dict(self._ranks.seconds),
            others=tuple(starting.others(self._plan.device)),
        )

    @property
    def doing(self) -> str:
        """What is happening, in one line of words."""
        if self._ended:
            return self._ended
        stopped = [
            f"rank {rank} is stopped (SIGSTOP): continue it with {command}, or start again with %hvd_restart"
            for rank, command in self._ranks.stopped().items()
        ]
        return "; ".join(
            [*stopped, str(self.wait_report or self._training.describe()), *filter(None, [self._idle.notice()])]
        )

    @property
    def wait_report(self) -> WaitReport | None:
        """What takes long, and who waits for whom; ``None`` when nothing does."""
        return self._foreground.wait_report

    @property
    def workload(self) -> WorkloadInfo | None:
        """What is loaded."""
        return self._training.workload

    # Code on ranks ----------------------------------------------------------------------------------------------

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
        if isinstance(code_or_function, str):
            return self.run_cell(code_or_function, ranks=ranks, timeout=timeout, result="value").get()
        if not callable(code_or_function):
            raise InvalidInput(f"A {type(code_or_function).__name__} cannot be run: give code as text, or a function.")
        return self._foreground.call_function(code_or_function, args, ranks, timeout)

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
        return self._foreground.run_cell(source, title, result, memory, ranks, timeout, show)

    def push(self, variables: Mapping[str, Any], ranks: RankChoice = None) -> None:
        """Define variables on the ranks, all of them by default.

        Raises:
            InvalidInput: a name that cannot be a variable's, or ranks that do not exist.
            WorkloadError: a value that cannot be sent to the ranks.
            RankError: a value that a rank cannot receive, for example because a module is missing there.
        """
        for name in variables:
            if not isinstance(name, str) or not name.isidentifier():
                raise InvalidInput(f"{name!r} is not a variable name.")
        pickled(variables, "The value")
        self._foreground.call("push", dict(variables), ranks=ranks)

    def pull(self, name: str, ranks: RankChoice = None) -> list[Any]:
        """The values of a variable, in rank order. What lies on a GPU comes back on the CPU, as :meth:`run` says.

        Raises:
            InvalidInput: ranks that do not exist.
            WorkloadError: there is no such variable on a rank.
            RankError: a value that cannot be sent, or that cannot be read here.
        """
        return self._foreground.call("pull", name, ranks=ranks)

    # What is trained --------------------------------------------------------------------------------------------

    def load(self, name_or_workload: str | Workload, **options: Any) -> WorkloadInfo:
        """Load a ready-made workload by name with options, or your own :class:`Workload`; training starts afresh.

        Raises:
            InvalidInput: an unknown name, option or value.
            WorkloadError: it cannot be sent to the ranks, or not be trained there.
            RankError: its code failed on a rank.
        """
        return self._loading.load(name_or_workload, options)

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
        return self._loading.attach({"model": model, "data": data, "loss": loss, "optimizer": optimizer})

    # Saving and resuming ----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], progress: Progress = lambda what, done: None) -> StateFile:
        """Write model, optimizer, scaler, data position, random numbers and settings to one file.

        Training goes on afterwards: the state is that between two chunks.

        Raises:
            InvalidInput: not a path.
            WorkloadError: nothing is loaded.
            StateFileError: it cannot be written there; an older file of that name is as it was.
        """
        self._foreground.check_loaded()
        return self._loading.save(_as_path(path), progress)

    def resume(
        self, path: str | os.PathLike[str] | None = None, progress: Progress = lambda what, done: None
    ) -> StateFile:
        """Go on from a saved state, on any number of ranks; without a path from the newest automatic snapshot.

        What is loaded must be the workload that was saved; when nothing is loaded, a ready-made one is loaded first.

        Raises:
            InvalidInput: not a path.
            StateFileError: the file cannot be used, or there is no snapshot; nothing was changed.
        """
        self._foreground.check_alive()
        return self._loading.resume(None if path is None else _as_path(path), progress)

    # Settings and training --------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The knobs as they are now."""
        return self._training.settings

    @property
    def policy(self) -> Policy:
        """What the session does by itself: after an out-of-memory error, when ranks stall, when it is idle."""
        return self._policy

    def set(self, **knobs: Any) -> Settings:
        """Change knobs; while training, from the next chunk on. Rules of :attr:`policy` change at once.

        Raises:
            InvalidInput: an unknown knob, or a value that cannot be used with what is loaded; nothing was changed.
            TrainingFailed: while nothing trains, the ranks could not switch to these settings.
        """
        for name in knobs:
            if name not in KNOBS and name not in RULES:
                raise InvalidInput(f"There is no knob {name!r}: {nearest(name, [*KNOBS, *RULES])}.")
        rules = {name: knobs.pop(name) for name in RULES if name in knobs}

        def check(settings: Settings) -> None:
            if workload := self._training.workload:
                compatibility.check(settings, workload, self.size)

        self._policy.replace(**rules)  # whatever cannot be used is refused before anything is changed
        check(self.settings.replace(**knobs))
        self._foreground.check_alive()
        if rules:
            self._change_policy(rules)
        with self._foreground.interruptible():
            self._training.set(knobs, check)
        return self.settings

    def train(self, steps: int) -> Run:
        """Train that many optimizer steps and wait for them; stop pauses, and returns what was done by then.

        Raises:
            InvalidInput: not a whole number of at least 1.
            WorkloadError: nothing is loaded.
            TrainingFailed: a step could not be done and training paused.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= LONGEST_TRAINING_STEPS:
            raise InvalidInput(
                f"{steps!r} steps cannot be trained: it must be a whole number of at least 1, such as 100."
            )
        self._foreground.check_loaded()
        # What training could not interrupt by itself will not be by a second try.
        with self._foreground.interruptible(lambda: not self.waiting_for):
            return self._training.train(steps)

    def play(self) -> None:
        """Train in the background until :meth:`pause`.

        Raises:
            WorkloadError: nothing is loaded.
            TrainingFailed: some rank is stuck since the last stall.
        """
        self._foreground.check_loaded()
        self._training.play()

    def pause(self) -> None:
        """Stop training after the steps under way, and wait for them; without effect while nothing trains."""
        self._foreground.pause()

    def step(self) -> None:
        """Train one step in the background; raises what :meth:`play` raises."""
        self._foreground.check_loaded()
        self._training.play(1)

    @property
    def playing(self) -> bool:
        """Whether training runs."""
        return not self._ended and self._training.playing

    @property
    def ended(self) -> str:
        """Why the session is over, in words; empty while it lives."""
        return self._ended

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not answered yet what training asked of them."""
        return [] if self._ended else self._training.waiting_for()

    # What was measured ------------------------------------------------------------------------------------------

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
        return self._inspection.report(by, timeline)

    def timeline(self) -> list[Timeline]:
        """Record one step of every rank, allocation by allocation; the step is undone.

        Raises:
            WorkloadError: nothing is loaded, or the step could not be recorded.
        """
        return self._inspection.timeline()

    def memory_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write torch's own snapshot of the memory of rank 0's GPU, for its visualiser (pytorch.org/memory_viz).

        With something loaded it shows one step, which is undone; it is written even when that step fails.

        Raises:
            InvalidInput: the ranks have virtual GPUs, or the file cannot be written.
        """
        self._foreground.check_alive()
        if self.ranks[0].virtual:
            raise InvalidInput(
                "torch writes memory snapshots of real GPUs only, and these ranks have virtual ones: leave --snapshot "
                "out, %hvd_memory shows where their bytes are."
            )
        target = _as_path(path)
        self._inspection.write_snapshot(target)
        return target

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

    # Ending -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt what the ranks are doing: a cell raises ``KeyboardInterrupt``, a training step is discarded."""
        self._foreground.check_alive()
        self._training.interrupt()

    def restart(self, progress: Progress = lambda what, done: None) -> Session:
        """Stop the ranks and start the same number again, with what was trained restored.

        Ranks that still answer are asked for a snapshot first; otherwise the last automatic one is used.
        :attr:`restored` says what came back.

        Raises:
            StartError, SetupError: the ranks could not be started again; :meth:`restart` may be tried once more.
            WorkloadError, RankError: what was loaded cannot be loaded again.
        """
        global _current
        loaded = self._origin.loaded
        hopeless = self._ended or self._ranks.stopped() or (self._foreground.in_vain and self._ranks.pending())
        up_to_date = loaded and not hopeless and self._loading.take_last_snapshot()
        before = self._loading.remember(up_to_date)
        self._end()
        try:
            self._connect(progress)
        except BaseException:
            self._ended = "the ranks were ended and could not be started again"
            _current = self
            raise
        self.restored = self._loading.restore(before) if loaded else ""
        if self.workload and (before.up_to_date or not self.history.steps):
            self.set(**before.settings.changed_from(self.settings))
        if self._panel is not None:
            self._panel.watch()
        return self

    def stop(self) -> None:
        """End all ranks and everything started with them; without effect on a session that has ended.

        The newest automatic snapshot is kept for a later session.
        """
        self._end()
        with suppress(OSError):
            snapshot_folder.tidy(self._snapshots.folder)
        self._origin.not_kept = "the session was stopped"

    def _end(self) -> None:
        global _current
        if _current is self:
            _current = None
        self._ended = self._ended or "stopped"
        self._idle.stop()
        finish_anyway(self._shut_down, "gpumem_nb ending")

    def _shut_down(self) -> None:
        self._training.close()
        self._ranks.stop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session: {self.size} ranks, {self.doing}>"

    # Helpers ----------------------------------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        self._ended = f"the ranks are gone: {why}"

    def _change_policy(self, rules: dict[str, Any]) -> None:
        with self._changing_policy:
            before, self._policy = self._policy, self._policy.replace(**rules)
        if self._policy.stall_limit_s != before.stall_limit_s:
            self._ranks.call("set_stall_limit", self._policy.stall_limit_s)
        if "snapshot_space" in rules:
            with suppress(OSError):
                snapshot_folder.make_room(self._snapshots.folder, 0, self._policy.snapshot_space)

    def touch(self) -> None:
        """Somebody works here: the session is not idle."""
        self._idle.touch()

    def _works(self) -> bool:
        return self._foreground.busy or self._training.busy

    def _stop_idle(self) -> None:
        why = f"stopped after {self._policy.idle_minutes:g} minutes without work (%hvd_set idle_minutes=never keeps it)"
        if self.workload and not self._ended:
            self._loading.take_last_snapshot()
        if self._ended:
            self._idle.stop()
        elif self._idle.over:  # still: somebody may have come back during the snapshot
            self._idle.stop()
            self.history.mark("note", why)
            self._ended = why
            self._shut_down()


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        raise InvalidInput(f"{path!r} is not a file's path. Give one such as digits.state.")
    return Path(path).expanduser().absolute()
