"""A prediction: what a step under some settings needs on the rank that has least room, in numbers and words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..report.differences import NOT_KNOWN, mathematics
from ..report.instead import Instead
from ..report.tables import Words
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from ..shared.workload import Splits

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
NO_LIMIT = "n/a"
TIME_ERROR = 0.05  # of a step's time, beyond how much the steps that were timed differ
_AS_MUCH = 0.99  # of the live peak before: not worth copying for


@dataclass(frozen=True, repr=False)
class Prediction(Words):
    """The predicted memory of a step under these settings, in bytes, on the rank that has least room for it.

    Whether it fits is decided in ``planning/fit.py`` and nowhere else.

    Attributes:
        settings: what it is about.
        live_peak_bytes: the highest live bytes.
        reserved_peak_bytes: what the caching allocator would hold for them, beginning with an empty cache.
        device_bytes: of the whole device; ``None`` where that is not known.
        low_bytes, high_bytes: between which reserved bytes will be in 95 % of cases.
        limit_bytes: of the rank; ``None`` without one.
        verdict: ``fits``, ``tight`` (the limit lies within the error of what decides), ``does not fit``, or ``n/a``
            without a limit.
        lower_bound: whether a step ran out of memory on trial, so that all bytes here are the least that is needed.
        measured: whether a whole step was taken under these very settings.
        runs: whether training went well under them, with the model as it is.
        sample: a sentence about a sample that is much larger than others, for which ``high_bytes`` may be needed.
        categories: live bytes at the peak by category; they add up to ``live_peak_bytes``.
        phase, module: what runs at the peak.
        step_s, samples_per_s: of an optimizer step of all ranks; ``None`` where it does not fit, or was not timed.
        low_samples_per_s, high_samples_per_s: between which throughput will be, as long as the machine does as it did.
        basis: what it was found from, in words.
        seconds: what predicting took.
        cut_short: whether it was not timed because other work waited for the ranks.
        before: the settings that it was asked from, if there were any.
        before_bytes: the live peak of steps under these; ``None`` if there were none.
        splits: what is known of training its micro-batches in parts.
        instead: what would fit in its place, where it does not and that was asked for.
        block_bytes: by how much live bytes would grow at most for each block more of the model; ``None`` if not known.
        host_bytes: what waits in host memory at most, of ``host_limit_bytes`` that a rank may have there.
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
    before_bytes: int | None = None
    splits: Splits = NOT_KNOWN
    lower_bound: bool = False
    measured: bool = False
    runs: bool = False
    sample: str = ""
    instead: Instead | None = None
    block_bytes: int | None = None
    host_bytes: int = 0
    host_limit_bytes: int = 0

    @property
    def short_of_host(self) -> str:
        """Return by how much host memory is short, as a clause; empty where it is not."""
        if self.host_bytes <= self.host_limit_bytes:
            return ""
        needs, may = format_bytes(self.host_bytes), format_bytes(self.host_limit_bytes)
        return f"{needs} would wait in host memory, of which a rank may use {may}"

    def more_blocks(self, blocks: int) -> int | None:
        """Return about how many more than these blocks, like them, would fit; ``None`` where that is not known."""
        if not self.block_bytes or self.limit_bytes is None or self.lower_bound:
            return None
        more = max(0, (self.limit_bytes - self.high_bytes) // self.block_bytes)
        if not self.host_bytes:
            return more
        return min(more, max(0, self.host_limit_bytes - self.host_bytes) * blocks // self.host_bytes)

    @property
    def refusal(self) -> str:
        """Return why you should not flip to these settings; empty unless they are predicted not to fit."""
        if self.verdict != DOES_NOT_FIT:
            return ""
        needs = f"{self.in_words(self.reserved_peak_bytes)} of {format_bytes(self.limit_bytes)}"
        return f"will not fit: {self.short_of_host or needs}"

    def in_words(self, size: int) -> str:
        """Return some of these bytes for people: "310.0 MiB", or "more than 310.0 MiB" where they are a lower bound."""
        return f"{'more than ' * self.lower_bound}{format_bytes(size)}"

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
            "lower_bound",
        )
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        where = f" in {self.phase}" if self.phase else ""
        said = "" if self.verdict == NO_LIMIT else f"{self.verdict}: "
        if self.lower_bound:
            bytes_ = f"needs {self.in_words(self.reserved_peak_bytes)}{limit}{where}"
        else:
            largest = sorted(self.categories.items(), key=lambda entry: -entry[1])[:3]
            parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in largest)
            bytes_ = (
                f"live peak {format_bytes(self.live_peak_bytes)}{where} ({parts}), reserved "
                f"{format_bytes(self.reserved_peak_bytes)}{limit} "
                f"({format_bytes(self.low_bytes)} to {format_bytes(self.high_bytes)}){self._speed}"
            )
        host = f"; {self.short_of_host}" if self.short_of_host else ""
        longest = f"; {self.sample.rstrip('.')}" if self.sample else ""
        instead = f"\n{self.instead.words(self.before or self.settings)}" if self.instead else ""
        return f"{said}{bytes_}{host}; {self.basis}{longest}{self._mathematics}{self._elsewhere}{instead}"

    @property
    def _mathematics(self) -> str:
        if self.before is None or self.before == self.settings:
            return ""
        return f"; it {mathematics(self.before, self.settings, self.splits)}"

    @property
    def _elsewhere(self) -> str:
        """What to say where something is to wait in host memory, and the peak has none of it."""
        if self.before is None or self.before_bytes is None or self.lower_bound:
            return ""
        waits = [
            f"{name}=on"
            for name in ("offload_activations", "offload_optimizer")
            if (getattr(self.before, name), getattr(self.settings, name)) == ("off", "on")
        ]
        if not waits or self.live_peak_bytes < _AS_MUCH * self.before_bytes:
            return ""
        frees = "frees" if len(waits) == 1 else "free"
        return f"; {' and '.join(waits)} {frees} nothing here: the peak lies elsewhere, in {self.phase}"

    @property
    def _speed(self) -> str:
        if self.samples_per_s is None:
            return ""
        low, high = format_rate(self.low_samples_per_s), format_rate(self.high_samples_per_s)
        return f", {format_rate(self.samples_per_s)} samples/s ({low} to {high})"

    def timed(self, steps_s: Sequence[Sequence[float]], update: str = "") -> Prediction:
        """Return the same with the throughput that follows from how long steps took.

        Args:
            steps_s: a row of times for each rank.
            update: how it is known what updates take, which trials do not perform.
        """
        slowest = max(steps_s, key=statistics.median)
        step_s = statistics.median(slowest)
        samples = self.settings.samples_per_rank * len(steps_s)
        return replace(
            self,
            basis=f"{self.basis}, {update}" if update else self.basis,
            step_s=step_s,
            samples_per_s=samples / step_s,
            low_samples_per_s=samples / max(slowest) * (1 - TIME_ERROR),
            high_samples_per_s=samples / min(slowest) * (1 + TIME_ERROR),
        )
