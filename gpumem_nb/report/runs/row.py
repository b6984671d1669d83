"""One row of the record: a configuration, what it measured and its curve, as a plain value that changes no more."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ...shared.categories import CATEGORIES
from ...shared.knobs import KNOBS
from ...shared.settings import Settings
from ...shared.step_times import PARTS
from ...shared.units import format_bytes
from ..speed import FEWEST_STEPS, Speed

MOST_POINTS = 128
_MOST_KEPT = 4 * MOST_POINTS  # before they are thinned
_COLUMNS = ("steps", "samples", "losses", "rates", "live_peaks")


class Curve:
    """Points over the steps since the flip; each stands for the steps since the point before it.

    Up to ``MOST_POINTS`` steps have one each. Of more those share one that lie within some per cent of the samples seen
    by then, so early steps stay told apart however long training goes on.

    Attributes:
        steps, samples: done and seen by all ranks together when the point ends, since the flip.
        losses: the mean, over samples and ranks; not a number where it is not known.
        rates: samples/s of all ranks together, the mean over steps.
        live_peaks: the highest live bytes of any rank.
    """

    __slots__ = (*_COLUMNS, "_share")

    def __init__(self) -> None:
        self.steps, self.samples, self.losses, self.rates, self.live_peaks = (array("d") for _ in _COLUMNS)
        self._share = 1 / MOST_POINTS  # of the samples seen by then, within which points were joined

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, samples: int, loss: float | None, rate: float, live_peak_bytes: int) -> None:
        """One more step of so many samples."""
        steps, seen = (self.steps[-1], self.samples[-1]) if self.steps else (0, 0)
        self._append(steps + 1, seen + samples, math.nan if loss is None else loss, rate, live_peak_bytes)
        if len(self) >= _MOST_KEPT:  # not with every step: it takes longer than a point
            self.thin()

    def thin(self) -> None:
        """Keep ``MOST_POINTS`` at most."""
        if len(self) > MOST_POINTS:
            self._join()
        while len(self) > MOST_POINTS:
            self._share *= 1.25
            self._join()

    def copy(self) -> Curve:
        """Return one that changes no more, of ``MOST_POINTS`` at most."""
        other = Curve()
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name)[:])
        other._share = self._share
        other.thin()
        return other

    def mean_loss(self, begin: float, end: float) -> float | None:
        """Return the mean over the samples from ``begin`` to ``end``, counted since the flip; ``None`` if not known."""
        within = [min(seen, end) - max(before, begin) for before, seen in pairwise([0.0, *self.samples])]
        total = sum(samples * loss for samples, loss in zip(within, self.losses, strict=True) if samples > 0)
        mean = total / (end - begin) if len(self) and self.samples[-1] >= end > begin else math.nan
        return None if math.isnan(mean) else mean

    def as_dict(self) -> dict[str, list[float]]:
        """For json, in nine digits, but for steps and samples: those of two points are never the same."""
        exact = {name: list(getattr(self, name)) for name in _COLUMNS[:2]}
        return exact | {name: [float(f"{value:.9g}") for value in getattr(self, name)] for name in _COLUMNS[2:]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Sequence[Any]]) -> Curve:
        """Read what :meth:`as_dict` gave; raise ``ValueError``, ``TypeError`` or ``LookupError`` for anything else."""
        curve, last = cls(), (0.0, 0.0)
        for values in zip(*(saved[name] for name in _COLUMNS), strict=True):
            steps, samples, loss, rate, live_peak = map(float, values)
            known = all(map(math.isfinite, (steps, samples, rate, live_peak)))
            if not known or len(curve) == _MOST_KEPT or steps <= last[0] or samples <= last[1]:
                raise ValueError(values)  # one such point and nothing that is computed of the rows would come out
            curve._append(steps, samples, loss, rate, live_peak)
            last = steps, samples
        return curve

    def _append(self, *values: float) -> None:
        for name, value in zip(_COLUMNS, values, strict=True):
            getattr(self, name).append(value)

    def _join(self) -> None:
        """Join points that lie together within a share of the samples seen by then."""
        joined, first = Curve(), 0
        steps, samples = ([end - begin for begin, end in pairwise([0.0, *ends])] for ends in (self.steps, self.samples))
        for last in range(len(self)):
            began = self.samples[first - 1] if first else 0.0
            if last + 1 == len(self) or self.samples[last + 1] - began > self._share * self.samples[last + 1]:
                part = slice(first, last + 1)
                loss, rate = _mean(self.losses[part], samples[part]), _mean(self.rates[part], steps[part])
                joined._append(self.steps[last], self.samples[last], loss, rate, max(self.live_peaks[part]))
                first = last + 1
        for name in _COLUMNS:
            setattr(self, name, getattr(joined, name))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:  # to the last bit
        return values[0]
    return math.fsum(map(float.__mul__, values, weights)) / math.fsum(weights)


@dataclass(frozen=True, slots=True)
class Foretold:
    """The prediction for a configuration before it was tried: bytes of the worst rank, samples/s of all ranks.

    ``came_bytes`` is the live peak that is held against it: of the steps before a cell may have changed the model.
    ``lower_bound``: a step ran out of memory on trial, so that the bytes are the least that is needed.
    """

    live_peak_bytes: int
    reserved_peak_bytes: int
    samples_per_s: float | None
    verdict: str
    came_bytes: int | None = None
    lower_bound: bool = False

    @property
    def error(self) -> float | None:
        """Return how far above the measured live peak the prediction was, as a share; ``None`` where no step was done.

        Nor is it known of a lower bound.
        """
        return self.live_peak_bytes / self.came_bytes - 1 if self.came_bytes and not self.lower_bound else None

    @property
    def live_peak(self) -> str:
        """The live peak in words, a lower bound as such."""
        return f"{'more than ' * self.lower_bound}{format_bytes(self.live_peak_bytes)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        key: its name in every session that ever loads it.
        number: its name in this session, from 1.
        workload, settings, ranks, device: what was trained, how, on how many ranks, and what rank 0's device is called.
        device_memory_bytes, driver: that rank's limit, and the version of NVIDIA's driver; empty for a virtual GPU.
        options, parameters: of a ready-made workload by name, and how many parameters there were when it was loaded.
        batch_norm: whether the model took statistics from micro-batches, as far as that is known.
        model_version: grows from row to row of the same ranks with each cell and load that may have changed the model.
        came_from: the file that it was loaded from, or that it is of before a restart; empty for the ranks that run.
        began_s: when, in seconds since 1970.
        steps: done under it.
        outcome: ``ok``, ``oom`` or ``error``.
        loss: of the last step, mean of the ranks.
        peak_bytes, reserved_peak_bytes: highest live and reserved bytes of any rank in any of its steps.
        headroom: of the limit what the reserved peak leaves free, between 0 and 1, on the rank with least.
        speed: samples/s of all ranks together over the steps judged.
        curve: loss, samples/s and live peak over steps.
        categories: live bytes by category at the highest peak that was recorded, of the rank that had it.
        parts: the mean seconds of each part of a step, over the steps judged and all ranks.
        foretold: what was predicted of it before, if anything was.
        present: whether training is under these settings now.
        note: the user's own words.
    """

    key: str
    number: int
    workload: str
    settings: Settings
    ranks: int
    device: str
    began_s: float
    steps: int
    outcome: str
    came_from: str = ""
    device_memory_bytes: int | None = None
    driver: str = ""
    options: tuple[tuple[str, float], ...] = ()
    parameters: int | None = None
    batch_norm: bool = False
    model_version: int = 0
    loss: float | None = None
    peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    headroom: float | None = None
    speed: Speed | None = None
    curve: Curve = field(default_factory=Curve, compare=False, repr=False)
    categories: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    foretold: Foretold | None = None
    present: bool = False
    note: str = ""

    @property
    def model(self) -> tuple[object, ...]:
        """Return what identifies the model: throughput, memory and loss are compared only within it."""
        return self.workload, self.options, self.parameters

    def of_same_ranks(self, other: Row) -> bool:
        """Return whether both were measured between one start of the ranks and the next."""
        return self.key.partition("-")[0] == other.key.partition("-")[0]

    @property
    def on(self) -> str:
        """The device in words, with its memory and driver."""
        memory = None if self.device_memory_bytes is None else format_bytes(self.device_memory_bytes)
        more = [memory if memory and memory not in self.device else "", f"driver {self.driver}" if self.driver else ""]
        return ", ".join(filter(None, (self.device, *more)))

    @property
    def samples_per_s(self) -> float | None:
        """The median over the steps judged, all ranks together."""
        return self.speed.median if self.speed else None

    @property
    def global_batch(self) -> int:
        """Samples of one step of all ranks."""
        return self.settings.samples_per_rank * self.ranks

    @property
    def samples(self) -> int:
        """Seen by all ranks together since the flip, as far as losses are known of them."""
        return int(self.curve.samples[-1]) if len(self.curve) else 0

    @property
    def failed(self) -> bool:
        """Return whether its settings failed, even if steps succeeded before."""
        return self.outcome != "ok"

    @property
    def comparable(self) -> bool:
        """Return whether enough steps were done for a loss and a throughput that say something."""
        return self.steps >= FEWEST_STEPS

    @property
    def folds(self) -> bool:
        """Return whether a table may leave it out: one step says little, unless it failed or is the latest."""
        return self.steps <= 1 and not self.failed and not self.present and not self.note

    def saved(self) -> dict[str, Any]:
        """For json; without what depends on where it is shown."""
        saved = {name: getattr(self, name) for name in _READ}
        saved |= {name: dict(saved[name]) for name in ("options", "categories", "parts")}
        saved |= {name: _fields(saved[name]) for name in ("speed", "foretold")}
        return saved | {"settings": self.settings.saved(), "curve": self.curve.as_dict()}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Row:
        """Return what :meth:`saved` gave, perhaps of another version: knobs that are not known here are left out.

        Raises ``ValueError``, ``TypeError``, ``LookupError`` or ``AttributeError`` for what is none.
        """
        return cls(number=0, **{name: read({**_SINCE, **saved}[name]) for name, read in _READ.items()})


def _fields(value: Any) -> list[Any] | None:
    return None if value is None else [getattr(value, name) for name in value.__slots__]


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the same for a value that may not be known."""
    return lambda value: None if value is None else read(value)


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not math.isfinite(value) or int(value) != value or value < least:
        raise ValueError(value)
    return int(value)


def _settings(saved: Mapping[str, Any]) -> Settings:
    return Settings(**{name: KNOBS[name].from_saved(value) for name, value in saved.items() if name in KNOBS})


def _speed(median: Any, low: Any, high: Any, steps: Any, starved: Any = 0.0) -> Speed:
    return Speed(_finite(median), _finite(low), _finite(high), _whole(steps, 1), _finite(starved))


def _foretold(live: Any, reserved: Any, rate: Any, verdict: Any, came: Any, lower_bound: Any = False) -> Foretold:
    known = _whole(live), _whole(reserved), _maybe(_finite)(rate), str(verdict), _maybe(_whole)(came)
    return Foretold(*known, lower_bound is True)


def _known(names: Sequence[str], read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of values by name those whose names are known here, in this order."""
    return lambda saved: {name: read(saved[name]) for name in names if name in saved}


# What is saved of a row, and how it is read.
_READ: dict[str, Callable[[Any], Any]] = {
    "key": str,
    "workload": str,
    "options": lambda saved: tuple((str(name), _finite(value)) for name, value in saved.items()),
    "parameters": _maybe(_whole),
    "batch_norm": lambda value: value is True,
    "model_version": _whole,
    "settings": _settings,
    "ranks": lambda value: _whole(value, 1),
    "device": str,
    "device_memory_bytes": _maybe(_whole),
    "driver": str,
    "began_s": _finite,
    "steps": _whole,
    "outcome": str,
    "loss": _maybe(float),
    "peak_bytes": _maybe(_whole),
    "reserved_peak_bytes": _maybe(_whole),
    "headroom": _maybe(_finite),
    "speed": _maybe(lambda saved: _speed(*saved)),
    "curve": Curve.from_dict,
    "categories": _known(CATEGORIES, _whole),
    "parts": _known(PARTS, _finite),
    "foretold": _maybe(lambda saved: _foretold(*saved)),
    "note": str,
}
# What earlier versions did not save.
_SINCE: dict[str, Any] = {
    "options": {},
    "parameters": None,
    "batch_norm": False,
    "model_version": 0,
    "device_memory_bytes": None,
    "driver": "",
}
