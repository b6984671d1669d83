"""Finds the largest micro-batch that fits under each precision and checkpointing, and tries it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..planning.prediction import DOES_NOT_FIT
from ..planning.tuning.record import fits
from ..planning.what_fits import COLUMNS, ROWS, Cell, WhatFits
from ..shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ..shared.knobs import KNOBS
from ..shared.progress import Progress
from ..shared.settings import Settings
from .history import History
from .predicting import Predicting
from .slow_precisions import SlowPrecisions
from .training import Training
from .unchanged import Changed, Unchanged

_LONGEST_S = 0.5  # steps that take longer are not tried out in full: there are many cells
_LEAST = 8  # samples of a micro-batch, of which throughput says something about larger ones
_ATTEMPTS = 4  # each with half of a micro-batch that turned out not to fit


class Fitting:
    """Asks for one cell after the other; training that goes on does so in between."""

    def __init__(self, predicting: Predicting, training: Training, history: History) -> None:
        self._predicting = predicting
        self._training = training
        self._history = history

    def what_fits(
        self, progress: Progress, apply: Callable[[dict[str, Any]], object], latest: Callable[[], Training]
    ) -> WhatFits:
        """All cells; those that cannot be used with what is loaded are left out.

        An interrupt ends it with those found, and so does the end of the ranks.

        Args:
            apply: changes knobs of what is loaded now.
            latest: the training at any later time, perhaps of ranks that were started again.

        Raises:
            InvalidInput: the data bring micro-batches of their own.
            WorkloadError: nothing is loaded, or no small step was possible under any of them; ``NotThisTime`` if
                something was loaded meanwhile or a cell ran.
        """
        _, most = self._predicting.of_any_batch({})
        now, workload, unchanged = self._training.settings, self._training.workload, Unchanged(self._history)
        slow = SlowPrecisions(self._predicting, now, batched=False)
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
                if changed := _changed_since(now, self._training):
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
                    raise NotThisTime(f"Meanwhile {why} Look again.") from None
                if not cells:
                    raise
                failed[place] = f"not looked at, nor what follows it{': ' * bool(str(why))}{why}"
                break
        if not cells:
            raise WorkloadError(next(iter(failed.values())))
        limit = next((cell.predicted.limit_bytes for cell in cells if cell.predicted), None)

        def apply_unchanged(changes: dict[str, Any]) -> object:
            training = latest()
            if training.workload == workload and (changed := _changed_since(now, training)):
                raise InvalidInput(f"What fits was found before {changed} changed: look again with %hvd_what_fits.")
            return apply(changes)

        return WhatFits(tuple(cells), now, limit, failed, apply_unchanged)

    def _cell(
        self,
        now: Settings,
        place: tuple[str, str],
        most: int,
        rates: dict[str, float],
        slow: SlowPrecisions,
        tell: Callable[[], None],
    ) -> Cell:
        changes = dict(zip((ROWS, COLUMNS), place, strict=True))
        if why := slow.why(now.replace(**changes)):
            raise WorkloadError(why)
        running, least = self._history.running, 0  # what training runs under fits, whatever is predicted
        if running and running.settings == now.replace(**changes):
            least = now.batch_size
        largest = max(self._predicting.largest_batch(changes), least)
        tell()
        for attempt in range(_ATTEMPTS):
            if not largest:
                return Cell(*place, 0)
            settings = now.replace(**changes, batch_size=largest)
            [predicted] = self._predicting.by_small_steps(settings, [largest])
            tell()
            missed = (0.0, 0.0) if largest == least else self._predicting.score().missed(self._history.model_version)
            said, predicted = predicted, predicted.widened(*missed)
            if fits(predicted) or largest == least:
                if place[0] not in rates:
                    few = settings.replace(batch_size=min(largest, _LEAST))
                    rates[place[0]] = self._predicting.by_whole_steps(few).samples_per_s or 0.0
                    tell()
                samples_per_step = self._history.size * settings.accumulation_steps
                short = int(_LONGEST_S * rates[place[0]] / samples_per_step)
                measured_at = min(largest, max(_LEAST, short))
                whole = self._predicting.by_whole_steps(settings.replace(batch_size=measured_at))
                if fits(whole) or (largest == least and whole.verdict != DOES_NOT_FIT):
                    rates[place[0]] = whole.samples_per_s or rates[place[0]]
                    exact = whole if measured_at == largest else predicted
                    return Cell(*place, largest, largest == most, exact, whole.samples_per_s, measured_at, settings)
            least = least if largest > least else 0  # whole steps have said otherwise
            only_missed = fits(said) and not fits(predicted)
            near = only_missed and attempt == 0  # weights do not shrink with the batch: if it is not near, by halves
            smaller = min(largest - 1, int(largest / (1 + 2 * missed[1]))) if near else largest // 2
            largest = max(smaller, least)
            if only_missed and not largest:
                break
        why = (
            f"earlier predictions missed by up to {100 * missed[1]:.0f} %, and so much is not free"
            if only_missed
            else "whole steps need more than small ones"
        )
        raise WorkloadError(f"The largest micro-batch that fits could not be found: {why}.")


def _changed_since(now: Settings, training: Training) -> str:
    """Knobs that memory hangs on besides those of a cell, and that somebody has changed; empty without any."""
    changed = training.settings.changed_from(now).keys() - {ROWS, COLUMNS, "batch_size"}
    return ", ".join(name for name in KNOBS if name in changed and KNOBS[name].moves)
