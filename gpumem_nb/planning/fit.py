"""Decide whether settings fit; all callers ask here.

Predictions, the largest batch, the tables, the tuner, the doctor and the advice after memory ran out all hand in what
they know, and get the same answer:

- **Margins.** A forecast has an error (``shared/forecast.py``). Settings fit when the limit holds the high end of it,
  and a step also fits where steps of another size have cut the cache. They do not fit when the low end is beyond the
  limit and giving back cached segments would not help. In between nothing can be said: ``tight``.
- **Earlier misses.** What missed by more than its error widens the error of all later predictions of the model.
- **Without ranks** live bytes decide, which are known within a few percent, and whether they find room once cached
  segments were given back, whatever would be reserved without a limit.
- **Whole steps** say more than small ones, and training says more than either: what runs is not widened, and small
  steps cannot say that it does not fit.
- **Lower bounds.** Once a step has run out of memory, only the least that it needs is known. It is shown as a bound.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from ..report.tables import Words
from ..shared.categories import OTHER
from ..shared.forecast import BY_OPERATORS, ERRORS, MOST_BATCH, SEGMENT_BYTES, Forecast, Forecasts
from ..shared.settings import Settings
from ..shared.units import format_bytes
from .prediction import DOES_NOT_FIT, FITS, NO_LIMIT, TIGHT, Prediction

_SEVERITY = (NO_LIMIT, FITS, TIGHT, DOES_NOT_FIT)
_REFINED = 3  # times that sizes between one that fits and one that does not are tried
_WORTH_REFINING = 1.05  # times the largest size known to fit
_SAYS_LITTLE = 1.25  # times the size that fits for certain: with more, small steps leave much open
_BENEATH = 0.98  # of the size that would fill the limit if all memory grew with it


@dataclass(frozen=True)
class Missed:
    """The largest shares by which memory of a model came to less (0 or negative) and to more than predicted."""

    less: float = 0.0
    more: float = 0.0


def verdict(
    low_bytes: int,
    high_bytes: int,
    limit_bytes: int | None,
    fits: bool,
    fits_recut: bool = True,
    host_is_short: bool = False,
) -> str:
    """Decide whether what lies between two bounds fits, in a word.

    Args:
        fits: whether it would with cached segments given back.
        fits_recut: whether it would also where the cache was cut by steps of another size.
        host_is_short: whether more would wait in host memory than may.
    """
    if host_is_short:
        return DOES_NOT_FIT
    if limit_bytes is None:
        return NO_LIMIT
    if high_bytes <= limit_bytes and fits_recut:
        return FITS
    return DOES_NOT_FIT if low_bytes > limit_bytes and not fits else TIGHT


def fits(one: Prediction) -> bool:
    """Return whether settings fit all ranks, the error included, or run already."""
    return one.verdict in (FITS, NO_LIMIT) or (one.runs and one.verdict != DOES_NOT_FIT)


def worth_a_step(one: Prediction) -> bool:
    """Return whether to try a whole step: settings are expected to fit, but the limit lies within a small error.

    What needs more or less with each batch, because samples differ in size, has a large error and is not tried.
    """
    if fits(one):
        return True
    need, limit = one.reserved_peak_bytes, one.limit_bytes
    small = max(round(ERRORS[BY_OPERATORS] * need), SEGMENT_BYTES)
    return one.verdict == TIGHT and limit is not None and need <= limit and one.high_bytes - need <= small


def of_ranks(answers: Sequence[Forecasts], settings: Settings, sizes: Sequence[int], seconds: float) -> Prediction:
    """Return what the ranks' first forecasts, or a rank that ran out of memory, say of settings.

    Args:
        answers: in rank order; a rank may have run out of memory, but no other failure is among them.
        settings: what they are about.
        sizes: of the micro-batches that were tried.
        seconds: what it took.
    """
    if out := next((answer for answer in answers if answer.failure), None):
        return _at_least(out, settings, seconds)
    steps = "a step" if len(sizes) == 1 else "steps"
    basis = f"from {steps} with batch_size {' and '.join(map(str, sizes))}, undone after step {answers[0].steps}"
    if why := next((answer.update_undone for answer in answers if answer.update_undone), ""):
        basis += f"; the optimizer's update was taken and undone, too ({why.rstrip('.')})"
    readings = [answer.reading for answer in answers]
    beside = [
        None if reading.device_used_bytes is None else reading.device_used_bytes - reading.reserved_bytes
        for reading in readings
    ]
    limits = [answer.limit_bytes for answer in answers]
    return worst([answer.of[0] for answer in answers], limits, beside, settings, basis, seconds)


def worst(
    forecasts: Sequence[Forecast],
    limits: Sequence[int | None],
    device_bytes: Sequence[int | None],
    settings: Settings,
    basis: str,
    seconds: float,
) -> Prediction:
    """Return the prediction of the rank with least room; all sequences are in rank order.

    Args:
        forecasts: what each rank expects.
        limits: of the ranks.
        device_bytes: what is used of each device besides reserved bytes, as now.
        settings: what the forecasts are about.
        basis: what they were found from.
        seconds: what finding them took.
    """
    each = (
        predicted(one, settings, limit, beside, f"{one.how} {basis}", seconds)
        for one, limit, beside in zip(forecasts, limits, device_bytes, strict=True)
    )
    return max(each, key=lambda one: (_SEVERITY.index(one.verdict), one.high_bytes / (one.limit_bytes or 1)))


def predicted(
    one: Forecast,
    settings: Settings,
    limit_bytes: int | None,
    beside_bytes: int | None,
    basis: str,
    seconds: float,
    error_bytes: int = 0,
) -> Prediction:
    """Return what a forecast says of one rank.

    Args:
        one: of the rank.
        settings: what it is about.
        limit_bytes: of what may be reserved; ``None`` for no limit.
        beside_bytes: what is used of the device besides reserved bytes; ``None`` where that is not known.
        basis: what it was found from.
        seconds: what finding it took.
        error_bytes: by how much the limit may be wrong.
    """
    least = round(one.live_peak_bytes * (1 - one.error))
    low, high = max(least, one.low_bytes - error_bytes), one.high_bytes + error_bytes
    fits = one.fits and (limit_bytes is None or least <= limit_bytes)  # a budget is less than what ranks replay with
    at_least, at_most = one.deciding_bytes
    if limit_bytes is not None and one.live_error is not None:
        basis += f"; live bytes, known within {100 * one.live_error:.0f} %, decide whether it fits"
    at_least, at_most = max(least, at_least - error_bytes), at_most + error_bytes
    return Prediction(
        settings=settings,
        live_peak_bytes=one.live_peak_bytes,
        reserved_peak_bytes=one.reserved_peak_bytes,
        device_bytes=None if beside_bytes is None else one.reserved_peak_bytes + beside_bytes,
        low_bytes=low,
        high_bytes=high,
        limit_bytes=limit_bytes,
        verdict=verdict(at_least, at_most, limit_bytes, fits, one.fits_recut and one.fits, one.host_is_short),
        categories=one.at_peak,
        phase=one.phase,
        module=one.module,
        basis=basis,
        seconds=seconds,
        sample=one.sample,
        block_bytes=one.block_bytes,
        host_bytes=one.host_bytes,
        host_limit_bytes=one.host_limit_bytes,
    )


def with_longest(whole: Prediction, small: Prediction) -> Prediction:
    """Return what whole steps need, and at most what small ones of the largest sample say, where samples differ."""
    if whole.lower_bound or not small.sample:
        return whole
    high = max(whole.reserved_peak_bytes, small.high_bytes)
    return replace(whole, high_bytes=high, verdict=_between(whole, whole.low_bytes, high), sample=small.sample)


def within(one: Prediction, limit_bytes: int | None) -> Prediction:
    """Return the same under another limit."""
    fits = one.verdict != DOES_NOT_FIT and (limit_bytes is None or one.live_peak_bytes <= limit_bytes)
    said = verdict(one.low_bytes, one.high_bytes, limit_bytes, fits, _fits_recut(one), bool(one.short_of_host))
    return replace(one, limit_bytes=limit_bytes, verdict=said)


def _between(one: Prediction, low: int, high: int) -> str:
    """Decide whether it fits within other bounds. What may not fit where the cache is cut may not within these."""
    fits, short = one.verdict != DOES_NOT_FIT, bool(one.short_of_host)
    return verdict(low, high, one.limit_bytes, fits, _fits_recut(one), short)


def _fits_recut(one: Prediction) -> bool:
    return one.verdict != TIGHT or (one.limit_bytes is not None and one.high_bytes > one.limit_bytes)


def _at_least(answer: Forecasts, settings: Settings, seconds: float) -> Prediction:
    """Return what is known of settings under which a step ran out of memory."""
    failure, needed = answer.failure, answer.least_bytes
    assert failure
    return Prediction(
        settings=settings,
        live_peak_bytes=needed,
        reserved_peak_bytes=needed,
        device_bytes=None,
        low_bytes=needed,
        high_bytes=needed,
        limit_bytes=answer.limit_bytes,
        verdict=DOES_NOT_FIT,
        categories={OTHER: needed},
        phase=failure.phase,
        module=failure.module,
        basis=f"a step with batch_size={answer.failed_batch} ran out of memory",
        seconds=seconds,
        lower_bound=True,
    )


def settled(one: Prediction, missed: Missed, came: tuple[int, int] | None = None) -> Prediction:
    """Return the prediction after earlier misses, and with what training itself has shown.

    Args:
        missed: by how much earlier predictions of the model did.
        came: live and reserved bytes at the peak, if training went well under these settings.
    """
    if came is None:
        return _widened(one, missed)
    if one.verdict != DOES_NOT_FIT or one.measured:
        return replace(one, runs=True)
    said = f"{one.basis}, and yet training runs under these settings"
    if one.lower_bound:  # which is none, then: what training itself came to is known
        live, reserved = came
        one = replace(
            one,
            live_peak_bytes=live,
            reserved_peak_bytes=reserved,
            low_bytes=reserved,
            high_bytes=max(reserved, one.limit_bytes or 0),
            categories={OTHER: live},
            lower_bound=False,
        )
        said = f"as trained: {said}"
    return replace(one, verdict=TIGHT, basis=said, runs=True)


def _widened(one: Prediction, missed: Missed) -> Prediction:
    reserved = one.reserved_peak_bytes
    low = min(one.low_bytes, round(reserved * (1 + missed.less)))
    high = max(one.high_bytes, round(reserved * (1 + missed.more)))
    if one.lower_bound or (low, high) == (one.low_bytes, one.high_bytes):
        return one
    share = round(100 * max(-missed.less, missed.more))
    return replace(
        one,
        low_bytes=low,
        high_bytes=high,
        verdict=_between(one, low, high),
        basis=f"{one.basis}, with the {share} % by which an earlier prediction of this model missed",
    )


@dataclass(frozen=True, repr=False)
class Largest(Words):
    """The largest micro-batch that fits.

    Attributes:
        size: its samples; 0 if none fits.
        predicted: what was found of it, or of the smallest that was asked about where none fits.
        unknown: why it cannot be said whether any fits, as a clause; else empty.
        most: samples for a micro-batch that there are.
    """

    size: int
    predicted: Prediction
    unknown: str = ""
    most: int = MOST_BATCH

    def __str__(self) -> str:
        one = self.predicted
        needs = f"live peak {one.in_words(one.live_peak_bytes)}, reserved {one.in_words(one.reserved_peak_bytes)}"
        of_limit = f" of {format_bytes(one.limit_bytes)}" if one.limit_bytes is not None else ""
        if self.unknown:
            return f"Whether any micro-batch fits cannot be said: {self.unknown}."
        if not self.size:
            return f"Not even batch_size=1 fits: {one.short_of_host or f'{needs}{of_limit}'}."
        bounds = f" ({format_bytes(one.low_bytes)} to {format_bytes(one.high_bytes)})"
        ends = "; an epoch has no more samples for a step" if self.size >= self.most else ""
        return f"batch_size={self.size} is the largest that fits every rank: {needs}{of_limit}{bounds}{ends}."


def largest(sure: int, likely: int, most: int) -> Generator[int, Prediction, Largest]:
    """Look for the largest micro-batch that fits: gives sizes to predict, takes what was predicted of them.

    The answer was predicted to fit, with a segment to spare: a step that is asked for again may take one more.

    Args:
        sure: the largest size that fits, error included, as far as small steps tell; 0 if they tell of none.
        likely: the same without the error.
        most: no larger size is of use.
    """
    size = min(most, sure or likely or 1)
    found, too_large, failed, refined = None, min(most, max(likely, size)) + 1, 0, 0
    while True:
        said = yield size
        if _holds(said, size):
            found = Largest(size, said, most=most)
        else:
            too_large, failed = size, failed + 1
        at_least = found.size if found else 0
        if found and (refined == _REFINED or too_large <= max(at_least + 1, _WORTH_REFINING * at_least)):
            return found
        if found and not failed and (not said.measured or likely <= _SAYS_LITTLE * sure):
            return found  # small steps have said as much
        if found:
            refined += 1
            size = (at_least + too_large) // 2
        elif size == 1:
            break
        else:
            size = max(1, min(size // 2 if failed > 1 or said.lower_bound else _proportional(said, size), size - 1))
    unknown = "" if said.verdict == DOES_NOT_FIT else f"one sample may need {said.in_words(said.high_bytes)}"
    return Largest(0, said, unknown)


def _holds(said: Prediction, size: int) -> bool:
    """Return whether a size may be the answer."""
    roomy = said.runs or said.limit_bytes is None or said.high_bytes + SEGMENT_BYTES <= said.limit_bytes
    return fits(said) and (roomy or size == 1)


def _proportional(said: Prediction, size: int) -> int:
    """Return the size that would fit if all memory grew with it; constant memory leaves less, so halve it next."""
    room, needs = (said.limit_bytes or 0), said.high_bytes
    if said.short_of_host:
        room, needs = said.host_limit_bytes, said.host_bytes
    return int(_BENEATH * size * room / max(1, needs))
