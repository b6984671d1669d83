"""Finds the largest micro-batch that fits under each precision and checkpointing, and tries it out."""

from __future__ import annotations

from collections.abc import Callable

from ..planning.prediction import DOES_NOT_FIT, FITS, NO_LIMIT
from ..planning.what_fits import COLUMNS, ROWS, Cell, WhatFits
from ..shared.errors import InvalidInput, WorkloadError
from ..shared.knobs import KNOBS
from ..shared.progress import Progress
from ..shared.settings import Settings
from .predicting import Predicting
from .training import Training

_LONGEST_S = 0.5  # steps that take longer are not tried out in full: there are many cells
_LEAST = 8  # samples of a micro-batch, of which throughput says something about larger ones
_SMALLER = 0.95  # of a micro-batch that turned out not to fit
_ATTEMPTS = 3


class Fitting:
    """Asks for one cell after the other; training that goes on does so in between."""

    def __init__(self, predicting: Predicting, training: Training, ranks: int) -> None:
        self._predicting = predicting
        self._training = training
        self._ranks = ranks

    def what_fits(self, progress: Progress, apply: Callable[[Settings], object]) -> WhatFits:
        """All cells; those that cannot be used with what is loaded are left out.

        Raises:
            InvalidInput: the data bring micro-batches of their own.
            WorkloadError: nothing is loaded, or no small step was possible under any of them.
        """
        _, most = self._predicting.of_any_batch({})
        now, workload = self._training.settings, self._training.workload
        cells: list[Cell] = []
        failed: dict[tuple[str, str], str] = {}
        places = [
            (precision, mode)
            for precision in KNOBS[ROWS].choices
            for mode in KNOBS[COLUMNS].choices
            if mode == KNOBS[COLUMNS].default or (workload and workload.blocks)
        ]
        rates: dict[str, float] = {}  # by precision: on some devices one is many times slower than another
        for place in places:
            progress(f"{place[0]}, checkpointing {place[1]}", len(cells) / len(places))
            try:
                cells.append(self._cell(now, *place, most, rates.get(place[0])))
            except (InvalidInput, WorkloadError) as error:
                failed[place] = str(error)
            except KeyboardInterrupt:
                if not cells:
                    raise
                failed[place] = "interrupted, and so what follows it."
                break
            else:
                if rate := cells[-1].samples_per_s:
                    rates[place[0]] = rate
        if not cells:
            raise WorkloadError(next(iter(failed.values())))
        limit = next((cell.predicted.limit_bytes for cell in cells if cell.predicted), None)
        return WhatFits(tuple(cells), now, limit, failed, apply)

    def _cell(self, now: Settings, precision: str, mode: str, most: int, rate: float | None) -> Cell:
        changes = {ROWS: precision, COLUMNS: mode}
        largest = self._predicting.largest_batch(changes)
        for _ in range(_ATTEMPTS):
            if not largest:
                break
            settings = now.replace(**changes, batch_size=largest)
            [predicted] = self._predicting.by_small_steps(settings, [largest])
            if predicted.verdict == DOES_NOT_FIT:
                largest = int(largest * _SMALLER)
                continue
            measured_at = self._short(settings, rate)
            whole = self._predicting.by_whole_steps(settings.replace(batch_size=measured_at))
            if whole.verdict in (FITS, NO_LIMIT):
                exact = whole if measured_at == largest else predicted
                ended = largest == most
                return Cell(precision, mode, largest, ended, exact, whole.samples_per_s, measured_at, settings)
            largest = int(largest * _SMALLER)
        return Cell(precision, mode, 0)

    def _short(self, settings: Settings, rate: float | None) -> int:
        """The micro-batch, or a smaller one of which a step takes no longer than anybody would wait for."""
        if rate is None:
            small = settings.replace(batch_size=min(settings.batch_size, _LEAST))
            rate = self._predicting.by_whole_steps(small).samples_per_s
        whole: int = settings.batch_size
        if not rate:
            return whole
        return min(whole, max(_LEAST, int(_LONGEST_S * rate / self._ranks / settings.accumulation_steps)))
