"""After memory ran out: which settings let the step that failed fit, found out on the ranks one after another."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..planning import fit
from ..planning.prediction import DOES_NOT_FIT
from ..report.rescue import Fit, Rescue
from ..shared.categories import ACTIVATIONS, OPTIMIZER_STATE, TEMPORARIES
from ..shared.forecast import RECORDED, Forecasts
from ..shared.knobs import Need
from ..shared.knobs.batch import halved, shortened
from ..shared.knobs.lighter import mildest_first
from ..shared.settings import Settings

TIMEOUT_S = 5.0  # for a choice of settings; until one fits, it goes on


class Tryout:
    """Candidates in place of settings that ran out of memory, the mildest first.

    Each is judged by ``planning/fit.py``, like any other settings, from a forecast of the very step that failed: its
    micro-batches and no others, and with the optimizer's state, which the first step does not have yet.

    Args:
        rescue: of the step that ran out of memory; what is found out is added to it.
        blocks: whether the model has blocks that can be checkpointed.
        usable: whether settings go with what is loaded.

    Attributes:
        rescue: as given.
        mild: the candidates that are all tried, as far as there is time.
    """

    def __init__(
        self, rescue: Rescue, blocks: bool, usable: Callable[[Settings], bool] = lambda settings: True
    ) -> None:
        failed, phase = rescue.settings, rescue.failure.phase
        self.rescue = rescue
        rescue.looking = True
        self._candidate = failed
        lighter = list(filter(usable, _lighter_than(failed, phase, blocks)))
        together = _together(failed, lighter)
        self.mild = tuple(lighter if together in (failed, *lighter) else [*lighter, together])
        self._mild = iter(self.mild)
        self._lighter_updates: deque[Settings] = deque()
        self._usable = usable
        self._ladder = iter(()) if phase == "update" else filter(usable, _ever_smaller(failed, together))
        self._until_s = time.monotonic() + TIMEOUT_S

    def next(self) -> Settings | None:
        """Return the settings to try next; nothing when that was all.

        Mild candidates come to choose from, until the time is over. Ever smaller micro-batches follow until one fits,
        however long that takes.
        """
        lighter_update = [self._lighter_updates.popleft()] if self._lighter_updates and not self.rescue.fitting else []
        ladder: Iterable[Settings] = [] if self.rescue.fitting else self._ladder
        for candidate in itertools.chain(lighter_update, self._mild, ladder):
            if self.rescue.fitting and time.monotonic() > self._until_s:
                return None
            self._candidate = candidate
            # The update's memory does not depend on the micro-batches; any of them may be what is too large elsewhere.
            return shortened(candidate) if self.rescue.failure.phase == "update" else candidate
        return None

    def learn(self, answers: Sequence[Forecasts]) -> None:
        """Take in forecasts of the latest candidate; a failure that is not ``oom`` says nothing of memory."""
        kinds = {answer.failure.kind for answer in answers if answer.failure}
        if kinds <= {"oom"} and (kinds or all(answer.of for answer in answers)):
            seconds = max(answer.seconds for answer in answers)
            # Samples may differ in size, but these are the very ones of the step that is tried again.
            exact = [replace(one, of=tuple(replace(each, how=RECORDED) for each in one.of)) for one in answers]
            said = fit.of_ranks(exact, self._candidate, [self._candidate.batch_size], seconds)
            peak = None if said.verdict == DOES_NOT_FIT else said.live_peak_bytes
            self.rescue.trials.append(Fit(self._candidate, peak, barely=peak is not None and not fit.fits(said)))
            if said.phase == "update" and not fit.fits(said):
                self._lighten_update()

    def _lighten_update(self) -> None:
        """Smaller micro-batches alone do not help the update: try another way of the same one besides."""
        tried = [trial.settings for trial in self.rescue.trials]
        for lighter in _lighter_than(self._candidate, "update", False):
            if lighter.same_mathematics(self._candidate) and lighter not in tried and self._usable(lighter):
                self._lighter_updates.append(lighter)


def _lighter_than(settings: Settings, phase: str, blocks: bool) -> list[Settings]:
    """Return what needs less memory in a phase of the step, the mildest first; ``blocks`` can be checkpointed."""
    categories = (TEMPORARIES, OPTIMIZER_STATE) if phase == "update" else (ACTIVATIONS,)
    needs = [Need(category, phase, settings, int(blocks), tried_out=True) for category in categories]
    return [lighter for need in needs for lighter in mildest_first(need)]


def _together(settings: Settings, lighter: Sequence[Settings]) -> Settings:
    """Return all lighter settings that keep the mathematics at once."""
    together = settings
    for other in lighter:
        if other.same_mathematics(settings):
            together = together.replace(**other.changed_from(settings))
    return together


def _ever_smaller(failed: Settings, together: Settings) -> Iterator[Settings]:
    """Give the same global batch in quarters, eighths and so on down to single samples, without and with all else."""
    smaller = halved(failed)
    others = together.changed_from(smaller) if smaller else {}
    others = {name: value for name, value in others.items() if name not in ("batch_size", "accumulation_steps")}
    if smaller and others and smaller.replace(**others) != together:
        yield smaller.replace(**others)
    while smaller and (smaller := halved(smaller, failed)):
        yield smaller
        if others:
            yield smaller.replace(**others)
