"""What has been measured so far: bounded samples of every rank, events, and every configuration tried."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from ..report.differences import arrows
from ..report.leak_sentences import in_words
from ..report.rescue import Rescue
from ..shared.categories import CATEGORIES
from ..shared.messages import DeviceUse, Leak, Reading, Sample
from ..shared.settings import Settings
from ..shared.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

STEPS_KEPT = 2000
EVENTS_KEPT = 200
LEAKS_KEPT = 20
# A configuration is judged by its last steps, without the first one: that one still warms caches up.
STEPS_JUDGED = 50
LATE_STEPS = 3  # configurations that steps under way may still belong to


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a mark on the charts.

    ``kind`` is ``load``, ``flip``, ``oom``, ``error``, ``stall``, ``leak`` or ``note``.
    """

    time_s: float
    step: int
    kind: str
    text: str


@dataclass(slots=True)
class Tried:
    """One configuration and what it measured.

    Attributes:
        steps: steps done under it.
        peak_bytes: highest live bytes of any rank in the steps judged.
        throughputs: samples/s of all ranks together, one value for each of the last steps.
        outcome: ``ok`` once a step was done, ``oom`` or ``error`` when it could not be kept.
    """

    settings_id: int
    workload: str
    settings: Settings
    steps: int = 0
    loss: float | None = None
    outcome: str = "not run"
    peaks: deque[int] | list[int] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    reserved: deque[int | None] | list[int | None] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))
    throughputs: deque[float] | list[float] = field(default_factory=lambda: deque(maxlen=STEPS_JUDGED))

    def add(self, samples: Sequence[Sample]) -> None:
        """Take in one finished step of all ranks."""
        if self.steps == 1:
            self.peaks.clear()
            self.reserved.clear()
            self.throughputs.clear()
        self.steps += 1
        self.outcome = "ok"
        self.peaks.append(max(sample.live_peak_bytes for sample in samples))
        self.reserved.append(max((s.reserved_peak_bytes for s in samples if s.reserved_peak_bytes), default=None))
        self.throughputs.append(sum(sample.samples_per_s for sample in samples))
        losses = [sample.loss for sample in samples if sample.loss is not None]
        self.loss = statistics.fmean(losses) if losses else None

    def settle(self) -> None:
        """Keep the figures alone: there are thousands of configurations in a long session."""
        self.peaks = [self.peak_bytes] if self.peak_bytes is not None else []
        self.reserved = [self.reserved_peak_bytes]
        self.throughputs = [self.samples_per_s] if self.samples_per_s is not None else []

    @property
    def peak_bytes(self) -> int | None:
        """Highest live bytes over the steps judged, worst rank."""
        return max(self.peaks, default=None)

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Highest reserved bytes over the steps judged, worst rank."""
        return max((value for value in self.reserved if value is not None), default=None)

    @property
    def samples_per_s(self) -> float | None:
        """Median over the steps judged, all ranks together."""
        return statistics.median(self.throughputs) if self.throughputs else None


@dataclass(frozen=True)
class Effect:
    """What a flip bought and cost: the configuration before it and the one after it."""

    before: Tried
    after: Tried

    @property
    def flip(self) -> str:
        """What was changed."""
        return arrows(self.before.settings, self.after.settings)

    @property
    def memory(self) -> str:
        """Highest live peak of any rank, before and after."""
        before, after = self.before.peak_bytes, self.after.peak_bytes
        return f"{format_bytes(before)} → {format_bytes(after)}{_percent(before, after)}"

    @property
    def speed(self) -> str:
        """Samples/s of all ranks together, before and after."""
        before, after = self.before.samples_per_s, self.after.samples_per_s
        return f"{format_rate(before)} → {format_rate(after)} samples/s{_percent(before, after)}"

    def __str__(self) -> str:
        if not self.after.steps:
            return f"{self.flip}: waiting for the first step"
        return f"{self.flip}: live peak {self.memory}, {self.speed}"


class History:
    """Written by the thread that receives samples, read by panel and reports.

    Attributes:
        readings: the latest of each rank's memory.
        device_uses: what NVML last said of each rank's device; a virtual GPU has none.
        steps: optimizer steps done since the workload was loaded.
        rescue: the latest step that was discarded, until something is flipped or loaded.
        leaks: by its holder, what ranks found that they keep from step to step; since the workload was loaded.
        loaded_as: the ``settings_id`` with which it was loaded; older samples are of something else.
        seen_before: samples that all ranks had seen when training was resumed.
        version: grows with every change.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.started_s = time.time()
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.tried: list[Tried] = []
        self.readings: list[Reading | None] = [None] * size
        self.device_uses: list[DeviceUse | None] = [None] * size
        self.steps = 0
        self.rescue: Rescue | None = None
        self.leaks: dict[str, tuple[Leak, ...]] = {}
        self.loaded_as = 0
        self.seen_before = 0
        self.version = 0
        self._by_rank: list[deque[Sample]] = [deque(maxlen=STEPS_KEPT) for _ in range(size)]
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since the session started, on the samples' clock."""
        return time.time() - self.started_s

    def add(
        self, samples: Iterable[Sample], readings: Sequence[Reading], device_uses: Sequence[DeviceUse | None] = ()
    ) -> None:
        """Take in what the ranks sent with one chunk."""
        with self._lock:
            by_step: dict[int, list[Sample]] = defaultdict(list)
            for sample in samples:
                self._by_rank[sample.rank].append(sample)
                if sample.event in ("", "flip"):
                    by_step[sample.step].append(sample)
            for step, of_step in sorted(by_step.items()):
                self.steps = step
                tried = self.configuration(of_step[0].settings_id)
                if tried:
                    tried.add(of_step)
        self.read(readings, device_uses)

    def read(self, readings: Sequence[Reading | None], device_uses: Sequence[DeviceUse | None] = ()) -> None:
        """Take in how each rank's device looks."""
        with self._lock:
            self.readings = list(readings)
            self.device_uses = list(device_uses) or [None] * self.size
            self.version += 1

    def mark(self, kind: str, text: str) -> None:
        """Put an event on the charts."""
        with self._lock:
            self.events.append(Event(self.now_s(), self.steps, kind, text))
            if kind in ("flip", "load"):
                self.rescue = None
            if kind == "load":
                self.leaks = {}
                if self.tried:
                    self.loaded_as = self.tried[-1].settings_id
            self.version += 1

    def rescued(self, rescue: Rescue) -> None:
        """A step was discarded."""
        self.mark(rescue.failure.kind, rescue.headline)
        self.rescue = rescue

    def leaked(self, leaks: Sequence[Leak]) -> list[str]:
        """Take in what ranks found that they keep from step to step; returns what that says of holders new here."""
        known, found = self.leaks, dict(self.leaks)
        for leak in leaks:
            found[leak.name] = (*found.get(leak.name, ()), leak)
        self.leaks = dict(list(found.items())[-LEAKS_KEPT:])
        news = [in_words(found[name]) for name in found if name not in known]
        for sentence in news:
            self.mark("leak", sentence)
        return news

    def tried_out(self) -> None:
        """The ranks found out whether other settings would have let a discarded step fit."""
        with self._lock:
            self.version += 1

    def begin(self, settings_id: int, workload: str, settings: Settings) -> None:
        """A configuration is about to be tried."""
        with self._lock:
            self.tried.append(Tried(settings_id, workload, settings))
            for old in self.tried[-LATE_STEPS - 1 : -LATE_STEPS]:
                old.settle()
            self.version += 1

    def configuration(self, settings_id: int) -> Tried | None:
        """The configuration with this id, latest first."""
        return next((tried for tried in reversed(self.tried) if tried.settings_id == settings_id), None)

    def samples(self, last: int | None = None) -> list[list[Sample]]:
        """The latest samples of each rank, oldest first."""
        with self._lock:
            return [list(kept)[-last:] if last else list(kept) for kept in self._by_rank]

    def ledger_cost(self) -> float | None:
        """What looking into steps costs on average, as a share of training time; ``None`` before it is known.

        From the durations of rank 0's steps under the latest settings, the first ones left out: those are special.
        """
        with self._lock:
            steps = [sample for sample in self._by_rank[0] if sample.event == ""]
        latest = steps[-1].settings_id if steps else None
        steps = [sample for sample in steps if sample.settings_id == latest][2:]
        looked_into = [sample.step_s for sample in steps if sample.ledger]
        others = [sample.step_s for sample in steps if not sample.ledger]
        if not looked_into or not others:
            return None
        longer = statistics.median(looked_into) / statistics.median(others) - 1
        return max(0.0, longer) * len(looked_into) / len(steps)

    def effect(self) -> Effect | None:
        """The latest flip between two configurations of one workload."""
        with self._lock:
            if not self.tried:
                return None
            after = self.tried[-1]
            for before in reversed(self.tried[:-1]):
                if before.workload == after.workload and before.steps:
                    same = not after.settings.changed_from(before.settings)
                    return None if same else Effect(before, after)
            return None


class Runs:
    """Every configuration tried, side by side."""

    def __init__(self, tried: Sequence[Tried], size: int) -> None:
        self._tried = [entry for entry in tried if entry.steps or entry.outcome != "not run"]
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

    def _rows(self) -> list[list[str]]:
        heading = ["workload", "precision", "checkpointing", "batch", "optimizer", "steps", "live peak", "samples/s"]
        rows = [[*heading, "loss", "outcome"]]
        for entry in self._tried:
            s = entry.settings
            rows.append(
                [
                    entry.workload,
                    s.precision,
                    s.checkpointing,
                    f"{s.batch_size}×{s.accumulation_steps}×{self._size}",
                    s.optimizer if s.optimizer_impl == "default" else f"{s.optimizer}/{s.optimizer_impl}",
                    str(entry.steps),
                    format_bytes(entry.peak_bytes),
                    format_rate(entry.samples_per_s),
                    "n/a" if entry.loss is None else f"{entry.loss:.4g}",
                    entry.outcome,
                ]
            )
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return (
            "\n".join(lines) if len(rows) > 1 else "Nothing has been tried yet. Train some steps first: %hvd_train 20"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._rows()
        if not body:
            return f"<p>{escape(str(self))}</p>"
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
        note = "batch = micro-batch × accumulation × ranks; live peak: worst rank; samples/s: all ranks, median."
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table><small>{note}</small>"


class Run:
    """What one stretch of training measured.

    Attributes:
        steps: optimizer steps done in it.
        notes: what happened on the way (an out-of-memory error that was survived, for example).
    """

    def __init__(self, samples: Sequence[Sample], settings: dict[int, Settings], notes: Sequence[str]) -> None:
        self._samples = list(samples)
        self._settings = settings
        self.notes = list(notes)
        self.steps = len({sample.step for sample in self._samples if sample.event in ("", "flip")})

    def frame(self) -> pd.DataFrame:
        """One row per rank and step; bytes, seconds and samples/s as the column names say.

        The columns of categories hold their bytes at the peak of the steps that were looked into, else nothing.
        """
        import dataclasses

        import pandas as pd

        left_out = ("settings_id", "event", "ledger")
        columns = [field.name for field in dataclasses.fields(Sample) if field.name not in left_out]
        rows: list[dict[str, Any]] = []
        for sample in self._samples:
            row = {name: getattr(sample, name) for name in columns}
            settings = self._settings[sample.settings_id]
            at_peak = sample.ledger.at_peak if sample.ledger else {}
            shares = {f"{category.replace(' ', '_')}_bytes": at_peak.get(category) for category in CATEGORIES}
            rows.append(row | settings.as_dict() | {"event": sample.event} | shares)
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        if not self.steps:
            return "\n".join(["No step was done.", *self.notes])
        good = [sample for sample in self._samples if sample.event in ("", "flip")]
        ranks = {sample.rank for sample in good}
        last = [sample for sample in good if sample.step == good[-1].step]
        losses = [sample.loss for sample in last if sample.loss is not None]
        per_rank = [statistics.median(sample.samples_per_s for sample in good if sample.rank == rank) for rank in ranks]
        text = f"{self.steps} steps on {len(ranks)} ranks"
        if losses:
            text += f": loss {statistics.fmean(losses):.4g}"
        peak = max(sample.live_peak_bytes for sample in good)
        return "\n".join(
            [f"{text}, {format_rate(sum(per_rank))} samples/s, live peak {format_bytes(peak)}.", *self.notes]
        )

    __repr__ = __str__


def _percent(before: float | None, after: float | None) -> str:
    if not before or after is None:
        return ""
    return f" ({(after / before - 1) * 100:+.0f} %)".replace("-", "−")


def format_rate(value: float | None) -> str:
    """A throughput for people; ``n/a`` for what is not known."""
    return "n/a" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"
