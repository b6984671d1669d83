"""After memory ran out: which settings would have fit, found out on the ranks one after another within some seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence, Set

from ..report.rescue import Fit, Rescue
from ..shared.categories import ACTIVATIONS, OPTIMIZER_STATE, TEMPORARIES
from ..shared.knobs import Need
from ..shared.knobs.batch import shortened, shrunk
from ..shared.knobs.easing import mildest_first
from ..shared.messages import Sample
from ..shared.settings import Settings

PATIENCE_S = 5.0


class Tryout:
    """Candidates in place of settings that ran out of memory, the mildest first.

    Args:
        rescue: of the step that ran out of memory; what is found out is added to it.
        blocks: whether the model has blocks that can be checkpointed.
        sample_s: seconds that a rank takes for one sample.

    Attributes:
        rescue: as given.
        mild: the candidates that are all tried.
    """

    def __init__(self, rescue: Rescue, blocks: bool, sample_s: float) -> None:
        failed, phase = rescue.settings, rescue.failure.phase
        self.rescue = rescue
        rescue.looking = True
        self._candidate = failed
        self._sample_s = sample_s
        lighter = _lighter_than(failed, phase, blocks)
        together = _together(failed, lighter)
        self.mild = tuple(lighter if together in (failed, *lighter) else [*lighter, together])
        self._mild = iter(self.mild)
        self._ladder = iter(()) if phase == "update" else _ever_smaller(failed, together)
        self._until_s = time.monotonic() + PATIENCE_S

    def next(self) -> Settings | None:
        """What to try next, with as few micro-batches as show a step's peak; nothing when that was all.

        All mild candidates come, to choose from. Ever smaller micro-batches follow until one fits. What would take too
        long is left out.
        """
        for candidate in itertools.chain(self._mild, [] if self.rescue.fits else self._ladder):
            trial = shortened(candidate)
            if self._sample_s * trial.samples_per_rank <= self._until_s - time.monotonic():
                self._candidate = candidate
                return trial
            self.rescue.untried.append(candidate)
        return None

    def learn(self, failures: Set[str], samples: Sequence[Sample]) -> None:
        """The latest candidate was tried; any failure but ``oom`` says nothing about memory."""
        if failures <= {"oom"}:
            peak = None if failures else max(sample.live_peak_bytes for sample in samples)
            self.rescue.trials.append(Fit(self._candidate, peak))
        if not failures:
            self._sample_s = max(1 / sample.samples_per_s for sample in samples)


def _lighter_than(settings: Settings, phase: str, blocks: bool) -> list[Settings]:
    """Settings that need less memory in a phase of the step, the mildest first; ``blocks`` can be checkpointed."""
    categories = (TEMPORARIES, OPTIMIZER_STATE) if phase == "update" else (ACTIVATIONS,)
    needs = [Need(category, phase, settings, int(blocks), tried_out=True) for category in categories]
    return [lighter for need in needs for lighter in mildest_first(need)]


def _together(settings: Settings, lighter: Sequence[Settings]) -> Settings:
    """All lighter settings that keep the mathematics at once."""
    together = settings
    for other in lighter:
        if other.same_mathematics(settings):
            together = together.replace(**other.changed_from(settings))
    return together


def _ever_smaller(failed: Settings, together: Settings) -> Iterator[Settings]:
    """The same global batch in quarters, eighths and so on down to single samples, without and with all else."""
    smaller = shrunk(failed)
    others = together.changed_from(smaller) if smaller else {}
    while smaller and (smaller := shrunk(smaller)):
        yield smaller
        if others:
            yield smaller.replace(**others)
