"""One row of the record: a configuration and what it measured, as a plain value that does not change any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...shared.categories import CATEGORIES
from ...shared.knobs import KNOBS
from ...shared.settings import Settings
from ...shared.step_times import PARTS
from ...shared.units import format_bytes
from ..speed import FEWEST_STEPS, Speed
from .curve import Curve


@dataclass(frozen=True, slots=True)
class Foretold:
    """What was predicted of a configuration before it was tried: bytes of the worst rank, samples/s of all ranks.

    ``came_bytes`` is the live peak that is held against it: of the steps before a cell may have changed the model.
    """

    live_peak_bytes: int
    reserved_peak_bytes: int
    samples_per_s: float | None
    verdict: str
    came_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """By which share of what came the live peak was predicted too high; ``None`` where no step was done."""
        return self.live_peak_bytes / self.came_bytes - 1 if self.came_bytes else None


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
        came_from: the file that it was loaded from, or that it is of before a restart; empty for the ranks that run.
        began_s: when, in seconds since 1970.
        steps: done under it.
        outcome: ``ok``, ``oom`` or ``error``.
        loss: of the last step, mean of the ranks.
        peak_bytes, reserved_peak_bytes: highest live and reserved bytes of any rank over the steps judged.
        headroom: of the limit what the reserved peak leaves free, between 0 and 1, on the rank with least.
        speed: samples/s of all ranks together over the steps judged.
        curve: loss, samples/s and live peak over steps.
        categories: live bytes by category at the peak of the latest step that was recorded, worst rank.
        parts: the mean seconds of each part of a step, over the steps judged and all ranks.
        foretold: what was predicted of it before, if anything was.
        present: whether training is under these settings now.
        note: somebody's own words.
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
        """What rows of the same model have in common: throughput, memory and loss are held against those only."""
        return self.workload, self.options, self.parameters

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
        """Whether it could not be kept, whatever it did before."""
        return self.outcome != "ok"

    @property
    def comparable(self) -> bool:
        """Whether enough steps were done for a loss and a throughput that say something."""
        return self.steps >= FEWEST_STEPS

    @property
    def folds(self) -> bool:
        """Whether a table may leave it out: one step says little, unless it failed or is the latest."""
        return self.steps <= 1 and not self.failed and not self.present and not self.note

    def saved(self) -> dict[str, Any]:
        """For json; without what depends on where it is shown."""
        return {
            "key": self.key,
            "workload": self.workload,
            "options": dict(self.options),
            "parameters": self.parameters,
            "batch_norm": self.batch_norm,
            "settings": self.settings.saved(),
            "ranks": self.ranks,
            "device": self.device,
            "device_memory_bytes": self.device_memory_bytes,
            "driver": self.driver,
            "began_s": self.began_s,
            "steps": self.steps,
            "outcome": self.outcome,
            "loss": self.loss,
            "peak_bytes": self.peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "headroom": self.headroom,
            "speed": _fields(self.speed),
            "curve": self.curve.as_dict(),
            "categories": dict(self.categories),
            "parts": dict(self.parts),
            "foretold": _fields(self.foretold),
            "note": self.note,
        }

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Row:
        """What :meth:`saved` gave, perhaps of another version: knobs that are not known here are left out.

        Raises ``ValueError``, ``TypeError``, ``LookupError`` or ``AttributeError`` for what is none.
        """
        known = {name: value for name, value in saved["settings"].items() if name in KNOBS}
        speed, foretold = saved["speed"], saved["foretold"]
        return cls(
            key=str(saved["key"]),
            number=0,
            workload=str(saved["workload"]),
            options=tuple((str(name), _finite(value)) for name, value in saved.get("options", {}).items()),
            parameters=_maybe(saved.get("parameters"), _whole),
            batch_norm=saved.get("batch_norm") is True,
            settings=Settings(**{name: KNOBS[name].from_saved(value) for name, value in known.items()}),
            ranks=_whole(saved["ranks"], 1),
            device=str(saved["device"]),
            device_memory_bytes=_maybe(saved.get("device_memory_bytes"), _whole),
            driver=str(saved.get("driver", "")),
            began_s=_finite(saved["began_s"]),
            steps=_whole(saved["steps"]),
            outcome=str(saved["outcome"]),
            loss=_maybe(saved["loss"], float),
            peak_bytes=_maybe(saved["peak_bytes"], _whole),
            reserved_peak_bytes=_maybe(saved["reserved_peak_bytes"], _whole),
            headroom=_maybe(saved["headroom"], _finite),
            speed=None if speed is None else _speed(*speed),
            curve=Curve.from_dict(saved["curve"]),
            categories={name: _whole(saved["categories"][name]) for name in CATEGORIES if name in saved["categories"]},
            parts={name: _finite(saved["parts"][name]) for name in PARTS if name in saved["parts"]},
            foretold=None if foretold is None else _foretold(*foretold),
            note=str(saved["note"]),
        )


def _fields(value: Any) -> list[Any] | None:
    return None if value is None else [getattr(value, name) for name in value.__slots__]


def _speed(median: Any, low: Any, high: Any, steps: Any, starved: Any = 0.0) -> Speed:
    return Speed(_finite(median), _finite(low), _finite(high), _whole(steps, 1), _finite(starved))


def _foretold(live: Any, reserved: Any, rate: Any, verdict: Any, came: Any) -> Foretold:
    return Foretold(_whole(live), _whole(reserved), _maybe(rate, _finite), str(verdict), _maybe(came, _whole))


def _maybe(value: Any, read: Any) -> Any:
    return None if value is None else read(value)


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not math.isfinite(value) or int(value) != value or value < least:
        raise ValueError(value)
    return int(value)
