"""What is loaded, how it is saved, and how it comes back: from a file, or after a restart from the last snapshot."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster.calls import Call
from ..cluster.shield import finish_anyway
from ..report.differences import typed
from ..report.runs import Row
from ..report.runs.stored import Came, packed, readable, unpacked
from ..report.status import StateFile
from ..shared import snapshot_folder, state_file
from ..shared.errors import GpumemError, Interrupted, InvalidInput, StateFileError
from ..shared.messages import SnapshotOrder
from ..shared.progress import Progress
from ..shared.seeds import DEFAULT_SEED, checked_seed
from ..shared.settings import Settings
from ..shared.state_file import as_path
from ..shared.workload import Workload, WorkloadInfo
from ..workloads import catalog
from . import compatibility
from .cell_record import CellRecord
from .foreground import RESUMING, Foreground, fingerprint
from .history import History
from .record import Record
from .snapshot_plan import SnapshotPlan
from .training import Training

# What a restart allows ranks that may hang, before it takes the last automatic snapshot in place of one made now.
RESTART_PATIENCE_S = 10.0
LATE_S = 10.0  # by how much later a rank may refuse to load than another, before it is taken to hang
ATTACHED = "attached.pickle"


@dataclass(frozen=True)
class Unrestored:
    """What was trained when the ranks went; kept until it is back, because another fault may cut a restart short.

    Attributes:
        generation: of the workload.
        snapshots: what can be gone back to, the newest first.
        named: the one of them that somebody named: which weights are frozen is not for it to say.
        steps, settings: how far training was, and under what.
        up_to_date: whether the newest snapshot is of that very step.
    """

    generation: int
    snapshots: tuple[Path, ...]
    named: Path | None
    steps: int
    settings: Settings
    up_to_date: bool


@dataclass
class Origin:
    """Where what is trained came from; outlives the ranks, so that a restart can load it again.

    Attributes:
        workload: what was loaded, with ``sent`` what it was made of then.
        options: those of a ready-made workload; ``None`` for any other.
        attached: the variables of what was attached instead, by their roles.
        trained_before: steps that their weights had been trained for then.
        not_kept: why the attached objects cannot be brought back.
        resumed_from: the file that training went on from.
        named: that file, if somebody named it and no restart took it.
        unrestored: what a restart has yet to bring back.
        seed: of the initial weights, the order of the data and dropout.
        default_seed: of cells' random numbers, and of what is loaded next.
    """

    workload: Workload | None = None
    sent: bytes = b""
    options: dict[str, float] | None = None
    attached: dict[str, str | None] | None = None
    trained_before: int = 0
    not_kept: str = ""
    resumed_from: Path | None = None
    named: Path | None = None
    unrestored: Unrestored | None = None
    seed: int = DEFAULT_SEED
    default_seed: int = DEFAULT_SEED

    @property
    def loaded(self) -> bool:
        """Whether there is something to load again; unlike training, this knows while ranks come and go."""
        return self.workload is not None or self.attached is not None


class Loading:
    """Loads, saves and restores what the ranks of one cluster train.

    Attributes:
        kept: which knobs the latest load has left as they were before, in a sentence; empty if none.
    """

    def __init__(
        self,
        foreground: Foreground,
        training: Training,
        history: History,
        snapshots: SnapshotPlan,
        origin: Origin,
        cells: CellRecord,
        record: Record,
    ) -> None:
        self.kept = ""
        self._foreground = foreground
        self._training = training
        self._history = history
        self._snapshots = snapshots
        self._origin = origin
        self._cells = cells
        self._record = record

    def load(self, name_or_workload: str | Workload, options: dict[str, Any], seed: int | str | None) -> WorkloadInfo:
        """Load a workload; training starts afresh.

        Raises:
            InvalidInput: an unknown name or option, or nothing that could be loaded.
            RankError: it failed on a rank.
        """
        origin, chosen, number = self._origin, None, self._seed(seed)
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
        sent = fingerprint(workload)
        info = self._begin("load", workload, number, chosen)
        origin.workload, origin.sent, origin.attached, origin.unrestored = workload, sent, None, None
        self._cells.loaded()
        with suppress(OSError):
            (self._snapshots.folder / ATTACHED).unlink(missing_ok=True)  # what it holds is gone from the ranks
        return info

    def attach(self, names: dict[str, str | None], seed: int | str | None) -> WorkloadInfo:
        """Train objects that live on the ranks."""
        info = self._begin("attach", names, self._seed(seed))
        self._origin.workload, self._origin.attached, self._origin.unrestored = None, names, None
        self._origin.trained_before = info.trained_before
        self._cells.loaded(names)
        self._origin.not_kept = "the ranks ended before they were written"
        self._origin.not_kept = self._keep_attached(names)
        return info

    def seed(self, seed: int | str) -> str:
        """Seed cells and what is loaded from now on, and what is loaded if no step was done; says so in a sentence."""
        origin, number = self._origin, checked_seed(seed)
        steps = self._foreground.call("seed", number)[0]
        self._cells.seeded(number)
        origin.default_seed = number
        what = f"Seed {number}: random numbers of cells on all ranks, and whatever is loaded or attached from now on."
        workload = self._training.workload
        if workload is None or steps is None:
            return what
        if steps:
            again = "load" if origin.attached is None else "attach"
            goes_on = f"{workload.name} goes on from step {steps} with its own"
            return f"{what} {goes_on}: {again} it with seed={number} instead."
        origin.seed = number
        return f"{what} So are the data order and dropout of {workload.name}; its weights stay as they are."

    def _seed(self, given: int | str | None) -> int:
        return self._origin.default_seed if given is None else checked_seed(given)

    def save(self, path: str | os.PathLike[str], progress: Progress) -> StateFile:
        """Write the training state between two chunks to a file."""
        target = as_path(path)
        began = time.perf_counter()
        progress("writing the training state", 0.5)
        with self._foreground.interruptible():
            self._training.apply()
        call = self._training.ask_alone("save", str(target), self._origin.options, packed(self._record.rows()))
        stored = self._foreground.finish(call).get()[0]
        return StateFile("saved", target, stored.size_bytes, stored.steps, time.perf_counter() - began)

    def resume(self, path: str | os.PathLike[str] | None, progress: Progress) -> StateFile:
        """Go on from a file, or from the newest automatic snapshot."""
        began = time.perf_counter()
        source = self._newest_snapshot() if path is None else as_path(path)
        progress("reading the training state", 0.5)
        if self._training.workload is None:
            self._load_for(source)
        size = source.stat().st_size if source.exists() else 0  # the ranks say in a sentence that it is not there
        header = self._resume_from(source)
        return StateFile("resumed", source, size, header.steps, time.perf_counter() - began)

    def load_runs(self, path: str | os.PathLike[str]) -> Came:
        """Take in the runs that a state holds, and nothing else of it.

        Raises:
            InvalidInput: not a path.
            StateFileError: it is not such a file, or holds none.
        """
        source = as_path(path)
        (runs,) = self._foreground.call("runs_in", str(source), ranks=[0])
        if not runs:
            raise StateFileError(f"{source} holds no runs: it is an automatic snapshot, or of an earlier gpumem_nb.")
        try:
            rows, unread = unpacked(runs)
        except StateFileError as error:
            raise StateFileError(f"{source}: {error}") from None
        return Came(source, self._record.bring(rows, source.name), unread)

    def sync(self) -> None:
        """Give all ranks what rank 0 holds."""
        try:
            self._foreground.call("sync")
        finally:
            self._history.model_may_have_changed()
        self._history.settled("diverged")
        self._history.mark("note", "all ranks have the weights and the optimizer's state of rank 0")

    def take_last_snapshot(self) -> bool:
        """One more snapshot while the ranks live; says whether there is one of this very step."""
        with suppress(GpumemError, TimeoutError):
            self._training.pause(timeout=RESTART_PATIENCE_S)
            trained = self._training.workload is not None and self._history.steps > 0
            order = self._snapshots.order_now(self._history.steps) if trained else None
            if order:
                return self._take_snapshot(order)
        return False

    def _take_snapshot(self, order: SnapshotOrder) -> bool:
        stored = None
        try:
            patience_s = RESTART_PATIENCE_S + self._snapshots.expected_s
            stored = self._foreground.call("snapshot_now", order, timeout=patience_s)[0]
        finally:
            self._snapshots.order_ended(stored)
        return stored is not None and stored.taken and not stored.problem

    def remember(self, up_to_date: bool) -> Unrestored:
        """Note what a restart is to bring back, before the ranks go; ``up_to_date``: with a snapshot of this step."""
        origin, steps, generation = self._origin, self._history.steps, self._snapshots.generation
        before = origin.unrestored
        if before and (before.generation == generation or not steps):
            return before  # a restart was cut short, and nothing was trained since
        snapshots = snapshot_folder.newest_first(self._snapshots.folder, generation)
        snapshots += [origin.resumed_from] if origin.resumed_from else []
        snapshots += before.snapshots if before else ()
        origin.unrestored = Unrestored(
            generation,
            tuple(snapshots),
            origin.named or (before.named if before else None),
            steps,
            self._training.settings,
            up_to_date,
        )
        return origin.unrestored

    def restore(self, lost: Unrestored) -> str:
        """Load what was trained again and go on from the first of its snapshots that can be used, in words."""
        origin, steps = self._origin, lost.steps
        if origin.workload is not None:
            origin.sent = fingerprint(origin.workload)
            self._begin("load", origin.workload, origin.seed, origin.options)
        elif origin.attached is not None:
            if origin.not_kept:
                return (
                    f"Nothing is loaded: the attached objects could not be kept ({origin.not_kept}). Run their cells "
                    "again, attach them, and type %hvd_resume."
                )
            self._foreground.call("load_attached", origin.attached, str(self._snapshots.folder / ATTACHED))
            self._begin("attach", origin.attached, origin.seed)
        why = "there was no snapshot yet"
        for snapshot in lost.snapshots:
            try:
                restored = self._resume_from(snapshot, after_restart=snapshot != lost.named).steps
            except StateFileError as error:
                why = f"no snapshot could be used: {error}"
                continue
            after = f" ({steps - restored} steps after it were lost)" if steps > restored else ""
            return f"step {restored} restored{after}"
        origin.unrestored = None
        after = f"; {steps} steps were lost, because {why}" if steps else ""
        return f"{self._training.workload.name if self._training.workload else ''} loaded afresh{after}"

    def _keep_attached(self, names: dict[str, str | None]) -> str:
        """Objects made in cells cannot be made again by a restart, so they are kept beside the snapshots."""
        folder, space = self._snapshots.folder, self._snapshots.space
        try:
            snapshot_folder.make(folder)
        except OSError as error:
            return f"{folder} cannot be made: {error.strerror}"
        why_not: str = self._foreground.call("save_attached", names, str(folder / ATTACHED), space, ranks=[0])[0]
        return why_not

    def _begin(self, function: str, argument: Any, seed: int, options: dict[str, float] | None = None) -> WorkloadInfo:
        self._foreground.pause()
        call = self._foreground.ask(function, argument, seed)
        try:
            self._foreground.finish(call)
        except (Exception, Interrupted) as error:
            self._foreground.mark_notes(call)
            interrupted = isinstance(error, Interrupted)
            with suppress(KeyboardInterrupt):  # what went wrong in the load is said in any case
                finish_anyway(lambda: self._settle(call, interrupted), RESUMING)
            raise
        info: WorkloadInfo = call.get()[0]
        info = replace(info, notes=(*info.notes, *call.notes()))
        self._origin.options, self._origin.seed = options, seed
        self._origin.resumed_from = self._origin.named = None
        self._history.seen_before = 0
        settings = compatibility.loaded(self._training.settings, info, self._history.size)
        self.kept = compatibility.kept(settings, info, self._history.size)
        self._train_from(0, info, settings, f"loaded {info.name}")
        return info

    def _settle(self, call: Call, interrupted: bool) -> None:
        """A load failed: what was loaded before still is if all ranks refused and say so, else nothing is."""
        still_loaded = False
        if call.first_error() is not None and call.finished(0.0 if interrupted else LATE_S) and not call.pending():
            with suppress(GpumemError):
                still_loaded = all(self._foreground.call("loaded"))
        if not still_loaded:
            self._training.unload()
            if not interrupted and self._origin.unrestored is None:
                self._origin.workload = self._origin.attached = None

    def _resume_from(self, source: Path, after_restart: bool = False) -> state_file.Header:
        # Training goes on while the ranks look at the file: one that is refused changes nothing.
        try:
            header: state_file.Header
            header, runs = self._foreground.call("resume_check", str(source))[0]
            settings = Settings.from_saved(header.settings, source)  # this process's knobs may be others
            rows, problem = readable(runs)  # before the ranks change anything: it takes long, and may fail
            if problem:
                self._history.mark("note", f"{source.name}: {problem}")
            self._foreground.pause()
        except BaseException:
            with suppress(GpumemError):
                self._foreground.ask("resume_drop")  # not waited for: a rank may not have heard an interrupt yet
            raise
        try:
            finish_anyway(lambda: self._put_in_place(source, header, rows, settings, after_restart), RESUMING)
        except KeyboardInterrupt:
            raise Interrupted(f"Interrupted too late: {header.workload} goes on from step {header.steps}.") from None
        return header

    def _put_in_place(
        self, source: Path, header: state_file.Header, rows: list[Row], settings: Settings, after_restart: bool
    ) -> None:
        """What must not stop half way, because kernel and ranks would be apart."""
        info: WorkloadInfo = self._foreground.call("resume_apply", after_restart)[0]
        self._origin.resumed_from, self._origin.unrestored, self._origin.seed = source, None, header.seed
        self._origin.named = None if after_restart else source
        self._history.seen_before = header.position
        self._record.bring(rows, source.name)
        settings = compatibility.resumed(settings, header.settings, info)
        self._train_from(header.steps, info, settings, f"resumed {info.name} at step {header.steps}")
        self._training.apply()

    def _train_from(self, steps: int, info: WorkloadInfo, settings: Settings, event: str) -> None:
        fitting = compatibility.within_dataset(settings, info, self._history.size)
        if fitting != settings:
            self._history.mark("note", f"{typed(settings, fitting)}, because the dataset is small")
        self._history.steps = steps
        info = replace(info, options=tuple((self._origin.options or {}).items()))
        self._snapshots.begin(info, steps, self._origin.options)
        self._training.begin(info, fitting)
        self._history.mark("load", event)
        for note in info.notes:
            self._history.mark("note", note)

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
        self.load(header.workload, header.options, header.seed)
