"""The configurations that were tried: each with what it measured, what the latest flip did, and what autotune found."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..shared.knobs.communication import COMMUNICATION_KNOBS
from ..shared.messages import Sample
from ..shared.settings import Settings
from ..shared.step_times import PARTS, StepTimes
from ..shared.units import format_bytes, format_rate
from .differences import arrows, typed
from .runs.row import Curve
from .speed import STEPS_JUDGED, WARM_UP_STEPS, Speed, compared, percent, with_a_core
from .tables import Words

_NOT_RUN = "not run"
_COMMUNICATION = {knob.name for knob in COMMUNICATION_KNOBS}


@dataclass(slots=True)
class Tried:
    """One configuration of one model, and what its steps measured: after a cell that may change the model, a new one.

    Attributes:
        options, parameters: of a ready-made workload by name, and of its model when it was loaded.
        model_version: which the model has in its steps; see ``History``.
        part: how many cells that may have changed the model ran between steps under this ``settings_id``.
        steps: steps done under it.
        steps_beside: steps that autotune did meanwhile under others.
        loss: of the latest step, mean of the ranks.
        outcome: ``ok`` once a step was done, ``oom`` or ``error`` when it could not be kept.
        peak_bytes, reserved_peak_bytes: highest live and reserved bytes of any rank in any of its steps.
        fullest: peak and limit of the rank whose live peak was the largest share of its own limit, in bytes.
        headroom: of the limit what the reserved peak left free, between 0 and 1; the least of any rank and step.
        throughputs: samples/s of all ranks together, one value for each of the last steps; none once it is settled.
        hidden: the mean over the ranks of the share of communication that backward hid, for each of the last steps.
        with_cores: the same values as they would be at most if the rank that lacked a core most had not waited for one.
        compression_error: the share of a rank's gradients that compression took, as last measured; the worst rank's.
        part_times: the mean over the ranks of the seconds of each of ``PARTS``, for each of the last steps.
        categories: live bytes at the highest recorded peak, of the rank that had it.
        curve: loss, samples/s and live peak over all of its steps.
        began_s: when it was chosen, in seconds since 1970.
    """

    settings_id: int
    workload: str
    settings: Settings
    model_version: int = 0
    part: int = 0
    steps: int = 0
    steps_beside: int = 0
    loss: float | None = None
    outcome: str = _NOT_RUN
    peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    fullest: tuple[int, int] | None = None
    headroom: float | None = None
    throughputs: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    hidden: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    with_cores: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    compression_error: float | None = None
    part_times: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    categories: Mapping[str, int] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    began_s: float = field(default_factory=time.time)
    options: tuple[tuple[str, float], ...] = ()
    parameters: int | None = None
    batch_norm: bool = False
    _settled: Speed | None = field(default=None, init=False)

    def anew(self, model_version: int) -> Tried:
        """Return the same configuration of the model at another version, before its first step."""
        return Tried(
            self.settings_id,
            self.workload,
            self.settings,
            model_version,
            self.part + 1,
            options=self.options,
            parameters=self.parameters,
            batch_norm=self.batch_norm,
        )

    def add(self, samples: Sequence[Sample], limits: Sequence[int | None] = ()) -> None:
        """Take in one finished step of all ranks, whose memory has these limits, in rank order."""
        if self.steps == WARM_UP_STEPS and not self._settled:
            for judged in (self.throughputs, self.with_cores, self.hidden, self.part_times):
                judged.clear()
        self.steps += 1
        self.outcome = "ok"
        self._add_memory(samples, limits)
        if self._settled:  # a step that was under way for long; its speed is known
            return
        rate = sum(sample.samples_per_s for sample in samples)
        if not any(sample.prepares for sample in samples):
            times = [one.times for one in samples if one.times]
            self.throughputs.append(rate)
            self.with_cores.append(with_a_core(rate, max((one.starved_share or 0.0 for one in times), default=0.0)))
            self._add_times(times)
        errors = [one.compression_error for one in samples if one.compression_error is not None]
        self.compression_error = max(errors, default=self.compression_error)
        losses = [sample.loss for sample in samples if sample.loss is not None]
        self.loss = statistics.fmean(losses) if losses else None
        live = max(sample.live_peak_bytes for sample in samples)
        self.curve.add(self.settings.samples_per_rank * len(samples), self.loss, rate, live)

    def _add_times(self, times: Sequence[StepTimes]) -> None:
        if known := [share for share in (one.hidden_share for one in times) if share is not None]:
            self.hidden.append(statistics.fmean(known))
        if times:
            self.part_times.append(tuple(map(statistics.fmean, zip(*(one.seconds for one in times), strict=True))))

    def _add_memory(self, samples: Sequence[Sample], limits: Sequence[int | None]) -> None:
        ledgers = [one.ledger for one in samples if one.ledger]
        highest = max(ledgers, key=lambda ledger: ledger.peak_bytes, default=None)
        if highest and highest.peak_bytes >= sum(self.categories.values()):
            self.categories = highest.at_peak
        for one in samples:
            self.peak_bytes = max(self.peak_bytes or 0, one.live_peak_bytes)
            self.reserved_peak_bytes = max(self.reserved_peak_bytes or 0, one.reserved_peak_bytes)
            limit = limits[one.rank] if one.rank < len(limits) else None
            if limit:
                mine = (one.live_peak_bytes, limit)
                self.fullest = max(self.fullest or mine, mine, key=lambda pair: pair[0] / pair[1])
                left = 1 - one.reserved_peak_bytes / limit
                self.headroom = left if self.headroom is None else min(self.headroom, left)

    def settle(self) -> None:
        """Keep only the resulting figures: a long session tries thousands of configurations."""
        self._settled = self.speed
        parts = self.part_seconds
        self.throughputs.clear()
        self.with_cores.clear()
        self.part_times = deque([tuple(parts.values())] if parts else [], STEPS_JUDGED)
        self.curve.thin()

    @property
    def ran(self) -> bool:
        """Return whether a step was done, or failed."""
        return bool(self.steps) or self.outcome != _NOT_RUN

    @property
    def part_seconds(self) -> dict[str, float]:
        """The mean seconds of each part of a step over the steps judged and all ranks; empty before it is known."""
        steps = list(self.part_times)
        return dict(zip(PARTS, map(statistics.fmean, zip(*steps, strict=True)), strict=True)) if steps else {}

    @property
    def settled(self) -> bool:
        """Return whether its figures change no more."""
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
        if self._settled:
            return self._settled
        return Speed.of(list(self.throughputs), list(self.with_cores))  # another thread adds to them


@dataclass(frozen=True, repr=False)
class Effect(Words):
    """The effect of a flip: the configuration before it, or a ``pinned`` one, and the one after it."""

    before: Tried
    after: Tried
    pinned: bool = False

    @property
    def flip(self) -> str:
        """Return what was changed."""
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
        """Return how gradients travelled before and after, if that was changed; else empty."""
        if self.after.settings.changed_from(self.before.settings).keys().isdisjoint(_COMMUNICATION):
            return ""
        before, after, error = self.before.hidden_share, self.after.hidden_share, self.after.compression_error
        told = f"{_share(before)} → {_share(after)} of communication hidden"
        return told if error is None else f"{told}, compression takes {100 * error:.2g} % of gradients"

    @property
    def caveat(self) -> str:
        """Return what else may have changed the figures besides the flip; empty if nothing."""
        changed = self.before.model_version != self.after.model_version
        return "a cell that ran in between may have changed the model" if changed else ""

    def __str__(self) -> str:
        if not self.after.steps:
            return f"{self.flip}: waiting for the first step"
        said = (f"{self.flip}: live peak {self.memory}", self.speed, self.communication, self.caveat)
        return ", ".join(filter(None, said))


def _share(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True, slots=True)
class Autotuned:
    """The fastest settings that were found, beside those of the start.

    Attributes:
        before, after: samples/s of all ranks together in the rounds in which both took turns at the end; empty if
            nothing was found.
        tried: how many other settings were tried.
        impossible: those of them under which no step could be done, most often because memory ran out.
    """

    start: Settings
    found: Settings
    before: tuple[float, ...]
    after: tuple[float, ...]
    tried: int
    impossible: tuple[Settings, ...] = ()

    def __str__(self) -> str:
        changes = typed(self.start, self.found)
        tried = f"{self.tried} other settings were tried"
        if not changes:
            text = f"Autotune: none of {self.tried} other settings was clearly faster, so nothing was changed."
        else:
            ratios = sorted(after / before for before, after in zip(self.before, self.after, strict=True))
            speeds = f"{format_rate(statistics.median(self.after))} samples/s instead of " + format_rate(
                statistics.median(self.before)
            )
            spread = f"{percent(1, ratios[0])[:-2]} to {percent(1, ratios[-1])} in {len(ratios)} comparisons"
            text = f"Autotune set {changes}: {speeds} ({spread}; {tried})."
        if self.found.compression == "fp16" != self.start.compression:
            text += " compression=fp16 rounds gradients on their way: %hvd_set compression=none takes that back."
        if self.impossible:
            text += f" Not possible here: {', '.join(typed(self.start, one) for one in self.impossible)}."
        return text
