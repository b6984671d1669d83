"""Session: the one object a notebook holds for a running cluster."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle

from . import records, snapshot_folder, stalls, state_file
from .cluster import resources
from .cluster.calls import Call
from .cluster.hosts import Host, share_out
from .cluster.launch import Progress
from .cluster.ranks import Ranks
from .engine import entry
from .errors import (
    ClusterDied,
    GpumemError,
    Interrupted,
    InvalidInput,
    NoSession,
    RankError,
    Stalled,
    StateFileError,
    WorkloadError,
    nearest,
)
from .history import History, Run, Runs
from .idle import IdleWatch
from .interruption import Presses, finish_anyway
from .memory.report import MemoryReport, RankMemory, check_view
from .memory.units import parse_size
from .policy import RULES, Policy
from .ranklist import name_ranks, parse_ranks
from .sample import Ledger, RankConfig, RankInfo, Timeline, WorkloadInfo
from .settings import KNOBS, Settings
from .snapshot_plan import SnapshotPlan
from .status import StateFile, Status
from .training import Training
from .workload import Workload
from .workloads import catalog

if TYPE_CHECKING:
    from .ui.panel import Panel

LONGEST_TRAINING_STEPS = 10**9
# What a restart allows ranks that may hang, before it takes the last automatic snapshot in place of one made now.
RESTART_PATIENCE_S = 10.0
ATTACHED = "attached.pickle"
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
        launcher: ``mpi``.
        threads: CPU threads of each rank; by default the cores are shared out evenly.
        timeout: seconds for the whole start.
        progress: told what is being waited for.

    Raises:
        InvalidInput: an argument that cannot be used, or ranks that are running already.
        StartError, SetupError: the start failed; nothing is left running.
    """
    if _current is not None and _current.ended:
        _current.stop()
    if _current is not None:
        raise InvalidInput(
            f"{_current.size} ranks are running already. Use them, or stop them first with %hvd_stop "
            "(%hvd_restart starts afresh)."
        )
    if launcher != "mpi":
        raise InvalidInput(f"launcher={launcher!r} is not known. Allowed: mpi.")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidInput(f"timeout={timeout!r} cannot be used: it must be a number of seconds above 0, such as 120.")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InvalidInput(f"threads={threads!r} cannot be used: it must be a whole number of at least 1, such as 2.")
    limit = None if memory_limit is None else parse_size(memory_limit)
    for left in records.clean_up_after_others():
        progress(f"ended what kernel {left.kernel.pid} had left behind", 0.0)
    places = () if hosts is None else share_out(hosts, n)
    here, kind = resources.choose(places[0].ranks if places else n, device)
    for other in _others(kind):
        progress(f"besides, {other}", 0.0)
    size = sum(host.ranks for host in places) or here
    most = max((host.ranks for host in places), default=size)  # on one host
    plan = _Plan(size, kind, limit, threads or max(1, resources.cores() // most), float(timeout), places)
    return Session(plan, progress)


@dataclass(frozen=True)
class _Plan:
    size: int
    device: str
    memory_limit: int | None
    threads: int
    timeout: float
    hosts: tuple[Host, ...]

    def start(self, history: History, stall_limit_s: float, progress: Progress) -> Ranks:
        config = RankConfig(self.device, self.memory_limit, self.threads, history.started_s, stall_limit_s)
        return Ranks(
            self.size,
            self.threads,
            self.device,
            entry,
            ("set_up", config),
            self.timeout,
            progress,
            self.memory_limit,
            self.hosts,
        )


class Session:
    """A running cluster and what is trained on it; made by :func:`start`, ended by :meth:`stop` or a ``with`` block.

    Attributes:
        restored: what the last :meth:`restart` brought back, in words.
    """

    def __init__(self, plan: _Plan, progress: Progress) -> None:
        self._plan = plan
        self._source: Workload | None = None
        self._options: dict[str, float] | None = None
        self._attached: dict[str, str | None] | None = None
        self._not_kept = ""  # why the attached objects cannot be brought back
        self._resumed_from: Path | None = None
        self._policy = Policy()
        self._snapshots = SnapshotPlan(
            snapshot_folder.for_session(next(_numbers)),
            lambda: self._policy,
            lambda text: self.history.mark("note", text),
        )
        self.restored = ""
        self._ended = ""
        self._panel: Panel | None = None
        self._presses = Presses()
        self._foreground = 0  # calls that somebody waits for
        self._connect(progress)
        with suppress(OSError):
            snapshot_folder.make_room(self._snapshots.folder, 0, self._policy.snapshot_space)

    def _connect(self, progress: Progress) -> None:
        global _current
        self.history = History(self._plan.size)
        try:
            self._ranks = self._plan.start(self.history, self._policy.stall_limit_s, progress)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while the ranks were starting. What had been started was ended.") from None
        self._training = Training(self._ranks, self.history, self._snapshots, self._lost)
        self._training.policy = self._policy
        self._ended = ""
        self._ranks.look_after(self._training.give_up)
        self._idle = IdleWatch(lambda: self._policy.idle_minutes, self._works, self._stop_idle)
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
        """Who runs where, on what, doing what."""
        training = self._training
        return Status(
            doing=self.doing,
            ranks=self.ranks,
            workload=training.workload,
            settings=training.settings,
            steps=self.history.steps,
            snapshots=self._snapshots.describe(),
            ledger=self._describe_ledger(),
            start_seconds=dict(self._ranks.seconds),
            others=tuple(_others(self._plan.device)),
        )

    def _describe_ledger(self) -> str:
        every, cost = self._policy.ledger_steps, self.history.ledger_cost()
        if every == "never":
            return "ledger: no step is looked into (%hvd_set ledger_steps=20)"
        costs = "" if cost is None else f", which costs {cost:.1%} of the time"
        return f"ledger: one step in {every} is looked into{costs}"

    @property
    def doing(self) -> str:
        """What is happening, in one line of words."""
        if self._ended:
            return self._ended
        stopped = [
            f"rank {rank} is stopped (SIGSTOP): continue it with {command}, or start again with %hvd_restart"
            for rank, command in self._ranks.stopped().items()
        ]
        return "; ".join([*stopped, str(self.scene or self._training.describe()), *filter(None, [self._idle.notice()])])

    @property
    def scene(self) -> stalls.Scene | None:
        """What takes long, and who waits for whom; ``None`` when nothing does."""
        return None if self._ended else stalls.now(self._ranks.pulses(), self._ranks.pending(), self.size)

    @property
    def workload(self) -> WorkloadInfo | None:
        """What is loaded."""
        return self._training.workload

    # Code on ranks ----------------------------------------------------------------------------------------------

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: str | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run on ranks and return the results in rank order.

        Args:
            code_or_function: source code, whose last expression gives the result, or a function.
            *args: arguments of the function.
            ranks: which ones, as numbers or as text such as ``"0,2-3"``; all by default.
            timeout: seconds to wait; no limit by default.

        Raises:
            RankError: code failed on a rank; raised as soon as the first one failed.
            TimeoutError: it took too long; the ranks were interrupted.
        """
        if isinstance(code_or_function, str):
            return self.run_cell(code_or_function, ranks=ranks, timeout=timeout, result="value").get()
        if not callable(code_or_function):
            raise InvalidInput(f"A {type(code_or_function).__name__} cannot be run: give code as text, or a function.")
        self._check_alive()
        blob = _pickled((code_or_function, args), "The function")
        return self._finish(self._ranks.call_function(blob, self._choose_ranks(ranks)), timeout).get()

    def run_cell(
        self,
        source: str,
        *,
        ranks: str | Sequence[int] | None = None,
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
            title: stands in tracebacks in place of a file name.
            result: ``value`` to send back what the last expression gives, ``text`` for its representation.
            memory: let each rank print what the code did to its memory.
            show: called ten times a second and at the end.
        """
        self._check_alive()
        try:
            compile(source, title, "exec")
        except SyntaxError as error:
            raise InvalidInput(f"The code has a syntax error in line {error.lineno}: {error.msg}.") from None
        call = self._ranks.run_cell(source, title, result, memory, self._choose_ranks(ranks))
        return self._finish(call, timeout, show)

    def _finish(
        self, call: Call, timeout: float | None = None, show: Callable[[Call], None] = lambda call: None
    ) -> Call:
        """Wait for a call. The first error is raised at once; an interrupt or a time-out reaches the ranks."""
        self._training.make_way()
        with self._interruptible(lambda: self._ranks.interrupt_until(call.finished), call.pending):
            try:
                for finished in call.slices(timeout):
                    if finished:
                        call.settle(1.0)
                    show(call)
                    if not finished and stalls.out_of_reach(call.pulses(), self._ranks.stall_limit_s):
                        raise ClusterDied(f"{self.scene}, and could not be freed.")
            except TimeoutError:
                self._ranks.interrupt_until(call.finished)
                raise
            except RankError as error:
                if what := self._after_stall(call):
                    raise Stalled(error, what) from None
                raise
        return call

    def _after_stall(self, call: Call) -> str:
        """Bring the ranks together again when some were freed from waiting; says what had happened."""
        call.finished(0.5)  # ranks that waited together are freed together
        if not call.apart():
            return ""
        scene = stalls.ended(call.apart(), self._ranks.pulses(), call.pending(), self.size)
        if not scene:
            return ""
        if late := call.pending():
            self._ranks.interrupt_until(call.finished, late)
        what = f"{scene} (stall_limit_s={self._ranks.stall_limit_s:g})."
        self.history.mark("stall", what)
        if left := call.pending():
            return f"{what} {name_ranks(left).capitalize()} could not be interrupted: use %hvd_restart."
        joined = self._ranks.rejoin(patience_s=2.0)
        return f"{what} They were freed and {'were joined' if joined else 'will be joined'} again."

    def push(self, variables: Mapping[str, Any], ranks: str | Sequence[int] | None = None) -> None:
        """Define variables on the ranks."""
        for name in variables:
            if not isinstance(name, str) or not name.isidentifier():
                raise InvalidInput(f"{name!r} is not a variable name.")
        _pickled(variables, "The value")
        self._call("push", dict(variables), ranks=ranks)

    def pull(self, name: str, ranks: str | Sequence[int] | None = None) -> list[Any]:
        """The values of a variable, in rank order."""
        return self._call("pull", name, ranks=ranks)

    # What is trained --------------------------------------------------------------------------------------------

    def load(self, name_or_workload: str | Workload, **options: Any) -> WorkloadInfo:
        """Load a ready-made workload by name with options, or your own :class:`Workload`; training starts afresh."""
        chosen = None
        if isinstance(name_or_workload, str):
            workload = catalog.make(name_or_workload, **options)
            chosen = catalog.find(name_or_workload).values(options)
        elif isinstance(name_or_workload, Workload):
            if options:
                raise InvalidInput(f"Options ({', '.join(options)}) go with ready-made workloads only.")
            workload = name_or_workload
        else:
            raise InvalidInput(
                f"A {type(name_or_workload).__name__} cannot be loaded: give a Workload, or one of the names "
                f"{', '.join(catalog.CATALOG)}."
            )
        _pickled(workload, "The workload")
        info = self._begin("load", workload, chosen)
        self._source, self._attached = workload, None
        return info

    def attach(self, model: str, data: str, loss: str | None = None, optimizer: str | None = None) -> WorkloadInfo:
        """Train objects that live on the ranks, named by their variables.

        Args:
            model: a ``torch.nn.Module``. Rank 0's weights are broadcast.
            data: a map-style dataset, or a ``DataLoader`` whose dataset and collate function are used.
            loss: a function ``loss(model, batch)``, or a criterion called as ``criterion(model(inputs), targets)``;
                left out when the model returns its own loss.
            optimizer: the optimizer to train with (``optimizer=own``); AdamW by default.
        """
        names = {"model": model, "data": data, "loss": loss, "optimizer": optimizer}
        info = self._begin("attach", names)
        self._source, self._attached = None, names
        self._not_kept = self._keep_attached(names)
        return info

    def _keep_attached(self, names: dict[str, str | None]) -> str:
        """Objects made in cells cannot be made again by a restart, so they are kept beside the snapshots."""
        folder, space = self._snapshots.folder, self._policy.snapshot_space
        try:
            snapshot_folder.make(folder)
        except OSError as error:
            return f"{folder} cannot be made: {error.strerror}"
        why_not: str = self._call("keep_attached", names, str(folder / ATTACHED), space, ranks=[0])[0]
        return why_not

    def _begin(self, function: str, argument: Any, options: dict[str, float] | None = None) -> WorkloadInfo:
        self.pause()
        try:
            info: WorkloadInfo = self._call(function, argument)[0]
        except GpumemError:
            if not all(self._call("loaded")):
                self._training.unload()
            raise
        settings = self.settings if info.blocks else self.settings.replace(checkpointing="none")
        if info.own_optimizer:
            own = {"optimizer": "own", "optimizer_impl": "default", "learning_rate": info.own_learning_rate}
            settings = settings.replace(**own)
        elif settings.optimizer == "own":
            settings = settings.replace(optimizer=Settings().optimizer, learning_rate=Settings().learning_rate)
        if info.dataset_len < self.size:
            raise WorkloadError(f"The dataset has {info.dataset_len} samples, fewer than the {self.size} ranks.")
        self._options, self._resumed_from = options, None
        self.history.seen_before = 0
        self._train_from(0, info, settings, f"loaded {info.name}")
        return info

    def _train_from(self, steps: int, info: WorkloadInfo, settings: Settings, event: str) -> None:
        if self._global_batch(settings) > info.dataset_len:
            settings = settings.replace(batch_size=info.dataset_len // self.size, accumulation_steps=1)
            self.history.mark("note", f"batch_size={settings.batch_size}, because the dataset is small")
        self.history.steps = steps
        self._snapshots.begin(info, steps, self._options)
        self._training.begin(info, settings)
        self.history.mark("load", event)

    # Saving and resuming ----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], progress: Progress = lambda what, done: None) -> StateFile:
        """Write model, optimizer, scaler, data position, random numbers and settings to one file.

        Training goes on afterwards: the state is that between two chunks.

        Raises:
            StateFileError: it cannot be written there; an older file of that name is as it was.
        """
        self._check_loaded()
        target, began = _as_path(path), time.perf_counter()
        progress("writing the training state", 0.5)
        self._training.apply()
        stored = self._finish(self._training.ask_alone("save", str(target), self._options)).get()[0]
        return StateFile("saved", target, stored.bytes, stored.steps, time.perf_counter() - began)

    def resume(
        self, path: str | os.PathLike[str] | None = None, progress: Progress = lambda what, done: None
    ) -> StateFile:
        """Go on from a saved state, on any number of ranks; without a path from the newest automatic snapshot.

        What is loaded must be the workload that was saved; when nothing is loaded, a ready-made one is loaded first.

        Raises:
            StateFileError: the file cannot be used; nothing was changed.
        """
        self._check_alive()
        began = time.perf_counter()
        source = self._newest_snapshot() if path is None else _as_path(path)
        progress("reading the training state", 0.5)
        if self.workload is None:
            self._load_for(source)
        header = self._resume_from(source)
        return StateFile("resumed", source, source.stat().st_size, header.steps, time.perf_counter() - began)

    def _newest_snapshot(self) -> Path:
        newest = snapshot_folder.newest_of_all(self._snapshots.folder)
        if newest is None:
            raise StateFileError("There is no automatic snapshot. Name a file that %hvd_save wrote.")
        return newest

    def _load_for(self, source: Path) -> None:
        header = state_file.verify(source)
        if header.options is None or header.workload not in catalog.CATALOG:
            raise StateFileError(
                f"{source} is of {header.workload}, which is not a ready-made workload. Load or attach it first, then "
                f"resume: %hvd_resume {source}"
            )
        self.load(header.workload, **header.options)

    def _resume_from(self, source: Path) -> state_file.Header:
        # Training goes on while the ranks look at the file: one that is refused changes nothing.
        try:
            self._call("resume_check", str(source))
        except BaseException:
            with suppress(GpumemError):
                self._call("resume_drop")
            raise
        self.pause()
        info: WorkloadInfo = self._call("resume_apply")[0]
        header = state_file.read_header(source)
        self._resumed_from, self.history.seen_before = source, header.position
        settings = Settings().replace(**header.settings)
        self._train_from(header.steps, info, settings, f"resumed {info.name} at step {header.steps}")
        self._training.apply()
        return header

    # Settings and training --------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The knobs as they are now."""
        return self._training.settings

    @property
    def policy(self) -> Policy:
        """What the session does by itself: after an out-of-memory error, when ranks stall, when nobody works."""
        return self._policy

    def set(self, **knobs: Any) -> Settings:
        """Change knobs; while training, from the next chunk on. Rules of :attr:`policy` change at once."""
        for name in knobs:
            if name not in KNOBS and name not in RULES:
                raise InvalidInput(f"There is no knob {name!r}: {nearest(name, [*KNOBS, *RULES])}.")
        rules = {name: knobs.pop(name) for name in RULES if name in knobs}
        settings, policy = self.settings.replace(**knobs), self._policy.replace(**rules)
        workload = self._training.workload
        if workload and self._global_batch(settings) > workload.dataset_len:
            raise InvalidInput(
                f"A global batch of {settings.batch_size} × {settings.accumulation_steps} × {self.size} ranks = "
                f"{self._global_batch(settings)} samples is larger than the dataset ({workload.dataset_len}). "
                f"Allowed here: batch_size × accumulation_steps up to {workload.dataset_len // self.size}."
            )
        if workload and settings.optimizer == "own" and not workload.own_optimizer:
            raise InvalidInput(
                f"{workload.name} brings no optimizer of its own. Use optimizer=sgd, momentum, adam or adamw."
            )
        self._check_alive()
        if policy.stall_limit_s != self._policy.stall_limit_s:
            self._ranks.set_stall_limit(policy.stall_limit_s)
        self._policy = self._training.policy = policy
        if "snapshot_space" in rules:
            with suppress(OSError):
                snapshot_folder.make_room(self._snapshots.folder, 0, policy.snapshot_space)
        with self._interruptible():
            self._training.set(settings)
        return self.settings

    def train(self, steps: int) -> Run:
        """Train that many optimizer steps and wait for them."""
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= LONGEST_TRAINING_STEPS:
            raise InvalidInput(
                f"{steps!r} steps cannot be trained: it must be a whole number of at least 1, such as 100."
            )
        self._check_loaded()
        # What training could not interrupt by itself will not be by a second try.
        with self._interruptible(lambda: not self.waiting_for):
            return self._training.train(steps)

    def play(self) -> None:
        """Train in the background until :meth:`pause`."""
        self._check_loaded()
        self._training.play()

    def pause(self) -> None:
        """Stop training after the steps under way, and wait for them."""
        self._check_alive()
        with self._interruptible():
            self._training.pause()

    def step(self) -> None:
        """Train one step in the background."""
        self._check_loaded()
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

    def memory(self, by: str | None = None, timeline: bool = False) -> MemoryReport:
        """Live, reserved and device bytes of every rank, its limit, and what the latest known peak is made of.

        Args:
            by: what the report shows of the peak: ``None`` for the worst rank's categories, ``category`` for those of
                all ranks, ``module`` for the worst rank's modules.
            timeline: record one step, as :meth:`timeline` does.
        """
        check_view(by)
        timelines = tuple(self.timeline()) if timeline else ()
        ledgers = [line.ledger for line in timelines] or self._ledgers()
        entries = zip(self.ranks, self._call("look"), ledgers, strict=True)
        ranks = tuple(RankMemory(info, reading, ledger, use) for info, (reading, use), ledger in entries)
        return MemoryReport(ranks, by, timelines)

    def _ledgers(self) -> list[Ledger | None]:
        """Of each rank the latest one of what is loaded."""
        return [
            next((s.ledger for s in reversed(samples) if s.ledger and s.settings_id >= self.history.loaded_as), None)
            for samples in self.history.samples()
        ]

    def timeline(self) -> list[Timeline]:
        """Record one step of every rank, allocation by allocation; the step is undone."""
        self._check_loaded()
        self._training.apply()
        found = self._call("record_step")
        if missing := [rank for rank, timeline in enumerate(found) if timeline is None]:
            raise WorkloadError(f"The step could not be recorded on {name_ranks(missing)}. Try again.")
        return found

    def memory_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write torch's own snapshot of the memory of rank 0's GPU, for its visualiser (pytorch.org/memory_viz).

        With something loaded it shows one step, which is undone; it is written even when that step fails.

        Raises:
            InvalidInput: the ranks have virtual GPUs, or the file cannot be written.
        """
        self._check_alive()
        if self.ranks[0].virtual:
            raise InvalidInput(
                "torch writes memory snapshots of real GPUs only, and these ranks have virtual ones: leave --snapshot "
                "out, %hvd_memory shows where their bytes are."
            )
        target = _as_path(path)
        self._call("record_allocations", True, ranks=[0])
        try:
            try:
                if self.workload:
                    self.timeline()
            finally:
                self._call("write_snapshot", str(target), ranks=[0])
        finally:
            self._call("record_allocations", False, ranks=[0])
        return target

    @property
    def runs(self) -> Runs:
        """Every configuration tried, side by side."""
        return Runs(self.history.tried, self.size)

    def panel(self) -> Panel:
        """Controls and live charts."""
        from .ui.panel import Panel

        if self._panel is None or self._panel.closed:
            self._panel = Panel(self)
        return self._panel

    # Ending -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt what the ranks are doing: a cell raises ``KeyboardInterrupt``, a training step is discarded."""
        self._check_alive()
        self._training.interrupt()

    def restart(self, progress: Progress = lambda what, done: None) -> Session:
        """Stop the ranks and start the same number again, with what was trained restored.

        Ranks that still answer are asked for a snapshot first; otherwise the last automatic one is used.
        :attr:`restored` says what came back.
        """
        global _current
        steps, settings, loaded = self.history.steps, self.settings, self._training.workload is not None
        hopeless = self._ended or self._ranks.stopped() or (self._presses.in_vain and self._ranks.pending())
        up_to_date = loaded and not hopeless and self._take_last_snapshot()
        snapshots = snapshot_folder.newest_first(self._snapshots.folder, self._snapshots.generation)
        snapshots += [self._resumed_from] if self._resumed_from else []
        self._end()
        try:
            self._connect(progress)
        except BaseException:
            self._ended = "the ranks were ended and could not be started again"
            _current = self
            raise
        self.restored = self._restore(snapshots, steps) if loaded else ""
        if self.workload and (up_to_date or not self.history.steps):
            self.set(**settings.changed_from(self.settings))
        if self._panel is not None:
            self._panel.watch()
        return self

    def _take_last_snapshot(self) -> bool:
        """One more snapshot while the ranks live; says whether there is one of this very step."""
        with suppress(GpumemError, TimeoutError):
            self._training.pause(timeout=RESTART_PATIENCE_S)
            order = self._snapshots.order_now(self.history.steps) if self.history.steps else None
            if order:
                call = self._ranks.call("snapshot_now", order)
                stored = self._finish(call, RESTART_PATIENCE_S + self._snapshots.expected_s).get()[0]
                return stored is not None and not stored.problem
        return False

    def _restore(self, snapshots: Sequence[Path], steps: int) -> str:
        """Load the workload again and go on from the first of these snapshots that can be used."""
        if self._source is not None:
            self._begin("load", self._source, self._options)
        elif self._attached is not None:
            if self._not_kept:
                return (
                    f"Nothing is loaded: the attached objects could not be kept ({self._not_kept}). Run their cells "
                    "again, attach them, and type %hvd_resume."
                )
            self._call("bring_attached", self._attached, str(self._snapshots.folder / ATTACHED))
            self._begin("attach", self._attached)
        why = "there was no snapshot yet"
        for snapshot in snapshots:
            try:
                restored = self._resume_from(snapshot).steps
            except StateFileError as error:
                why = f"no snapshot could be used: {error}"
                continue
            lost = f" ({steps - restored} steps after it were lost)" if steps > restored else ""
            return f"step {restored} restored{lost}"
        lost = f"; {steps} steps were lost, because {why}" if steps else ""
        return f"{self._training.workload.name if self._training.workload else ''} loaded afresh{lost}"

    def stop(self) -> None:
        """End all ranks and everything started with them. The newest automatic snapshot stays for a later session."""
        self._end()
        with suppress(OSError):
            snapshot_folder.tidy(self._snapshots.folder)
        self._not_kept = "the session was stopped"

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

    def touch(self) -> None:
        """Somebody works here: the session is not idle."""
        self._idle.touch()

    def _works(self) -> bool:
        return self._foreground > 0 or self._training.busy

    def _stop_idle(self) -> None:
        why = f"stopped after {self._policy.idle_minutes:g} minutes without work (%hvd_set idle_minutes=never keeps it)"
        if not self._ended:
            if self.workload:
                self._take_last_snapshot()
            self.history.mark("note", why)
            self._ended = why
            self._shut_down()

    @contextmanager
    def _interruptible(
        self, stop_ranks: Callable[[], bool] | None = None, busy: Callable[[], list[int]] | None = None
    ) -> Iterator[None]:
        """While somebody waits for the ranks inside, an interrupt reaches them, and says what came of it."""
        self._foreground += 1
        try:
            yield
        except KeyboardInterrupt:
            training = self._training
            raise self._presses.explain(stop_ranks or training.interrupt, busy or training.waiting_for) from None
        finally:
            self._foreground -= 1
            self._idle.touch()

    def _check_alive(self) -> None:
        if self._ended == "stopped":
            raise NoSession
        if self._ended:
            raise ClusterDied(f"{self._ended[:1].upper()}{self._ended[1:].rstrip('.')}.")
        self._idle.touch()

    def _check_loaded(self) -> None:
        self._check_alive()
        if self._training.workload is None:
            raise WorkloadError("Nothing is loaded. Load a workload first, for example %hvd_load digits-resnet.")

    def _call(self, function: str, *arguments: Any, ranks: str | Sequence[int] | None = None) -> list[Any]:
        self._check_alive()
        return self._finish(self._ranks.call(function, *arguments, ranks=self._choose_ranks(ranks))).get()

    def _choose_ranks(self, ranks: str | Sequence[int] | None) -> list[int] | None:
        if ranks is None:
            return None
        chosen = parse_ranks(ranks) if isinstance(ranks, str) else [int(rank) for rank in ranks]
        if not chosen or min(chosen) < 0 or max(chosen) >= self.size:
            raise InvalidInput(f"ranks={ranks!r}: there are {name_ranks(range(self.size))}. Try ranks 0 or 0,2-3.")
        return sorted(set(chosen))

    def _global_batch(self, settings: Settings) -> int:
        return settings.samples_per_rank * self.size


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        raise InvalidInput(f"{path!r} is not a file's path. Give one such as digits.state.")
    return Path(path).expanduser().absolute()


def _others(device: str) -> list[str]:
    """Who else uses this machine's memory for ranks, and its GPUs."""
    return [*map(str, records.others()), *(resources.gpus_in_use() if device == "cuda" else [])]


def _pickled(value: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except GpumemError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{what} cannot be sent to the ranks: {error}. Leave out open files, locks and connections; create them "
            "inside the function that runs there."
        ) from None
