"""Decide what to train with in place of settings that do not fit; all callers ask here.

The card after memory ran out, the doctor, the tuner, ``%hvd_predict`` and the table of what fits hand in what was tried
and what came of it, and get the same answer: the fastest that fits at this global batch, what frees most, and why.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..report.configurations import Tried
from ..report.differences import NOT_KNOWN, changes, typed
from ..report.instead import Fit, Instead
from ..shared.categories import ACTIVATIONS, OPTIMIZER_STATE, OTHER, TEMPORARIES
from ..shared.knobs import CHANGES, Need
from ..shared.knobs.step import ACCUMULATION_STEPS, BATCH_SIZE, halved
from ..shared.settings import Settings, mildest_first, strongest_first
from ..shared.units import format_bytes
from ..shared.workload import Handles, Splits
from .fit import fits
from .prediction import DOES_NOT_FIT, Prediction

TIMEOUT_S = 5.0  # for a choice of settings; until one fits, it goes on
_CATEGORIES = 3  # of the peak, the largest, which is looked at for what may be smaller
# Times as fast as a milder change: turns of a tuner tell 1.02 apart, a single step on trial less.
_FASTER, _FASTER_ON_TRIAL = 1.02, 1.1
_FREED = 0.01  # of the fastest's live peak: less is not worth naming
_MOST_HINTS = 2
_FREES_LITTLE = 0.95  # of the live peak with larger micro-batches: the rest is weights, gradients and state


def lighter(
    settings: Settings, phase: str, handles: Handles, at_peak: Mapping[str, int] | None = None, tried_out: bool = True
) -> list[Settings]:
    """Return what may need less memory, the mildest first.

    Args:
        settings: in place of which.
        phase: the part of the step that fills the memory.
        handles: what knobs that free memory can take hold of.
        at_peak: live bytes at the peak by category, where these are known.
        tried_out: whether all is tried before anyone sees it.
    """
    known = at_peak and set(at_peak) != {OTHER}
    if at_peak and known:  # no knob moves what cells or datasets hold
        largest = sorted(at_peak, key=at_peak.__getitem__, reverse=True)[:_CATEGORIES]
    else:
        largest = [TEMPORARIES, OPTIMIZER_STATE] if phase == "update" else [ACTIVATIONS]
    found = (mildest_first(Need(category, phase, settings, handles, tried_out)) for category in largest)
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


class Search:
    """Candidates in place of settings that do not fit, the mildest first, until there is a choice.

    Args:
        failed: these settings.
        phase: the part of the step that fills the memory.
        handles: what knobs that free memory can take hold of.
        at_peak: live bytes at the peak by category, where these are known.
        usable: whether settings go with what is loaded.

    Attributes:
        mild: the candidates that are all tried, as far as there is time.
        tried: what came of those that were, in order.
        ended: whether there is nothing more to try.
    """

    def __init__(
        self,
        failed: Settings,
        phase: str,
        handles: Handles,
        at_peak: Mapping[str, int] | None = None,
        usable: Callable[[Settings], bool] = lambda settings: True,
    ) -> None:
        self.tried: list[Fit] = []
        self.ended = False
        self._failed = self._candidate = failed
        self._handles = handles
        mild = list(filter(usable, lighter(failed, phase, handles, at_peak)))
        together = _together(failed, mild)
        self.mild = tuple(mild if together in (failed, *mild) else [*mild, together])
        self._mild = iter(self.mild)
        self._updates: deque[Settings] = deque()
        self._too_large = set[Settings]()  # whose update ran out, whatever the micro-batch; as with that of the failed
        self._least = (
            failed.batch_size,
            math.inf,
        )  # the latest micro-batch of which it is known, and the least live peak
        self._usable = usable
        self._ladder = iter(()) if phase == "update" else filter(usable, _ever_smaller(failed, together))
        self._until_s = time.monotonic() + TIMEOUT_S

    @property
    def fitting(self) -> list[Fit]:
        """Return what fits with room, in the order of trying."""
        return _fitting(self.tried)

    def next(self) -> Settings | None:
        """Return the settings to try next; nothing when that was all.

        Mild candidates come to choose from, until the time is over. Ever smaller micro-batches follow until one fits,
        however long that takes; where something else fits they come alone, as long as there is time, because they may
        be faster.
        """
        fits = bool(self.fitting)
        update = [self._updates.popleft()] if self._updates and not fits else []
        ladder: Iterable[Settings] = filter(self._splits, self._ladder) if fits else self._ladder
        if any(self._splits(one.settings) for one in self.fitting):
            ladder = []
        for candidate in itertools.chain(update, self._mild, ladder):
            if fits and time.monotonic() > self._until_s:
                break
            self._candidate = candidate
            return candidate
        self.ended = True
        return None

    def learn(self, said: Prediction, trial_s: float | None = None) -> None:
        """Take in what the latest candidate needs, and how long its step took on trial; see :class:`Fit`."""
        self.tried.append(as_fit(said, trial_s))
        if said.phase == "update" and said.lower_bound:
            self._too_large.add(self._as_failed(said.settings))
        if not fits(said) and (said.phase == "update" or self._frees_little(said)):
            self._lighten_update()

    def _frees_little(self, said: Prediction) -> bool:
        """Return whether a smaller micro-batch needs about as much as a larger one, as far as both are known."""
        if said.lower_bound or said.verdict != DOES_NOT_FIT:
            return False
        (size, least), now, live = self._least, said.settings.batch_size, said.live_peak_bytes
        self._least = min(size, now), min(least, live)
        return now < size and live > _FREES_LITTLE * least

    def _splits(self, settings: Settings) -> bool:
        """Return whether settings differ from those that failed in their micro-batches alone."""
        return settings.changed_from(self._failed).keys() <= {BATCH_SIZE.name, ACCUMULATION_STEPS.name}

    def _lighten_update(self) -> None:
        """Smaller micro-batches alone do not help the update: try another way of the same one besides."""
        known = {*(one.settings for one in self.tried), *self._updates}
        for other in lighter(self._candidate, "update", self._handles):
            new = other not in known and self._as_failed(other) not in self._too_large
            if new and other.same_mathematics(self._candidate) and self._usable(other):
                self._updates.append(other)

    def _as_failed(self, settings: Settings) -> Settings:
        """Return these settings with the micro-batches of those that failed."""
        return settings.replace(batch_size=self._failed.batch_size, accumulation_steps=self._failed.accumulation_steps)


def as_fit(said: Prediction, trial_s: float | None = None) -> Fit:
    """Return what was predicted as a candidate of the answer."""
    peak = None if said.verdict == DOES_NOT_FIT else said.live_peak_bytes
    barely = peak is not None and not fits(said)
    return Fit(said.settings, peak, barely, said.samples_per_s, trial_s)


def instead_of(
    failed: Settings,
    ranks: int,
    tried: Sequence[Fit],
    needs: Prediction | None = None,
    *,
    on_the_step: bool = False,
    splits: Splits = NOT_KNOWN,
    unfinished: bool = False,
) -> Instead:
    """Return what to train with in place of settings that do not fit.

    What keeps the global batch comes before what does not, and what keeps the mathematics before what does not. Of
    those the fastest is named, the mildest where no other is clearly faster.

    Args:
        failed: these settings.
        ranks: how many train.
        tried: what came of others, the mildest first.
        needs: what these settings are predicted to need, where that is known.
        on_the_step: whether the step that ran out of memory was tried again.
        splits: what is known of training micro-batches in parts.
        unfinished: whether there was more to try.
    """
    found = Instead(
        failed,
        ranks,
        tried=tuple(tried),
        why=_why(needs) if needs else "",
        largest=_largest(needs) if needs else "",
        on_the_step=on_the_step,
        splits=splits,
        unfinished=unfinished,
    )
    fitting = [one for one in _fitting(tried) if one.settings != failed]
    if not fitting:
        barely = [one for one in tried if one.barely and one.settings != failed]
        return replace(found, barely=min(reversed(barely), key=_peak, default=None))
    alike = [one for one in fitting if one.settings.samples_per_rank == failed.samples_per_rank] or fitting
    keep = [one for one in alike if changes(failed, one.settings, splits) != CHANGES] or alike
    fastest, timed = _fastest(keep)
    most = min(alike, key=_peak)
    frees = _peak(most) <= (1 - _FREED) * _peak(fastest)
    return replace(found, fastest=fastest, timed=timed, frees_most=most if frees else None)


def of_tuned(known: Instead, best: Fit, others: Sequence[Fit]) -> Instead:
    """Return an answer after a tuner has tried others, whose best is the fastest of them, whatever single turns say.

    What keeps the mathematics stays the answer where the tuner tried only what does not.
    """
    most = best.samples_per_s or 0.0
    tried = [best, *(replace(one, samples_per_s=min(one.samples_per_s or 0.0, most)) for one in others)]

    def keeps(one: Fit) -> bool:
        return one.fits and changes(known.failed, one.settings, known.splits) != CHANGES

    if known.fastest and keeps(known.fastest) and not any(map(keeps, tried)):
        tried.append(known.fastest)
    found = instead_of(known.failed, known.ranks, tried, splits=known.splits)
    return replace(found, why=known.why, largest=known.largest, barely=None if found.fastest else best)


def may_free(category: str, phase: str, now: Tried | None, tried: Sequence[Tried], handles: Handles) -> str:
    """Return which knobs may free some of a category, in sentences; of those tried, only what made the peak smaller.

    Args:
        category, phase: what fills the memory, in which part of the step.
        now: the present configuration; ``None`` before there is one.
        tried: all configurations.
        handles: what knobs that free memory can take hold of.
    """
    if now is None:
        return ""
    of_this_model = [one for one in reversed(tried) if one.model_version == now.model_version]
    maybe, measured = [], []
    for change in strongest_first(Need(category, phase, now.settings, handles)):
        changed = now.settings.replace(**change)
        known = next((one for one in of_this_model if one.settings == changed), None)
        if known is None or known.peak_bytes is None:
            maybe.append(typed(now.settings, changed))
        elif now.peak_bytes and known.peak_bytes < now.peak_bytes:
            peak = format_bytes(known.peak_bytes)
            measured.append(f"{typed(now.settings, changed)} had a peak of {peak} when it was tried")
    sentences = [f"{'; '.join(measured[:_MOST_HINTS])}."] if measured else []
    if maybe and len(measured) < _MOST_HINTS:
        sentences.append(f"{' or '.join(maybe[: _MOST_HINTS - len(measured)])} may free some of it.")
    return " ".join(sentences)


def _fitting(tried: Iterable[Fit]) -> list[Fit]:
    return [one for one in tried if one.fits]


def _peak(one: Fit) -> int:
    return one.peak_bytes or 0


def _fastest(found: Sequence[Fit]) -> tuple[Fit, bool]:
    """Return the fastest, and whether that is known; only times of one kind are compared."""
    for rate, worth in ((_measured, _FASTER), (_on_trial, _FASTER_ON_TRIAL)):
        rates = {id(one): speed for one in found if (speed := rate(one)) is not None}
        if len(rates) == len(found):
            best = max(rates.values())
            return next(one for one in found if worth * rates[id(one)] >= best), True
    return found[0], False


def _measured(one: Fit) -> float | None:
    return one.samples_per_s


def _on_trial(one: Fit) -> float | None:
    return one.settings.samples_per_rank / one.trial_s if one.trial_s else None


def _largest(needs: Prediction) -> str:
    known = needs.categories if not needs.lower_bound else {}
    return max(known, key=known.__getitem__) if set(known) - {OTHER} else ""


def _why(needs: Prediction) -> str:
    """Return what fills the memory; empty where that is not known."""
    category, peak = _largest(needs), needs.live_peak_bytes
    if not category:
        return ""
    where = f"{needs.phase} of {needs.module}" if needs.module else needs.phase
    share = 100 * needs.categories[category] / max(1, peak)
    return f"At the peak of {format_bytes(peak)}, in {where}, {share:.0f} % is {category}."


def _together(settings: Settings, others: Sequence[Settings]) -> Settings:
    """Return all lighter settings that keep the mathematics at once."""
    together = settings
    for other in others:
        if other.same_mathematics(settings):
            together = together.replace(**other.changed_from(settings))
    return together


def _ever_smaller(failed: Settings, together: Settings) -> Iterator[Settings]:
    """Give the same global batch in quarters, eighths and so on down to single samples, without and with all else."""
    smaller = halved(failed)
    others = together.changed_from(smaller) if smaller else {}
    others = {name: value for name, value in others.items() if name not in (BATCH_SIZE.name, ACCUMULATION_STEPS.name)}
    if smaller and others and smaller.replace(**others) != together:
        yield smaller.replace(**others)
    while smaller and (smaller := halved(smaller, failed)):
        yield smaller
        if others:
            yield smaller.replace(**others)
