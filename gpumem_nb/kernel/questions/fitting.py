"""The largest micro-batch that fits under each precision and checkpointing; checks of questions that take long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ...planning.fit import fits
from ...planning.prediction import DOES_NOT_FIT
from ...planning.what_if import COLUMNS, ROWS, Cell, WhatFits
from ...report.instead import Instead
from ...shared.answers import Progress
from ...shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ...shared.knobs import KNOBS
from ...shared.messages import least_limit
from ...shared.settings import Settings
from ..cluster import AsksRanks, Cluster
from ..history import History
from .instead import FindingInstead
from .predicting import Predicting

Knobs = dict[str, Any]

_SAMPLES = 4  # of the first step: one in what a device does not compute in takes very long
_TIMES, _LEAST_S = 4, 1.0  # as long as in another precision, and so long at least


class Changed(Exception):
    """The model may have changed while a question looked at it."""


def ended_early(why: BaseException) -> str:
    """Return why a search ended before it was through, in a sentence."""
    if isinstance(why, KeyboardInterrupt):
        said = str(why) or "Interrupted."
        return f"It was {said[0].lower()}{said[1:]}"
    return f"It ended early{', because ' if isinstance(why, Changed) else ': '}{why}"


class Unchanged:
    """The model, and if asked for the settings, at the moment when this was made."""

    def __init__(self, history: History, settings: Callable[[], Settings | None] = lambda: None) -> None:
        self._history = history
        self._settings = settings
        self._was, self._set = self._is, settings()

    def check(self) -> None:
        """Raise :class:`Changed` if it may be something else by now."""
        if self._is != self._was:
            raise Changed("something was loaded, or a cell ran on the ranks and may have changed the model.")
        if self._settings() != self._set:
            raise Changed("settings were changed.")

    @property
    def _is(self) -> tuple[int, int]:
        return self._history.loaded_as, self._history.model_version


class SlowPrecisions:
    """Those that were tried so far; some devices have no fast fp16, say.

    Args:
        predicting: takes the steps.
        present: settings that the steps are like, in everything that is not asked about.
        batched: whether the data bring micro-batches of their own.
        budget_bytes: a limit of each rank besides its own.
    """

    def __init__(
        self, predicting: Predicting, present: Settings, batched: bool, budget_bytes: int | None = None
    ) -> None:
        self._predicting = predicting
        self._size = present.batch_size if batched else min(_SAMPLES, present.batch_size)  # the same in all
        self._budget_bytes = budget_bytes
        self._first_s: dict[str, float] = {}  # by precision
        self._why: dict[str, str] = {}

    def why(self, settings: Settings, again: Callable[[float], bool] = lambda took_s: True) -> str:
        """Return why the precision of these settings is not worth larger steps; empty if it is.

        Args:
            settings: those to try it with.
            again: told what a step took that was slow; says whether another one may be taken, because something may
                have come in between.
        """
        precision = settings.precision
        if precision not in self._first_s:
            few, first_s = settings.replace(batch_size=self._size, accumulation_steps=1), math.inf
            for _ in range(2):
                step = self._predicting.by_small_steps(few, [self._size], self._budget_bytes)[0]
                if step.verdict == DOES_NOT_FIT:  # it may have ended before it took any time
                    return ""
                first_s = min(first_s, step.seconds)
                times = first_s / min([first_s, *self._first_s.values()])
                slow = times > _TIMES and step.seconds > _LEAST_S
                if not slow or not again(step.seconds):
                    break
            self._first_s[precision] = first_s  # not before it is known: a second step may fail
            if slow:
                self._why[precision] = f"a small step took {times:.0f} times as long as in another precision"
        return self._why.get(precision, "")


_LONGEST_S = 0.5  # of steps that are timed with smaller micro-batches, because those of the largest take long
_LEAST = 8  # samples of a micro-batch, of which throughput says something about larger ones


class Fitting(AsksRanks):
    """Asks for one cell after the other; training that goes on does so in between."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting
        self._finding = FindingInstead(cluster)

    def what_fits(self, progress: Progress, applying: Callable[[Settings], Callable[[Knobs], object]]) -> WhatFits:
        """Return all cells, as :meth:`Session.what_fits`; those that cannot be used with what is loaded are left out.

        An interrupt ends it with those found, and so does the end of the ranks.

        Args:
            applying: returns what changes knobs later, if what is loaded now and these settings are still there.

        Raises:
            WorkloadError: no small step was possible; ``NotThisTime`` if something was loaded meanwhile or a cell ran.
        """
        _, most = self._predicting.of_any_batch({})
        now, workload, unchanged = self._training.settings, self._training.workload, Unchanged(self._history)
        apply, slow = applying(now), SlowPrecisions(self._predicting, now, batched=False)
        cells: list[Cell] = []
        failed: dict[tuple[str, str], str] = {}
        places = [
            (precision, mode)
            for precision in KNOBS[ROWS].choices
            for mode in KNOBS[COLUMNS].choices
            if mode == KNOBS[COLUMNS].default or (workload and workload.blocks)
        ]
        rates: dict[str, float] = {}  # by precision: on some devices one is many times slower than another
        for number, place in enumerate(places):

            def tell(place: tuple[str, str] = place, done: float = number / len(places)) -> None:
                unchanged.check()
                if changed := moved(now, self._training.settings, (ROWS, COLUMNS, "batch_size")):
                    raise Changed(f"{changed} changed.")
                progress(f"{place[0]}, checkpointing {place[1]}", done)

            try:
                tell()
                cells.append(self._cell(now, place, most, rates, slow, tell))
                tell()
            except (InvalidInput, WorkloadError) as error:
                failed[place] = str(error)
            except (KeyboardInterrupt, Changed, GpumemError) as why:
                cells = cells[: number - len(failed)]  # the latest may be of another model
                if not cells and isinstance(why, Changed):
                    raise NotThisTime(f"Meanwhile {why} Run it again.") from None
                if not cells:
                    raise
                failed[place] = f"not tried, nor are those after it{': ' * bool(str(why))}{why}"
                break
        if not cells:
            raise WorkloadError(next(iter(failed.values())))
        limit = next(
            (cell.predicted.limit_bytes for cell in cells if cell.predicted), least_limit(self._history.readings)
        )
        helps = None
        with suppress(KeyboardInterrupt, GpumemError):  # which take away nothing of what was found
            helps = None if any(cell.largest for cell in cells) else self._instead(progress)
        return WhatFits(tuple(cells), now, limit, failed, apply, helps)

    def _instead(self, progress: Progress) -> Instead | None:
        """Return what would fit where nothing does under any precision and checkpointing, such as another update."""
        needs = self._predicting.predict({})
        return None if fits(needs) else self._finding.find(needs, progress)

    def _cell(
        self,
        now: Settings,
        place: tuple[str, str],
        most: int,
        rates: dict[str, float],
        slow: SlowPrecisions,
        tell: Callable[[], None],
    ) -> Cell:
        settings = now.replace(**dict(zip((ROWS, COLUMNS), place, strict=True)))
        if why := slow.why(settings):
            raise WorkloadError(why)
        found = self._predicting.largest(settings.replace(batch_size=1), most, heard=tell)
        if not found.size:
            return Cell(*place, 0, predicted=found.predicted, unknown=found.unknown)
        settings, rate = settings.replace(batch_size=found.size), found.predicted.samples_per_s
        measured_at = found.size
        if rate is None:  # whole steps of the largest would take long
            few = settings.replace(batch_size=min(found.size, _LEAST))
            if place[0] not in rates:
                rates[place[0]] = self._predicting.by_whole_steps(few).samples_per_s or 0.0
                tell()
            samples_per_step = self._history.size * settings.accumulation_steps
            measured_at = min(found.size, max(_LEAST, int(_LONGEST_S * rates[place[0]] / samples_per_step)))
            rate = self._predicting.by_whole_steps(settings.replace(batch_size=measured_at)).samples_per_s
        rates[place[0]] = rate or rates.get(place[0], 0.0)
        return Cell(*place, found.size, found.size == most, found.predicted, rate, measured_at, settings)


def moved(before: Settings, now: Settings, but: Collection[str]) -> str:
    """Return the knobs that affect memory and have changed, others than these; empty without any."""
    changed = now.changed_from(before).keys() - set(but)
    return ", ".join(name for name in KNOBS if name in changed and KNOBS[name].moves)
