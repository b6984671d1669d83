"""Loading of workloads, and restoring them: from a file, or after a restart from the last snapshot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cluster.calls import Call
from ..cluster.interrupts import finish_anyway, let_finish
from ..cluster.ranks import Posted
from ..report.differences import typed
from ..report.runs import Row
from ..report.runs.files import readable
from ..shared import snapshot_folder, state_file
from ..shared.errors import ClusterDied, GpumemError, Interrupted, InvalidInput, StateFileError, WorkloadError
from ..shared.messages import SnapshotOrder, Stored
from ..shared.settings import Settings
from ..shared.units import check_names, checked_seed
from ..shared.workload import Workload, WorkloadInfo
from ..workloads import catalog
from . import compatibility
from .cluster import AsksRanks, Cluster
from .foreground import RESUMING, if_done
from .origin import Unrestored
from .running import pickled
from .snapshot_plan import notebook_name

# What a restart allows ranks that may hang, before it takes the last automatic snapshot in place of one made now.
RESTART_TIMEOUT_S = 10.0
LATE_S = 10.0  # by how much later a rank may refuse to load than another, before it is taken to hang
SOON_S = 1.0  # for a state that is being put in place when stop is pressed
ATTACHED = "attached.pickle"


class Loading(AsksRanks):
    """Loads and restores what the ranks of one cluster train.

    Attributes:
        kept: which knobs the latest load has left as they were before, in a sentence; empty if none.
        unkept: why steps would be lost with the ranks, which could not be kept when that was tried last; empty if not.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.kept = self.unkept = ""

    def load(self, name_or_workload: str | Workload, options: dict[str, Any], seed: int | str | None) -> WorkloadInfo:
        """Load a workload; training starts afresh.

        Raises:
            InvalidInput: an unknown name or option, or nothing that could be loaded.
            RankError: it failed on a rank.
        """
        origin, number = self._origin, self._seed(seed)
        chosen: dict[str, float] | None = None
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
        sent = pickled(workload, "The workload")

        def loaded(info: WorkloadInfo) -> None:
            origin.workload, origin.sent, origin.attached, origin.unrestored = workload, sent, None, None
            self._origin.cells.loaded()
            with suppress(OSError):
                (self._snapshots.folder / ATTACHED).unlink(missing_ok=True)  # what it holds is gone from the ranks

        return self._begin("load", sent, number, chosen, loaded)

    def attach(self, names: dict[str, str | None], seed: int | str | None) -> WorkloadInfo:
        """Train objects that live on the ranks."""
        check_names(names, needed=() if names["trainer"] else ("model", "data"))
        origin = self._origin

        def attached(info: WorkloadInfo) -> None:
            origin.workload, origin.attached, origin.unrestored = None, names, None
            origin.trained_before = info.trained_before
            origin.not_kept = "writing them was cut short"
            self._origin.cells.loaded(names)

        info = self._begin("attach", names, self._seed(seed), then=attached)
        self._keep_attached(names)
        return info

    def seed(self, seed: int | str) -> str:
        """Seed cells and what is loaded from now on, and what is loaded if no step was done; says so in a sentence."""
        origin, number = self._origin, checked_seed(seed)

        def seeded(call: Call) -> None:
            self._origin.cells.seeded(number)
            origin.default_seed = number
            if call.get()[0] == 0:
                origin.seed = number

        steps = self._foreground.call("seed", number, then=seeded)[0]
        what = f"Seed {number}: random numbers of cells on all ranks, and whatever is loaded or attached from now on."
        workload = self._training.workload
        if workload is None or steps is None:
            return what
        if steps:
            again = "load" if origin.attached is None else "attach"
            goes_on = f"{workload.name} goes on from step {steps} with its own"
            return f"{what} {goes_on}: {again} it with seed={number} instead."
        return f"{what} So are the data order and dropout of {workload.name}; its weights stay as they are."

    def _seed(self, given: int | str | None) -> int:
        return self._origin.default_seed if given is None else checked_seed(given)

    def sync(self) -> None:
        """Give all ranks what rank 0 holds."""

        def alike(call: Call) -> None:
            self._history.settled("diverged")
            self._history.mark("note", "all ranks have the weights and the optimizer's state of rank 0")

        try:
            self._foreground.call("sync", then=alike)
        finally:
            self._history.model_may_have_changed()

    def take_last_snapshot(self) -> bool:
        """Take one more snapshot while the ranks live; says whether there is one of this very step."""
        self.unkept = ""
        with suppress(GpumemError, TimeoutError):
            self._training.pause(timeout=RESTART_TIMEOUT_S)
            if self._training.workload is None or self._history.steps == 0:
                return False
            order = self._snapshots.order_now(self._history.steps)
            stored = self._take_snapshot(order) if order else None
            why = stored.problem if stored else "" if order else self._snapshots.problem
            if why and (done := self._history.steps_since_load):
                self.unkept = f"{done:,} step{'s' * (done > 1)} would be lost. {why}"
            return stored is not None and stored.taken and not why
        return False

    def _take_snapshot(self, order: SnapshotOrder) -> Stored | None:
        stored: Stored | None = None
        try:
            timeout_s = RESTART_TIMEOUT_S + self._snapshots.expected_s
            stored = self._foreground.call("snapshot_now", order, timeout=timeout_s)[0]
        finally:
            self._snapshots.order_ended(stored)
        return stored

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
            self._begin("load", origin.sent, origin.seed, origin.options)
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
                restored = self.resume_from(snapshot, after_restart=snapshot != lost.named).steps
            except StateFileError as error:
                why = f"no snapshot could be used: {error}"
                continue
            after = f" ({steps - restored} steps after it were lost)" if steps > restored else ""
            if restored and not lost.up_to_date and (later := typed(self._training.settings, lost.settings)):
                after += f" under the settings of that step (back to the later ones with: %hvd_set {later})"
            return f"step {restored} restored{after}{self._as_it_was()}"
        origin.unrestored = None
        after = f"; {steps} steps were lost, because {why}" if steps else ""
        return (
            f"{self._training.workload.name if self._training.workload else ''} loaded afresh{after}{self._as_it_was()}"
        )

    def _as_it_was(self) -> str:
        """Say what is as it was when this was loaded: where cells ran since, and the notebook's functions changed."""
        origin, told = self._origin, ""
        if since := sum(bool(cell.source or cell.opaque) for cell in origin.cells.since_load()):
            told = (
                f". {since:,} cell{'s' * (since > 1)} had run on the ranks since it was "
                f"{'loaded' if origin.workload else 'attached'}: what {'they' if since > 1 else 'it'} changed besides "
                "training state is gone. Run again what is needed"
            )
        if origin.workload is None:
            return told
        with suppress(WorkloadError):  # it cannot travel any more
            if pickled(origin.workload, "The workload") == origin.sent:
                return told
        return (
            f"{told}. The workload is as it was loaded: what its functions use has changed in the notebook since. To "
            "train that, load it again"
        )

    def _keep_attached(self, names: dict[str, str | None]) -> None:
        """Objects made in cells cannot be made again by a restart, so they are kept beside the snapshots."""
        folder, space = self._snapshots.folder, self._snapshots.space

        def kept(call: Call) -> None:
            self._origin.not_kept = call.get()[0]

        try:
            snapshot_folder.make(folder, notebook_name())
        except OSError as error:
            self._origin.not_kept = f"{folder} cannot be made: {error.strerror}"
            return
        self._foreground.call("save_attached", names, str(folder / ATTACHED), space, ranks=[0], then=kept)

    def _begin(
        self,
        function: str,
        argument: Any,
        seed: int,
        options: dict[str, float] | None = None,
        then: Callable[[WorkloadInfo], None] = lambda info: None,
    ) -> WorkloadInfo:
        """Let the ranks load something, and train that from now on; ``then`` is told of it in the same moment.

        However late an interrupt comes, the notebook knows afterwards what the ranks have.
        """
        asked: list[Call] = []
        began: list[WorkloadInfo] = []

        def post(posted: Posted) -> Call:
            def both(call: Call) -> None:
                asked.append(call)
                posted(call)
                self._training.loads(True)

            return self._foreground.ask(function, argument, seed, posted=both)

        def loaded(call: Call) -> None:
            info: WorkloadInfo = call.get()[0]
            info = replace(info, notes=(*info.notes, *call.notes()))
            self._origin.options, self._origin.seed = options, seed
            self._origin.resumed_from = self._origin.named = None
            self._history.seen_before = 0
            settings = compatibility.loaded(self._training.settings, info, self._history.size)
            self.kept = compatibility.kept(settings, info, self._history.size)
            self._train_from(0, info, settings, f"loaded {info.name}")
            then(info)
            began.append(info)

        def ended(call: Call) -> None:
            try:
                if_done(loaded)(call)
            finally:
                self._training.loads(False)

        self._foreground.pause()
        try:
            self._foreground.finish(post, ended=ended)
            return began[0]
        except (Exception, KeyboardInterrupt) as error:
            interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
            if began and interrupted:
                raise Interrupted(f"The interrupt came too late: {began[0].name} was already loaded.") from None
            if asked:
                self._foreground.mark_notes(asked[0])
                with suppress(KeyboardInterrupt):  # what went wrong in the load is said in any case
                    cut_short = interrupted or isinstance(error, ClusterDied)  # no rank refused
                    finish_anyway(lambda: self._settle(asked[0], cut_short), RESUMING)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("Interrupted before anything was loaded.") from None
            raise

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

    def _check_together(self, settings: Settings, source: Path) -> None:
        try:
            settings.check_together(self._history.size)
        except InvalidInput as error:
            raise StateFileError(f"{source.name} was saved by another number of ranks. {error}") from None

    def resume_from(self, source: Path, after_restart: bool = False) -> state_file.Header:
        """Go on from a file; what is loaded must be what was saved.

        Raises:
            StateFileError: it cannot be used; nothing was changed.
            Interrupted: stop was pressed; says whether anything was resumed.
        """
        # Training goes on while the ranks look at the file: one that is refused changes nothing.
        header: state_file.Header | None = None
        placing = False
        came: list[Exception | None] = []  # of it, once that is known

        def put() -> None:
            nonlocal placing
            placing = True
            assert header is not None
            try:
                self._put_in_place(source, header, rows, settings, after_restart)
                came.append(None)
            except Exception as error:
                came.append(error)
                raise

        try:
            header, runs = self._foreground.call("resume_check", str(source))[0]
            settings = Settings.from_saved(header.settings, source)  # this process's knobs may be others
            self._check_together(settings, source)
            rows, problem = readable(runs)  # before the ranks change anything: it takes long, and may fail
            if problem:
                self._history.mark("note", f"{source.name}: {problem}")
            self._foreground.pause()
            finish_anyway(put, RESUMING)
            return header
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                with suppress(KeyboardInterrupt):  # of one more press
                    let_finish(RESUMING, SOON_S)
            if placing and header and isinstance(error, KeyboardInterrupt):
                if came and came[0]:
                    raise came[0] from None
                state = f"{'was already' if came else 'is being'} resumed at step {header.steps}"
                raise Interrupted(f"The interrupt came too late: {header.workload} {state}.") from None
            if not placing:
                with suppress(GpumemError):
                    self._foreground.ask("resume_drop")  # not waited for: a rank may not have heard an interrupt yet
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("Interrupted before anything was resumed.") from None
            raise

    def _put_in_place(
        self, source: Path, header: state_file.Header, rows: list[Row], settings: Settings, after_restart: bool
    ) -> None:
        """Put the state in place; an interrupt must not stop this half way, or kernel and ranks would be apart."""
        self._training.loads(True)
        try:
            self._put_and_take_in(source, header, rows, settings, after_restart)
        finally:
            self._training.loads(False)
        self._training.apply()

    def _put_and_take_in(
        self, source: Path, header: state_file.Header, rows: list[Row], settings: Settings, after_restart: bool
    ) -> None:
        info: WorkloadInfo = self._foreground.call("resume_apply", after_restart)[0]
        self._origin.resumed_from, self._origin.unrestored, self._origin.seed = source, None, header.seed
        self._origin.named = None if after_restart else source
        self._history.seen_before = header.position
        self._record.bring(rows, source.name)
        settings = compatibility.resumed(settings, header.settings, info)
        self._train_from(header.steps, info, settings, f"resumed {info.name} at step {header.steps}")

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
