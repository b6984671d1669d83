"""Ranks come and go; what is trained on them and what was measured outlives them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..cluster.interrupts import finish_anyway, shielded
from ..cluster.ranks import IN_PASSING_S, Ranks
from ..report.speed import STEPS_JUDGED
from ..report.status import Status, describe_ledger
from ..report.step_time import TimeReport
from ..shared import snapshot_folder
from ..shared.answers import Progress
from ..shared.errors import ClusterDied, Interrupted, InvalidInput, StateFileError, nearest
from ..shared.knobs import KNOBS
from ..shared.knobs.step import COMPILED
from ..shared.settings import Settings
from . import compatibility, starting
from .cluster import Cluster
from .foreground import Foreground
from .history import History
from .idle import IdleWatch
from .ledger_plan import cost, recorded_every
from .loading import Loading
from .logs import Logs
from .origin import Origin
from .policy import RULES, Policy
from .questions.fitting import Knobs, moved
from .questions.inspection import Inspection
from .questions.predicting import Predicting
from .record import Record
from .running import Running
from .snapshot_plan import SnapshotPlan
from .state_files import StateFiles
from .training import Training

_numbers = itertools.count(1)
RESTARTING = "the ranks are being started again"


class Lifecycle:
    """One session's ranks, from start to stop, with restarts in between.

    Attributes:
        plan: which ranks to start.
        policy: what the session does by itself.
        snapshots: when automatic snapshots are taken.
        logs: where everything that is measured is written besides.
        record: every configuration that was tried, also before a restart.
        ended: why there are no ranks any more, in words; empty while there are.
        restored: what the last restart brought back, in words.
        cluster, and all below: of the ranks that run, or ran last.
    """

    cluster: Cluster
    running: Running
    loading: Loading
    state_files: StateFiles
    idle: IdleWatch

    def __init__(self, plan: starting.Plan) -> None:
        self.plan = plan
        self.policy = Policy()
        self.ended = ""
        self.restored = ""
        self._changing_policy = threading.Lock()
        self._origin = Origin()
        self.record = Record()
        self.logs = Logs(lambda text: self.history.mark("note", text))
        self.snapshots = SnapshotPlan(
            snapshot_folder.for_session(next(_numbers)),
            lambda: self.policy,
            lambda text: self.history.mark("note", text),
        )

    @property
    def history(self) -> History:
        """Return what has been measured since the ranks were started."""
        return self.cluster.history

    @property
    def ranks(self) -> Ranks:
        """Return the ranks."""
        return self.cluster.ranks

    @property
    def training(self) -> Training:
        """Return what keeps the ranks training."""
        return self.cluster.training

    @property
    def foreground(self) -> Foreground:
        """Return what asks the ranks for the notebook."""
        return self.cluster.foreground

    def start(self, progress: Progress) -> None:
        """Start the ranks, and everything that works beside them.

        Raises:
            StartError, SetupError: the start failed; nothing is left running.
            Interrupted: stop was pressed; nothing is left running.
        """
        history = History(self.plan.size, self.logs.take_in)
        try:
            ranks = self.plan.start(history.started_s, self.policy.stall_limit_s, self._origin.default_seed, progress)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while the ranks were starting. What had been started was ended.") from None
        try:
            self._work_beside(ranks, history)
        except BaseException:
            finish_anyway(ranks.stop, "gpumem_nb ending")  # what works beside them may not be there yet
            raise

    def _work_beside(self, ranks: Ranks, history: History) -> None:
        training = Training(ranks, history, self.snapshots, lambda: self.policy, self._autotuned, self._lost)
        foreground = Foreground(
            ranks, training, history, lambda: self.policy, lambda: self.ended, lambda: self.idle.touch()
        )
        origin, record, snapshots = self._origin, self.record, self.snapshots
        cluster = Cluster(ranks, history, training, foreground, lambda: self.policy, origin, record, snapshots)
        cluster.inspection, cluster.predicting = Inspection(cluster), Predicting(cluster)
        # Only now: a start that fails leaves what was measured before.
        self.cluster = cluster
        self.record.follow(history, ranks.infos[0])
        self._origin.cells.started(self._origin.default_seed)
        self.running, self.loading = Running(cluster), Loading(cluster)
        self.state_files = StateFiles(cluster, self.loading)
        self.idle = IdleWatch(lambda: self.policy.idle_minutes, self._works, self._stop_idle)
        self.ended = ""
        training.start()
        ranks.look_after(training.give_up)
        self.idle.start()
        self._make_room()

    def restart(self, progress: Progress) -> None:
        """Stop the ranks and start the same number again; :attr:`restored` says what came back of what was trained.

        Training that was playing in the background goes on. Settings that were made before anything was loaded hold.

        Raises:
            StateFileError: the ranks answer, but what was trained could not be kept; nothing was ended.
            StartError, SetupError: the ranks could not be started again; it may be tried once more.
            WorkloadError, RankError: what was loaded cannot be loaded again.
        """
        loaded, played, settings = self._origin.loaded, self.training.plays_on, self.training.settings
        hopeless = self.ended or self.ranks.stopped() or (self.foreground.in_vain and self.ranks.pending())
        up_to_date = loaded and not hopeless and self.loading.take_last_snapshot()
        if loaded and not hopeless and self.loading.unkept:
            if played:
                self.training.play()
            raise StateFileError(
                f"The ranks were not started again: {self.loading.unkept} Save the state with %hvd_save FILE; then end "
                "the ranks with %hvd_stop, and go on with %hvd_start and %hvd_resume FILE."
            )
        before = self.loading.remember(up_to_date) if loaded else None
        try:
            self.ended = self.ended or RESTARTING
            self._end(self._shut_down)
            self.start(progress)
        except BaseException:
            self.ended = "the ranks were ended and could not be started again"
            raise
        self.restored = self.loading.restore(before) if before else ""
        if before is None or before.up_to_date or not self.history.steps:
            # All of them: what is named is not settled anew.
            self.set((before.settings if before else settings).as_dict())
        if played and self.training.workload:
            self.training.play()
            self.restored += "; training goes on"

    def stop(self) -> None:
        """End all ranks and everything started with them, close all logs, and keep the newest snapshot alone.

        An interrupt does not stop that half way.
        """
        self._end(self._shut_down_for_good)

    def status(self) -> Status:
        """Return which ranks run where, on which devices, and what they are doing."""
        durations = self.history.step_durations()
        time = TimeReport.of(self.history.asked_for(last=STEPS_JUDGED), self.history.changed_after)
        return Status(
            doing=self.doing,
            ranks=tuple(self.ranks.infos),
            workload=self.training.workload,
            settings=self.training.settings,
            steps=self.history.steps,
            snapshots=self.snapshots.describe(),
            ledger=describe_ledger(recorded_every(self.policy.ledger_steps, *durations), cost(*durations)),
            start_seconds=dict(self.ranks.seconds),
            others=tuple(starting.others(self.plan.device)),
            straggler=time.straggler if time else None,
            compiled=self._compiled,
        )

    @property
    def _compiled(self) -> str:
        """Return what a rank has said of compiling blocks that are in use."""
        in_use = self.training.settings.compile != "off"
        said = [event.text for event in list(self.history.events) if in_use and COMPILED in event.text]
        return said[-1] if said else ""

    @property
    def doing(self) -> str:
        """Return what is happening, in one line of words."""
        if self.ended:
            return self.ended
        stopped = [
            f"rank {rank} is stopped (SIGSTOP): continue it with {command}, or start again with %hvd_restart"
            for rank, command in self.ranks.stopped().items()
        ]
        now = str(self.foreground.wait_report or self.training.describe())
        return "; ".join([*stopped, now, *filter(None, [self.idle.notice()]), *self.logs.problems])

    def set(self, changes: dict[str, Any]) -> None:
        """Change knobs and rules of the policy, by name.

        Raises:
            InvalidInput: an unknown name, or a value that cannot be used with what is loaded; nothing was changed.
            TrainingFailed: while nothing trains, the ranks could not switch to these settings.
        """
        for name in changes:
            if name not in KNOBS and name not in RULES:
                raise InvalidInput(f"There is no knob {name!r}: {nearest(name, [*KNOBS, *RULES])}.")
        rules = {name: value for name, value in changes.items() if name in RULES}
        knobs = {name: value for name, value in changes.items() if name in KNOBS}

        def check(settings: Settings) -> None:
            if workload := self.training.workload:
                compatibility.check(settings, workload, self.plan.size)
            else:
                settings.check_together(self.plan.size)

        # Whatever cannot be used is refused before anything is changed.
        policy = self.policy.replace(**rules)
        if policy.autotune and self.plan.size == 1:
            raise InvalidInput("autotune=on needs at least two ranks: one alone has no gradients to send.")
        if "eval_every" in rules and policy.eval_every != "never" and self.training.workload:
            compatibility.check_held_out(self.training.workload)
        check(compatibility.asked(self.training.settings, knobs, self.plan.size))
        self.foreground.check_alive()
        if rules:
            self._change_policy(rules)
        with self.foreground.interruptible():
            self.training.set(knobs, check)
            if "autotune" in rules:
                self.training.apply()  # ranks may still have what it tried

    def applying(self, found_under: Settings) -> Callable[[Knobs], None]:
        """Return what sets knobs that were found for what is loaded now, under these settings; also after a restart.

        It refuses once something else is loaded, or another knob that affects memory has changed.
        """
        loaded, history, loaded_as = self.training.workload, self.history, self.history.loaded_as

        def apply(knobs: Knobs) -> None:
            if self.history.loaded_again(history, loaded_as) or self.training.workload != loaded:
                name = loaded.name if loaded else "nothing"
                raise InvalidInput(f"This result is for {name}, but another workload is loaded now. Run it again.")
            if changed := moved(found_under, self.training.settings, knobs):
                raise InvalidInput(f"This was found before {changed} changed, so it may not fit. Run it again.")
            self.set(knobs)

        return apply

    def _change_policy(self, rules: dict[str, Any]) -> None:
        """Ranks are told how long they may wait for one another."""
        new_limit = "stall_limit_s" in rules
        if new_limit:
            self.ranks.rejoin(IN_PASSING_S)  # may take a moment, unlike what follows
        with shielded():
            with self._changing_policy:
                self.policy = self.policy.replace(**rules)
            if new_limit:
                self.ranks.call("set_stall_limit", self.policy.stall_limit_s)
        if "snapshot_space" in rules:
            self._make_room()

    def _autotuned(self) -> None:
        self._change_policy({"autotune": "off"})

    def _make_room(self) -> None:
        with suppress(OSError):
            snapshot_folder.make_room(self.snapshots.folder, 0, self.policy.snapshot_space)

    def _end(self, shut_down: Callable[[], None]) -> None:
        self.ended = self.ended or "stopped"
        self.idle.stop()
        finish_anyway(shut_down, "gpumem_nb ending")

    def _shut_down(self) -> None:
        self.training.close()
        again = ClusterDied("The ranks were started again meanwhile.", "Ask once more when they are ready.")
        self.ranks.stop(again if self.ended == RESTARTING else None)

    def _shut_down_for_good(self) -> None:
        try:
            self._shut_down()
        finally:
            self.logs.stop()
            with suppress(OSError):
                snapshot_folder.tidy(self.snapshots.folder)
            self._origin.not_kept = "the session was stopped"

    def _lost(self, why: str) -> None:
        self.ended = f"the ranks are gone: {why}"

    def _works(self) -> bool:
        return self.foreground.busy or self.training.busy

    def _stop_idle(self) -> None:
        why = f"stopped after {self.policy.idle_minutes:g} minutes without work (%hvd_set idle_minutes=never keeps it)"
        if not self.ended:
            self.loading.take_last_snapshot()
        if self.ended:
            self.idle.stop()
        elif self.loading.unkept:
            self.idle.put_off()
            self.history.mark("note", f"not stopped after {self.policy.idle_minutes:g} minutes: {self.loading.unkept}")
        elif self.idle.over:  # still: you may have come back during the snapshot
            self.idle.stop()
            self.history.mark("note", why)
            self.ended = why
            self._shut_down()
