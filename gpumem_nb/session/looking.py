"""The state of the session and of its memory, and logs of it for other programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..kernel.lifecycle import Lifecycle
from ..kernel.logs import Log
from ..kernel.questions.scaling import Scaling
from ..kernel.questions.tracing import Tracing
from ..report.bottleneck import Bottleneck
from ..report.freed import FreeReport
from ..report.memory import MemoryReport
from ..report.scaling import NetworkReport, ScalingReport
from ..report.status import Status
from ..report.step_time import TimeReport
from ..report.sync import SyncReport
from ..report.waits import WaitReport
from ..report.written import TraceFile
from ..shared.answers import Progress
from ..shared.errors import InvalidInput
from ..shared.messages import Timeline
from ..shared.units import check_names, checked_flag
from ..ui.cells import shows_progress


class ReportsState:
    """The part of a session that says what is going on."""

    _life: Lifecycle

    def status(self) -> Status:
        """Return which ranks run where, on which devices, and what they are doing; also of a session that has ended."""
        return self._life.status()

    @property
    def doing(self) -> str:
        """Return what is happening, in one line of words."""
        return self._life.doing

    @property
    def wait_report(self) -> WaitReport | None:
        """Return what takes long, and which ranks wait for which; ``None`` when nothing does."""
        return self._life.foreground.wait_report

    @property
    def busy(self) -> bool:
        """Return whether the notebook waits for the ranks."""
        return self._life.foreground.busy

    def telling(self, progress: Progress) -> AbstractContextManager[None]:
        """Inside, ``progress`` is told what the ranks are doing while the notebook waits for them, a load for example.

        How much is done is not known, and told as 0.
        """
        return self._life.foreground.telling(progress)

    def memory(self, by: str | None = None, timeline: bool = False) -> MemoryReport:
        """Live, reserved and device bytes of every rank, its limit, and what the latest known peak is made of.

        Args:
            by: what the report shows of the peak: ``None`` for the worst rank's categories, ``category`` for those of
                all ranks, ``module`` for the worst rank's modules.
            timeline: record one step, as :meth:`timeline` does.

        Raises:
            InvalidInput: ``by`` is none of these, or ``timeline`` neither true nor false.
            WorkloadError: with ``timeline``, nothing is loaded, or the step could not be recorded.
        """
        return self._life.cluster.inspection.report(by, checked_flag("timeline", timeline))

    def free(self) -> FreeReport:
        """Give cached memory that no tensor uses back to the devices, between two steps, also while training.

        What comes back is what the caching allocator kept for later: other processes can use it, and it is no room that
        training lacked. The report says what holds the rest: weights, gradients, optimizer state, variables of cells.
        """
        return self._life.cluster.inspection.free()

    def timeline(self) -> list[Timeline]:
        """Record one step of every rank, allocation by allocation; the step is undone.

        Raises:
            WorkloadError: nothing is loaded, or the step could not be recorded.
        """
        return self._life.cluster.inspection.timeline()

    def time(self, timeline: bool = False) -> TimeReport:
        """Return where the time of a step goes on every rank: the means of the latest steps under the present settings.

        Args:
            timeline: also the latest step as it happened on each rank.

        Raises:
            InvalidInput: ``timeline`` is neither true nor false.
            WorkloadError: nothing is loaded, or no step was done yet.
        """
        return self._life.cluster.inspection.time(checked_flag("timeline", timeline))

    def verdict(self) -> Bottleneck | None:
        """Return what the time of a step is lost to, in a sentence, with the settings that would help.

        ``None`` while nothing is worth a word, and before there were 14 steps under the present settings.
        """
        return self._life.cluster.inspection.verdict()

    def check_sync(self, model: str | None = None, data: str | None = None) -> SyncReport:
        """Check that ranks hold the same weights and gradients, bit for bit, and see different samples.

        By default of what is loaded: one step is taken for its gradients and undone.

        Args:
            model: of your own loop, the variable that holds the model on the ranks; gradients are those that it has
                just now.
            data: the variable that holds what a rank goes through in an epoch, such as a ``DataLoader``.

        Raises:
            WorkloadError: nothing is loaded and nothing is named, or a variable holds something else.
            InvalidInput: ``data`` without ``model``, or what is not the name of a variable.
        """
        check_names({"model": model, "data": data})
        return self._life.cluster.inspection.sync(model, data)

    @shows_progress("Measuring")
    def scaling(
        self,
        ranks: Sequence[int] | None = None,
        steps: int = 20,
        progress: Progress = lambda what, done: None,
    ) -> ScalingReport:
        """Measure throughput on more and more of the running ranks, and forecast it for still more.

        Each number of ranks takes turns with steps that are undone: training goes on afterwards as if nothing had been.

        Args:
            ranks: numbers of ranks, such as ``[1, 2, 4]``; by default 1, 2, 4, … and all.
            steps: how many to time on each, from 4 to 1,000; some more warm up.
            progress: told what is being measured.

        Raises:
            InvalidInput: no such numbers.
            WorkloadError: nothing is loaded, or a step failed.
        """
        return Scaling(self._life.cluster).measure(ranks, steps, progress)

    @shows_progress("Checking the network")
    def check_network(self, progress: Progress = lambda what, done: None) -> NetworkReport:
        """Time all-reduces of all ranks, of messages from 1 KiB to 64 MiB: latency and bus bandwidth.

        Raises:
            InvalidInput: there is one rank only.
        """
        self._life.foreground.check_alive()
        return Scaling(self._life.cluster).network(len(self._life.ranks.infos), progress)

    @shows_progress("Tracing")
    def trace(
        self, path: str | os.PathLike[str], steps: int = 3, progress: Progress = lambda what, done: None
    ) -> TraceFile:
        """Train some steps and write what all ranks did in them, on one clock, into one file for a viewer of traces.

        It has the parts of each step, what torch's profiler notes, and Horovod's timeline. The steps count like any
        others, but take longer; nothing stays on afterwards. Training that goes on in the background does so.

        Args:
            path: of the file, which is compressed when its name ends in ``.gz``.
            steps: a whole number from 1 to 100.
            progress: told what is being done.

        Raises:
            InvalidInput: not such a number, or the file cannot be written.
            WorkloadError: nothing is loaded, or a rank could not record.
            TrainingFailed: a step could not be done; nothing was written.
        """
        return Tracing(self._life.cluster).trace(path, steps, progress)

    def memory_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write torch's own snapshot of the memory of rank 0's GPU, for its visualiser (pytorch.org/memory_viz).

        With something loaded it shows one step, which is undone; it is written even when that step fails.

        Raises:
            InvalidInput: the ranks have virtual GPUs, or the file cannot be written.
        """
        self._life.foreground.check_alive()
        return self._life.cluster.inspection.write_snapshot(path)

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
        return self._life.logs.begin(_place(target), to, self._life.history.settings_now())

    def stop_logging(self, target: str | os.PathLike[str] | None = None) -> None:
        """Write what there is and end one log, or all of them.

        Raises:
            InvalidInput: nothing is logged there.
        """
        self._life.logs.stop(None if target is None else _place(target))


def _place(target: str | os.PathLike[str]) -> str:
    if not isinstance(target, str | os.PathLike) or "\0" in os.fsdecode(target):
        raise InvalidInput(f"{target!r} is not a place to log to: give text or a path, such as 'log.jsonl'.")
    return os.fsdecode(target)
