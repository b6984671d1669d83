"""The configurations that were tried: each with what it measured, and what the latest flip did."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..shared.knobs.communication import COMMUNICATION_KNOBS
from ..shared.messages import Sample
from ..shared.settings import Settings
from ..shared.step_times import PARTS
from ..shared.units import format_bytes
from .differences import arrows
from .runs.curve import Curve
from .speed import STEPS_JUDGED, WARM_UP_STEPS, Speed, compared, percent

_NOT_RUN = "not run"
_COMMUNICATION = {knob.name for knob in COMMUNICATION_KNOBS}


@dataclass(slots=True)
class Tried:
    """One configuration and what it measured.

    Attributes:
        options, parameters: of a ready-made workload by name, and of its model when it was loaded.
        model_version: which the model had at its first step; see ``History``.
        steps: steps done under it.
        steps_beside: steps that autotune did meanwhile under others.
        peak_bytes: highest live bytes of any rank in the steps judged.
        throughputs: samples/s of all ranks together, one value for each of the last steps; none once it is settled.
        hidden: the mean over the ranks of the share of communication that backward hid, for each of the last steps.
        compression_error: the share of a rank's gradients that compression took, as last measured; the worst rank's.
        headrooms: of the limit what the reserved peak leaves free, on the rank with least, for each of the last steps.
        part_times: the mean over the ranks of the seconds of each of ``PARTS``, for each of the last steps.
        categories: live bytes at the peak of the latest step that was recorded, of the rank with the highest.
        curve: loss, samples/s and live peak over all of its steps.
        began_s: when it was chosen, in seconds since 1970.
        outcome: ``ok`` once a step was done, ``oom`` or ``error`` when it could not be kept.
    """

    settings_id: int
    workload: str
    settings: Settings
    model_version: int = 0
    steps: int = 0
    steps_beside: int = 0
    loss: float | None = None
    outcome: str = _NOT_RUN
    peaks: deque[int] | list[int] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    reserved: deque[int] | list[int] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    throughputs: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    hidden: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    compression_error: float | None = None
    headrooms: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    part_times: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    categories: Mapping[str, int] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    began_s: float = field(default_factory=time.time)
    options: tuple[tuple[str, float], ...] = ()
    parameters: int | None = None
    batch_norm: bool = False
    _settled: Speed | None = field(default=None, init=False)
    _of_that_model: int | None = field(default=None, init=False)

    def model_may_have_changed(self, version: int) -> None:
        """Steps that follow are of the model at this version."""
        if not self.steps:
            self.model_version = version
        elif self._of_that_model is None:
            self._of_that_model = self.peak_bytes

    def add(self, samples: Sequence[Sample], limits: Sequence[int | None] = ()) -> None:
        """Take in one finished step of all ranks, whose memory has these limits, in rank order."""
        if self._settled:  # a step that was under way for long; the figures are made
            self.steps += 1
            return
        if self.steps == WARM_UP_STEPS:
            for judged in (self.peaks, self.reserved, self.throughputs, self.hidden, self.headrooms, self.part_times):
                judged.clear()
        self.steps += 1
        self.outcome = "ok"
        self.peaks.append(max(sample.live_peak_bytes for sample in samples))
        self.reserved.append(max(sample.reserved_peak_bytes for sample in samples))
        self.throughputs.append(sum(sample.samples_per_s for sample in samples))
        shares = [one.times.hidden_share for one in samples if one.times]
        if known := [share for share in shares if share is not None]:
            self.hidden.append(statistics.fmean(known))
        errors = [one.compression_error for one in samples if one.compression_error is not None]
        self.compression_error = max(errors, default=self.compression_error)
        losses = [sample.loss for sample in samples if sample.loss is not None]
        self.loss = statistics.fmean(losses) if losses else None
        self._add_for_the_record(samples, limits)

    def _add_for_the_record(self, samples: Sequence[Sample], limits: Sequence[int | None]) -> None:
        """What %hvd_runs says of it, besides."""
        known = [(one.reserved_peak_bytes, limits[one.rank]) for one in samples if one.rank < len(limits)]
        if shares := [1 - reserved / limit for reserved, limit in known if limit]:
            self.headrooms.append(min(shares))
        if times := [one.times.seconds for one in samples if one.times]:
            self.part_times.append(tuple(map(statistics.fmean, zip(*times, strict=True))))
        if ledgers := [one.ledger for one in samples if one.ledger]:
            self.categories = max(ledgers, key=lambda ledger: ledger.peak_bytes).at_peak
        batch = self.settings.samples_per_rank * len(samples)
        self.curve.add(batch, self.loss, self.throughputs[-1], self.peaks[-1])

    def settle(self) -> None:
        """Keep only the resulting figures: a long session tries thousands of configurations."""
        self.peaks = [self.peak_bytes] if self.peak_bytes is not None else []
        self.reserved = [self.reserved_peak_bytes] if self.reserved_peak_bytes is not None else []
        self._settled = self.speed
        self.throughputs.clear()
        room, parts = self.headroom, self.part_seconds
        self.headrooms = deque([] if room is None else [room], STEPS_JUDGED)
        self.part_times = deque([tuple(parts.values())] if parts else [], STEPS_JUDGED)
        self.curve.thin()

    @property
    def ran(self) -> bool:
        """Whether a step was done, or failed."""
        return bool(self.steps) or self.outcome != _NOT_RUN

    @property
    def peak_bytes(self) -> int | None:
        """Highest live bytes over the steps judged, worst rank."""
        return max(self.peaks, default=None)

    @property
    def foreseeable_peak_bytes(self) -> int | None:
        """The same of the steps before the model may have changed: what was predicted of it is held against that."""
        return self.peak_bytes if self._of_that_model is None else self._of_that_model

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Highest reserved bytes over the steps judged, worst rank."""
        return max(self.reserved, default=None)

    @property
    def headroom(self) -> float | None:
        """Of the limit what the reserved peak left free over the steps judged, between 0 and 1; the least rank's."""
        return min(self.headrooms, default=None)

    @property
    def part_seconds(self) -> dict[str, float]:
        """The mean seconds of each part of a step over the steps judged and all ranks; empty before it is known."""
        steps = list(self.part_times)
        return dict(zip(PARTS, map(statistics.fmean, zip(*steps, strict=True)), strict=True)) if steps else {}

    @property
    def settled(self) -> bool:
        """Whether its figures change no more."""
        return self._settled is not None

    @property
    def samples_per_s(self) -> float | None:
        """Median over the steps judged, all ranks together."""
        speed = self.speed
        return speed.median if speed else None

    @property
    def hidden_share(self) -> float | None:
        """Of communication's time, what backward hid: the mean over the steps judged."""
        return statistics.fmean(self.hidden) if self.hidden else None

    @property
    def speed(self) -> Speed | None:
        """Samples/s over the steps judged, all ranks together."""
        return self._settled or Speed.of(list(self.throughputs))


@dataclass(frozen=True)
class Effect:
    """What a flip bought and cost: the configuration before it, or a ``pinned`` one, and the one after it."""

    before: Tried
    after: Tried
    pinned: bool = False

    @property
    def flip(self) -> str:
        """What was changed."""
        return arrows(self.before.settings, self.after.settings)

    @property
    def memory(self) -> str:
        """Highest live peak of any rank, before and after."""
        before, after = self.before.peak_bytes, self.after.peak_bytes
        differ = f" ({percent(before, after)})" if before and after is not None else ""
        return f"{format_bytes(before)} → {format_bytes(after)}{differ}"

    @property
    def speed(self) -> str:
        """Samples/s of all ranks together, before and after."""
        return compared(self.before.speed, self.after.speed)

    @property
    def communication(self) -> str:
        """How gradients travelled before and after, if that was changed; else empty."""
        if self.after.settings.changed_from(self.before.settings).keys().isdisjoint(_COMMUNICATION):
            return ""
        before, after, error = self.before.hidden_share, self.after.hidden_share, self.after.compression_error
        told = f"{_share(before)} → {_share(after)} of communication hidden"
        return told if error is None else f"{told}, compression takes {100 * error:.2g} % of gradients"

    def __str__(self) -> str:
        if not self.after.steps:
            return f"{self.flip}: waiting for the first step"
        return ", ".join(filter(None, (f"{self.flip}: live peak {self.memory}", self.speed, self.communication)))


def _share(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.0f} %"
