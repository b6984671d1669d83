"""Looks for the rungs of the memory ladder, by predicting what may be lighter than the rung above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...planning.instead import Search, lighter
from ...planning.ladder import Ladder, may_be_rung, next_rung
from ...planning.prediction import Prediction
from ...report.differences import typed
from ...shared.answers import Progress
from ...shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ...shared.settings import Settings
from ...shared.workload import Handles
from .. import compatibility
from ..cluster import AsksRanks, Cluster
from .fitting import Changed, Knobs, Unchanged, ended_early

_USUAL = 8  # rungs, by which progress is told


class Laddering(AsksRanks):
    """Climbs down from the present settings; training that goes on does so between the predictions."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting

    def ladder(
        self, same_mathematics: bool, progress: Progress, applying: Callable[[Settings], Callable[[Knobs], object]]
    ) -> Ladder:
        """Return the rungs, as :meth:`Session.ladder`; an interrupt, or what ends the ranks, leaves those found.

        Raises:
            WorkloadError: nothing is loaded, or no small step was possible; ``NotThisTime`` if settings were changed.
        """
        self._foreground.check_loaded()
        present, apply = self._training.settings, applying(self._training.settings)
        unchanged = Unchanged(self._history, lambda: self._training.settings)
        progress("the present settings", 0.0)
        now = self._predicting.predict({})
        splits, rungs, ended = self._predicting.splits(), list[Prediction](), ""

        def fit_for(settings: Settings) -> bool:
            usable = compatibility.usable(settings, self._training.workload, len(self._ranks))
            return usable and may_be_rung(present, settings, splits, same_mathematics)

        known: dict[Settings, Prediction] = {}
        try:
            while below := self._below([now, *rungs], fit_for, unchanged, known, progress):
                rungs.append(below)
        except (KeyboardInterrupt, Changed, GpumemError) as why:
            if not rungs and isinstance(why, Changed):
                raise NotThisTime(f"Meanwhile {why} Run it again.") from None
            if not rungs and isinstance(why, GpumemError):
                raise
            ended = ended_early(why)
        workload = self._training.workload
        return Ladder(now, tuple(rungs), splits, workload.blocks if workload else 0, ended, apply)

    def _below(
        self,
        rungs: list[Prediction],
        fit_for: Callable[[Settings], bool],
        unchanged: Unchanged,
        known: dict[Settings, Prediction],
        progress: Progress,
    ) -> Prediction | None:
        """Return the rung below these, ``None`` where there is none; ``known`` takes in what is predicted."""
        above, workload = rungs[-1], self._training.workload
        handles = workload.handles if workload else Handles()
        compiles = workload is not None and workload.why_uncompiled == ""
        handles = replace(handles, compiles=compiles, offloads=True)  # what they cost is timed here

        def needs(settings: Settings) -> Prediction | None:
            unchanged.check()
            if settings not in known:
                progress(f"rung {len(rungs)}: {typed(above.settings, settings)}", min(0.95, len(rungs) / _USUAL))
                try:
                    known[settings] = self._predicting.predict(settings.changed_from(self._training.settings))
                except NotThisTime:
                    raise
                except (InvalidInput, WorkloadError):  # a setting under which no step goes well is no rung
                    return None
            return known[settings]

        wanted = filter(fit_for, lighter(above.settings, above.phase, handles, above.categories))
        below = next_rung(above, list(filter(None, map(needs, wanted))))
        if above.lower_bound and not below:  # no single change is enough: several at once
            search = Search(above.settings, above.phase, handles, above.categories, fit_for)
            together = filter(None, map(needs, iter(search.next, None)))
            below = next((one for one in together if not one.lower_bound), None)
        unchanged.check()
        return below
