"""How much the caching allocator would reserve under other settings, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..report.tables import Report, Table
from ..shared.allocator_settings import AllocatorSettings
from ..shared.units import format_bytes
from .prediction import DOES_NOT_FIT, FITS, Prediction

_BYTES = ("live_peak_bytes", "reserved_peak_bytes", "low_bytes", "high_bytes", "limit_bytes")
UNMOVED = 0.0005  # of reserved bytes: what would be shown as 0.0 %
MUCH = 0.02  # of reserved bytes: what a restart may be worth
_MODELLED = (
    "Memory is {}, followed three times by a model of torch's caching allocator, beginning with nothing cached. What "
    "earlier settings have left in pieces counts as it is, but not for expandable segments."
)
_VARIES = "Samples differ in size, which leaves more pieces than one step does: expandable_segments may save more."
_COLLECTS = "garbage_collection_threshold counts only for ranks with a memory limit: %hvd_start --memory-limit SIZE."


@dataclass(frozen=True, repr=False)
class AllocatorWhatIf(Report):
    """The same step under other settings of the caching allocator, on the rank that has least room under each.

    Attributes:
        now: how it is set at present, and what the step needs.
        others: other settings with the same.
        varies: whether the samples differ in size.
        virtual: whether the ranks have virtual GPUs.
        variable: by which the allocator is set.
        notes: sentences of the ranks on what is not modelled.
    """

    now: tuple[AllocatorSettings, Prediction]
    others: tuple[tuple[AllocatorSettings, Prediction], ...]
    varies: bool
    virtual: bool
    variable: str
    notes: tuple[str, ...] = ()

    def frame(self) -> Any:
        """Return the report as a pandas DataFrame; bytes are nullable integers."""
        return super().frame().astype({name: "Int64" for name in _BYTES})

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each setting, the present one first; bytes of the worst rank."""
        return [
            {"allocator": str(settings), **{name: one.columns[name] for name in ("verdict", *_BYTES)}}
            for settings, one in (self.now, *self.others)
        ]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return how the figures were found, and how to have one of the settings."""
        now = self.now[1]
        best, one = min(self.others, key=lambda entry: entry[1].reserved_peak_bytes, default=self.now)
        if not self.others:
            advice = "That is the present setting."
        elif one.reserved_peak_bytes > (1 - MUCH) * now.reserved_peak_bytes and not _helps(now, one):
            advice = "None of them reserves much less."
        else:
            name = self.variable
            setting = f"%env {name}={best}" if str(best) else f"os.environ.pop('{name}')"
            advice = f"To have {_named(best)}: {setting} and %hvd_restart, which brings the training back."
        collects = any(settings.garbage_collection_threshold for settings, _ in self.others)
        return (
            _MODELLED.format(now.basis),
            *([_VARIES] if self.varies else []),
            *([_COLLECTS] if collects and not self.virtual else []),
            *self.notes,
            advice,
        )

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self.sentences]

    @property
    def _table(self) -> Table:
        now = self.now[1]
        rows = tuple(
            (
                _named(settings) + (", as it is" if one is now else ""),
                one.verdict,
                format_bytes(one.reserved_peak_bytes),
                _change(one.reserved_peak_bytes, now.reserved_peak_bytes),
                format_bytes(one.reserved_peak_bytes - one.live_peak_bytes),
            )
            for settings, one in (self.now, *self.others)
        )
        limit = format_bytes(now.limit_bytes) if now.limit_bytes else "n/a"
        title = f"The caching allocator: live peak {format_bytes(now.live_peak_bytes)}, limit {limit}"
        headings = ("setting", "verdict", "reserved peak", "change", "reserved − live")
        return Table(title, headings, rows, frozenset({"setting", "verdict"}))


def _helps(now: Prediction, one: Prediction) -> bool:
    """Return whether settings that may not fit now would fit, or might."""
    return now.verdict not in (FITS, one.verdict) and one.verdict != DOES_NOT_FIT


def _named(settings: AllocatorSettings) -> str:
    return str(settings) or "torch's default"


def _change(then: int, now: int) -> str:
    share = then / max(1, now) - 1
    return "" if abs(share) < UNMOVED else f"{100 * share:+.1f} %".replace("-", "−")
