"""Memory on demand: a report of all ranks, one recorded step, torch's own snapshot."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ...report.bottleneck import Bottleneck, Circumstances
from ...report.freed import FreeReport
from ...report.memory import MemoryReport, RankMemory, check_view
from ...report.step_time import TimeReport, aligned
from ...report.sync import SyncReport
from ...shared.errors import InvalidInput, WorkloadError
from ...shared.messages import Ledger, Timeline
from ...shared.state_file import as_path
from ...shared.units import name_ranks
from ..cluster import AsksRanks


class Inspection(AsksRanks):
    """Asks the ranks of one cluster where their bytes are."""

    def report(self, by: str | None, timeline: bool) -> MemoryReport:
        """Return what every rank reads and what the latest known peak is made of; ``timeline`` records a step."""
        check_view(by)
        timelines = tuple(self.timeline()) if timeline else ()
        ledgers = [line.ledger for line in timelines] or self._ledgers()
        looks = self._foreground.call("look_closer")  # at once: each request waits for a step that is under way
        entries = zip(self._ranks, looks, ledgers, strict=True)
        ranks = tuple(RankMemory(info, reading, ledger, use) for info, (reading, use, _), ledger in entries)
        return MemoryReport(ranks, by, timelines, tuple(held for *_, held in looks))

    def free(self) -> FreeReport:
        """Let every rank give cached memory back to its device."""
        return FreeReport(tuple(self._ranks), tuple(self._foreground.call("free")))

    def timeline(self) -> list[Timeline]:
        """Record one step of every rank, which is undone.

        Raises:
            WorkloadError: nothing is loaded, or the step could not be done.
        """
        self._foreground.check_loaded()
        with self._foreground.interruptible():
            self._training.requests.settle()
        found = self._foreground.call("record_step")
        if missing := [rank for rank, timeline in enumerate(found) if timeline is None]:
            raise WorkloadError(f"The step could not be recorded on {name_ranks(missing)}. Try again.")
        return found

    def time(self, timeline: bool) -> TimeReport:
        """Return where the time of a step goes; with ``timeline`` also the latest step as it happened on each rank.

        Raises:
            WorkloadError: nothing is loaded, or no step was done.
        """
        self._foreground.check_loaded()
        report = TimeReport.of(self._history.asked_for(), self._history.changed_after)
        if report is None:
            raise WorkloadError("Where the time goes is known once a step was done: %hvd_train 10.")
        report = dataclasses.replace(report, verdict=self.verdict())
        if not timeline:
            return report
        lanes = [lane for lane in self._foreground.call("step_lanes") if lane is not None]
        return dataclasses.replace(report, lanes=tuple(aligned(lanes, [info.host for info in self._ranks])))

    def verdict(self) -> Bottleneck | None:
        """Return the main cause of lost time; ``None`` if there is none, or too few steps under these settings."""
        return next(iter(self.verdicts()), None)

    def verdicts(self) -> list[Bottleneck]:
        """Return all that it is lost to and that is worth a word, the largest first."""
        history, settings = self._history, self._training.settings
        now = history.now()
        if now is None or now.settings != settings:
            return []
        around = Circumstances(settings, self._ranks, self._training.workload)
        return Bottleneck.all_of(history.asked_for(), history.changed_after, around)

    def sync(self, model: str | None, data: str | None) -> SyncReport:
        """Return whether ranks hold the same, of what is loaded or of variables.

        Raises:
            WorkloadError: nothing is loaded and nothing named, or a name is wrong.
            InvalidInput: data without a model.
        """
        if model is None and data is not None:
            raise InvalidInput(f"data={data} alone cannot be checked: name the model too, such as model=net.")
        if model is None:
            if self._training.workload is None:
                raise WorkloadError(
                    "Nothing is loaded, so name what to check: %hvd_check --sync model=net data=loader, with variables "
                    "of the ranks."
                )
            self._foreground.check_loaded()
            with self._foreground.interruptible():
                self._training.requests.settle()
        return SyncReport(self._foreground.call("look_in_sync", model, data))

    def write_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Let torch write what rank 0 allocates, in one step when something is loaded, even if that step fails.

        Raises:
            InvalidInput: the ranks have virtual GPUs, or the file cannot be written.
        """
        if self._ranks[0].virtual:
            raise InvalidInput(
                "torch writes memory snapshots of real GPUs only, and these ranks have virtual ones: leave --snapshot "
                "out, %hvd_memory shows where their bytes are."
            )
        target = as_path(path)
        try:
            self._foreground.call("record_allocations", True, ranks=[0])
            try:
                if self._training.workload:
                    self.timeline()
            finally:
                self._foreground.call("write_snapshot", str(target), ranks=[0])
        finally:
            self._foreground.call("record_allocations", False, ranks=[0])
        return target

    def _ledgers(self) -> list[Ledger | None]:
        """Of each rank the latest one of what is loaded, since a cell may have changed it if steps were done since."""
        rows = self._history.since_cell(self._history.of_loaded())
        return [next((one.ledger for one in reversed(of_rank) if one.ledger), None) for of_rank in rows]
