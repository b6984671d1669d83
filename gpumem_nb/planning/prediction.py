"""A prediction: what a step under some settings needs on the rank that has least room, and whether it fits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ..report.differences import mathematics
from ..shared.categories import OTHER
from ..shared.forecast import Forecast
from ..shared.messages import Failure
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
NO_LIMIT = "n/a"
_SEVERITY = (NO_LIMIT, FITS, TIGHT, DOES_NOT_FIT)
TIME_ERROR = 0.05  # of a step's time, beyond how much the steps that were timed differ


@dataclass(frozen=True)
class Prediction:
    """What a step under these settings would need, in bytes, on the rank that has least room for it.

    Attributes:
        settings: what it is about.
        live_peak_bytes: the highest live bytes.
        reserved_peak_bytes: what the caching allocator would hold for them, beginning with an empty cache.
        device_bytes: of the whole device; ``None`` where that is not known.
        low_bytes, high_bytes: between which reserved bytes will be in 95 % of cases.
        limit_bytes: of the rank; ``None`` without one.
        verdict: ``fits``, ``tight`` (the limit lies within the error), ``does not fit``, or ``n/a`` without a limit.
        categories: live bytes at the peak by category; they add up to ``live_peak_bytes``.
        phase, module: what runs at the peak.
        step_s, samples_per_s: of an optimizer step of all ranks; ``None`` where it does not fit, or was not timed.
        low_samples_per_s, high_samples_per_s: between which throughput will be, as long as the machine does as it did.
        basis: what it was found from, in words.
        seconds: what predicting took.
        cut_short: whether it was not timed because somebody waited for the ranks.
        before: the settings that it was asked from, if there were any.
        batch_norm: whether the model takes statistics from micro-batches.
    """

    settings: Settings
    live_peak_bytes: int
    reserved_peak_bytes: int
    device_bytes: int | None
    low_bytes: int
    high_bytes: int
    limit_bytes: int | None
    verdict: str
    categories: Mapping[str, int]
    phase: str
    module: str
    basis: str
    seconds: float
    step_s: float | None = None
    samples_per_s: float | None = None
    low_samples_per_s: float | None = None
    high_samples_per_s: float | None = None
    cut_short: bool = False
    before: Settings | None = None
    batch_norm: bool = False

    @property
    def refusal(self) -> str:
        """Why nobody should flip to these settings; empty unless they are said not to fit."""
        if self.verdict != DOES_NOT_FIT:
            return ""
        return f"will not fit: {format_bytes(self.reserved_peak_bytes)} of {format_bytes(self.limit_bytes)}"

    @property
    def ran_out(self) -> bool:
        """Whether a step ran out of memory on trial: all bytes here are the least that is needed, whatever it is."""
        return list(self.categories) == [OTHER]

    @property
    def columns(self) -> dict[str, Any]:
        """The verdict, the bytes and the throughput by name, for a table."""
        names = (
            "verdict",
            "live_peak_bytes",
            "reserved_peak_bytes",
            "low_bytes",
            "high_bytes",
            "limit_bytes",
            "samples_per_s",
        )
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        largest = sorted(self.categories.items(), key=lambda entry: -entry[1])[:3]
        parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in largest)
        where = f" in {self.phase}" if self.phase else ""
        said = "" if self.verdict == NO_LIMIT else f"{self.verdict}: "
        return (
            f"{said}live peak {format_bytes(self.live_peak_bytes)}{where} ({parts}), reserved "
            f"{format_bytes(self.reserved_peak_bytes)}{limit} "
            f"({format_bytes(self.low_bytes)} to {format_bytes(self.high_bytes)}){self._speed}; "
            f"{self.basis}{self._mathematics}"
        )

    @property
    def _mathematics(self) -> str:
        if self.before is None or self.before == self.settings:
            return ""
        return f"; it {mathematics(self.before, self.settings, self.batch_norm)}"

    @property
    def _speed(self) -> str:
        if self.samples_per_s is None:
            return ""
        low, high = format_rate(self.low_samples_per_s), format_rate(self.high_samples_per_s)
        return f", {format_rate(self.samples_per_s)} samples/s ({low} to {high})"

    def timed(self, steps_s: Sequence[Sequence[float]]) -> Prediction:
        """The same with the throughput that follows from how long steps took, from a row of times for each rank."""
        slowest = max(steps_s, key=statistics.median)
        step_s = statistics.median(slowest)
        samples = self.settings.samples_per_rank * len(steps_s)
        return replace(
            self,
            step_s=step_s,
            samples_per_s=samples / step_s,
            low_samples_per_s=samples / max(slowest) * (1 - TIME_ERROR),
            high_samples_per_s=samples / min(slowest) * (1 + TIME_ERROR),
        )

    def widened(self, less: float, more: float) -> Prediction:
        """The same with an error of at least these shares of reserved bytes, by which earlier predictions missed.

        What ran out of memory in a small step needs at least what is said, whatever else was missed.

        Args:
            less: came than was predicted; 0 or negative.
            more: came than was predicted; 0 or positive.
        """
        reserved = self.reserved_peak_bytes
        low, high = (
            min(self.low_bytes, round(reserved * (1 + less))),
            max(self.high_bytes, round(reserved * (1 + more))),
        )
        if self.low_bytes == self.high_bytes or (low, high) == (self.low_bytes, self.high_bytes):
            return self
        missed = round(100 * max(-less, more))
        return replace(
            self,
            low_bytes=low,
            high_bytes=high,
            verdict=verdict(low, high, self.limit_bytes, self.verdict != DOES_NOT_FIT),
            basis=f"{self.basis}, with the {missed} % by which an earlier prediction of this model missed",
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def worst(
    forecasts: Sequence[Forecast],
    limits: Sequence[int | None],
    device_bytes: Sequence[int | None],
    settings: Settings,
    basis: str,
    seconds: float,
) -> Prediction:
    """That of the rank with least room; all sequences are in rank order.

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
    """What a forecast says of one rank.

    Args:
        one: of the rank.
        settings: what it is about.
        limit_bytes: of what may be reserved; ``None`` for no limit.
        beside_bytes: what is used of the device besides reserved bytes; ``None`` where that is not known.
        basis: what it was found from.
        seconds: what finding it took.
        error_bytes: by how much the limit may be wrong.
    """
    error = one.error_bytes + error_bytes
    least = round(one.live_peak_bytes * (1 - one.error))
    low, high = max(least, one.reserved_peak_bytes - error), one.reserved_peak_bytes + error
    return Prediction(
        settings=settings,
        live_peak_bytes=one.live_peak_bytes,
        reserved_peak_bytes=one.reserved_peak_bytes,
        device_bytes=None if beside_bytes is None else one.reserved_peak_bytes + beside_bytes,
        low_bytes=low,
        high_bytes=high,
        limit_bytes=limit_bytes,
        verdict=verdict(low, high, limit_bytes, one.fits),
        categories=one.at_peak,
        phase=one.phase,
        module=one.module,
        basis=basis,
        seconds=seconds,
    )


def out_of_memory(
    failure: Failure, batch_size: int, limit_bytes: int | None, settings: Settings, seconds: float
) -> Prediction:
    """That of settings under which not even a small step could be done."""
    needed = (limit_bytes or 0) + (failure.asked_bytes or 0) - (failure.free_bytes or 0)
    return Prediction(
        settings=settings,
        live_peak_bytes=needed,
        reserved_peak_bytes=needed,
        device_bytes=None,
        low_bytes=needed,
        high_bytes=needed,
        limit_bytes=limit_bytes,
        verdict=DOES_NOT_FIT,
        categories={OTHER: needed},
        phase=failure.phase,
        module=failure.module,
        basis=f"at least, because a step with batch_size={batch_size} ran out of memory",
        seconds=seconds,
    )


def verdict(low_bytes: int, high_bytes: int, limit_bytes: int | None, fits: bool) -> str:
    """In a word: does what lies between these bounds fit? ``fits``: it would with cached segments given back."""
    if limit_bytes is None:
        return NO_LIMIT
    if high_bytes <= limit_bytes:
        return FITS
    return DOES_NOT_FIT if low_bytes > limit_bytes and not fits else TIGHT
