"""The configurations that were tried: each with what it measured, two compared, all side by side."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..shared.knobs.communication import COMMUNICATION_KNOBS
from ..shared.messages import Sample
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from .differences import arrows, short
from .speed import STEPS_JUDGED, WARM_UP_STEPS, Speed, compared, percent
from .tables import Table, notes_html

if TYPE_CHECKING:
    import pandas as pd

_NOT_RUN = "not run"
_COMMUNICATION = {knob.name for knob in COMMUNICATION_KNOBS}
_NOTHING = "Nothing has been tried yet. Train some steps first: %hvd_train 20"
_ABOUT = (
    "batch = micro-batch × accumulation × ranks; changed: since the workload's row before; live peak: worst rank; "
    "samples/s: all ranks, median."
)


@dataclass(slots=True)
class Tried:
    """One configuration and what it measured.

    Attributes:
        model_version: which the model had at its first step; see ``History``.
        steps: steps done under it.
        steps_beside: steps that autotune did meanwhile under others.
        peak_bytes: highest live bytes of any rank in the steps judged.
        throughputs: samples/s of all ranks together, one value for each of the last steps; none once it is settled.
        hidden: the mean over the ranks of the share of communication that backward hid, for each of the last steps.
        compression_error: the share of a rank's gradients that compression took, as last measured; the worst rank's.
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
    _settled: Speed | None = field(default=None, init=False)
    _of_that_model: int | None = field(default=None, init=False)

    def model_may_have_changed(self, version: int) -> None:
        """Steps that follow are of the model at this version."""
        if not self.steps:
            self.model_version = version
        elif self._of_that_model is None:
            self._of_that_model = self.peak_bytes

    def add(self, samples: Sequence[Sample]) -> None:
        """Take in one finished step of all ranks."""
        if self._settled:  # a step that was under way for long; the figures are made
            self.steps += 1
            return
        if self.steps == WARM_UP_STEPS:
            self.peaks.clear()
            self.reserved.clear()
            self.throughputs.clear()
            self.hidden.clear()
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

    def settle(self) -> None:
        """Keep only the resulting figures: a long session tries thousands of configurations."""
        self.peaks = [self.peak_bytes] if self.peak_bytes is not None else []
        self.reserved = [self.reserved_peak_bytes] if self.reserved_peak_bytes is not None else []
        self._settled = self.speed
        self.throughputs.clear()

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


class Runs:
    """Every configuration tried, side by side."""

    def __init__(self, tried: Sequence[Tried], size: int) -> None:
        self._tried = [entry for entry in tried if entry.ran]
        self._size = size

    def __len__(self) -> int:
        return len(self._tried)

    def frame(self) -> pd.DataFrame:
        """One row a configuration: its settings, steps, live and reserved peak in bytes, samples/s, loss, outcome."""
        import pandas as pd

        rows = [
            {
                "workload": entry.workload,
                **entry.settings.as_dict(),
                "global_batch": entry.settings.samples_per_rank * self._size,
                "steps": entry.steps,
                "live_peak_bytes": entry.peak_bytes,
                "reserved_peak_bytes": entry.reserved_peak_bytes,
                "samples_per_s": entry.samples_per_s,
                "loss": entry.loss,
                "outcome": entry.outcome,
            }
            for entry in self._tried
        ]
        return pd.DataFrame(rows)

    @property
    def _table(self) -> Table:
        figures = ("steps", "live peak", "samples/s", "loss")
        names = ("workload", "precision", "checkpointing", "batch", "optimizer", "changed")
        rows = tuple(
            (
                entry.workload,
                entry.settings.precision,
                entry.settings.checkpointing,
                f"{entry.settings.batch_size}×{entry.settings.accumulation_steps}×{self._size}",
                _optimizer(entry.settings),
                changed,
                str(entry.steps),
                format_bytes(entry.peak_bytes),
                format_rate(entry.samples_per_s),
                "n/a" if entry.loss is None else f"{entry.loss:.4g}",
                entry.outcome,
            )
            for entry, changed in zip(self._tried, self._changes(), strict=True)
        )
        return Table("", (*names, *figures, "outcome"), rows, frozenset({*names, "outcome"}))

    def _changes(self) -> Iterator[str]:
        """What each row changes of the row before it of the same workload, for not every knob has a column."""
        before: dict[str, Settings] = {}
        for entry in self._tried:
            yield short(before.get(entry.workload, entry.settings), entry.settings)
            before[entry.workload] = entry.settings

    def __str__(self) -> str:
        return str(self._table) if self._tried else _NOTHING

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table.html() + notes_html([_ABOUT]) if self._tried else notes_html([_NOTHING])


def _share(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.0f} %"


def _optimizer(settings: Settings) -> str:
    implementation = "" if settings.optimizer_impl == "default" else f"/{settings.optimizer_impl}"
    return f"{settings.optimizer}{implementation}"
