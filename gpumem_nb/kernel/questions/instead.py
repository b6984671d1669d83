"""Finds what to train with in place of settings that do not fit, by steps that are undone."""

from __future__ import annotations

from dataclasses import replace

from ...planning.fit import within
from ...planning.instead import Search, instead_of
from ...planning.prediction import Prediction
from ...report.differences import splits, typed
from ...report.instead import Fit, Instead
from ...shared.answers import Progress
from ...shared.errors import InvalidInput, NotThisTime, WorkloadError
from ...shared.settings import Settings
from ...shared.workload import Handles
from .. import compatibility
from ..cluster import AsksRanks, Cluster


class FindingInstead(AsksRanks):
    """Asks for one candidate after the other; what was found once, the card's answer included, is the answer again."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting

    def find(
        self,
        needs: Prediction,
        progress: Progress = lambda what, done: None,
        budget_bytes: int | None = None,
    ) -> Instead:
        """Return what to train with in place of settings that are not predicted to fit.

        Args:
            needs: what these settings need.
            progress: told what is being predicted.
            budget_bytes: a limit of each rank besides its own, which holds for this answer alone.

        Raises:
            WorkloadError: nothing is loaded.
        """
        model_version = self._history.model_version
        known = self._history.answers.instead_of(needs.settings) if budget_bytes is None else None
        if known is None:
            known = self._searched(needs, progress, budget_bytes)
        fitting = (one.settings for one in known.tried if one.fits)
        split = next((one for one in fitting if splits(needs.settings, one)), needs.settings)
        found = instead_of(
            needs.settings,
            len(self._ranks),
            [self._timed(one) for one in known.tried],
            needs,
            on_the_step=known.on_the_step,
            splits=self._predicting.splits(needs.settings, split),
            unfinished=known.unfinished,
        )
        if budget_bytes is None:
            self._history.found_instead(found, model_version)
        return found

    def _searched(self, needs: Prediction, progress: Progress, budget_bytes: int | None) -> Instead:
        workload, failed, now = self._training.workload, needs.settings, self._training.settings

        def usable(settings: Settings) -> bool:
            return compatibility.usable(settings, workload, len(self._ranks))

        search = Search(failed, needs.phase, workload.handles if workload else Handles(), needs.categories, usable)
        while candidate := search.next():
            progress(f"what would fit: {typed(failed, candidate)}", 0.5)
            try:
                said = self._predicting.predict(candidate.changed_from(now))
            except NotThisTime:
                break
            except (InvalidInput, WorkloadError):
                continue
            search.learn(said if budget_bytes is None else within(said, _least(said.limit_bytes, budget_bytes)))
        return Instead(failed, len(self._ranks), tried=tuple(search.tried), unfinished=not search.ended)

    def _timed(self, one: Fit) -> Fit:
        """Return the same with the throughput of whole steps, where that was measured since."""
        known = self._history.foreseen.get(one.settings)
        return one if known is None or one.samples_per_s else replace(one, samples_per_s=known.samples_per_s)


def _least(limit_bytes: int | None, budget_bytes: int) -> int:
    return budget_bytes if limit_bytes is None else min(limit_bytes, budget_bytes)
