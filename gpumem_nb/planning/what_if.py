"""Every single flip from the present settings, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..report.differences import arrows
from ..report.tables import Report, Table
from ..shared.errors import InvalidInput
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from ..shared.workload import WorkloadInfo
from .prediction import Prediction

UNMOVED = 0.005  # of the live peak: what changes it by less says nothing about memory


def single_flips(settings: Settings, workload: WorkloadInfo) -> Iterator[tuple[str, Settings]]:
    """Yield each knob that moves memory, with the settings for each other value that the workload allows.

    Of numbers, half and twice what they are.
    """
    for name, knob in KNOBS.items():
        if not knob.moves or (name == "batch_size" and workload.data.batched):
            continue
        now = getattr(settings, name)
        values: Sequence[Any] = knob.choices
        if not values and not isinstance(now, bool):
            if isinstance(now, int):
                values = [now // 2, now * 2]
            elif isinstance(now, float):
                values = [now / 2, now * 2]
        for value in values:
            if value == now or (knob.refuses and knob.refuses(value, workload)):
                continue
            with suppress(InvalidInput):  # half or twice of it may not be allowed
                yield name, settings.replace(**{name: value})


@dataclass(frozen=True, repr=False)
class WhatIf(Report):
    """The memory each flip would need, beside the present need.

    Attributes:
        now: the present settings.
        flips: the others.
    """

    now: Prediction
    flips: tuple[Prediction, ...]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each flip, the present settings first."""
        return [
            {"flip": self._flip(one), **one.columns, "mathematics": one.settings.mathematics(self.now.settings)}
            for one in (self.now, *self.flips)
        ]

    @property
    def shown(self) -> list[Table]:
        """One table."""
        rows = tuple(
            (
                self._flip(one),
                one.verdict,
                one.in_words(one.live_peak_bytes),
                self._change(one),
                one.in_words(one.reserved_peak_bytes),
                format_rate(one.samples_per_s),
                one.settings.mathematics(self.now.settings),
            )
            for one in (self.now, *self.flips)
        )
        limit = format_bytes(self.now.limit_bytes) if self.now.limit_bytes else "n/a"
        headings = ("flip", "verdict", "live peak", "change", "reserved", "samples/s", "mathematics")
        return [Table(f"What if (limit {limit})", headings, rows, frozenset({"flip", "verdict", "mathematics"}))]

    def _flip(self, one: Prediction) -> str:
        return arrows(self.now.settings, one.settings) or "as it is"

    def _change(self, one: Prediction) -> str:
        if one.lower_bound or self.now.lower_bound:
            return ""
        share = one.live_peak_bytes / max(1, self.now.live_peak_bytes) - 1
        return "" if abs(share) < UNMOVED else f"{100 * share:+.0f} %".replace("-", "−")
