"""Predictions of the same steps on several GPUs, side by side, with what would fit where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.differences import typed
from ..report.instead import Instead
from ..report.tables import Report, Table
from ..shared.categories import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ..shared.errors import InvalidInput
from ..shared.forecast import SEARCH_S
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes
from . import gpu_table
from .instead import as_fit, instead_of
from .prediction import FITS, NO_LIMIT, Prediction

_FIXED, _UNKNOWN = "fixed by the data", "not known"
_NOTHING = "nothing tried"
_HELD = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)


@dataclass(frozen=True, repr=False)
class ColdPredictions(Report):
    """Predictions of the same steps on several GPUs.

    Attributes:
        by_gpu: a prediction for each GPU, in the order in which they were named.
        largest: the largest ``batch_size`` that surely fits each; 0 if none does, ``None`` if the data says it, or it
            is not known.
        unknown: why the largest ``batch_size`` is not known, as a sentence, for those GPUs of which it is not.
        seconds: what predicting took.
        notes: of each GPU what else there is to say, such as that it does not compute in bf16.
        tried: of each GPU that they do not surely fit, other settings of about the same global batch: those that fit,
            the one that changes least first; or the lightest that was tried, if none does. A GPU is left out where the
            search did not come to its end.
        ranks: how many train together.
        estimated: GPUs of which memory, or what CUDA takes of it, was not measured.
        memory: of each GPU in bytes, where it was given in place of the table's.
    """

    by_gpu: Mapping[str, Prediction]
    largest: Mapping[str, int | None]
    unknown: Mapping[str, str]
    seconds: float
    notes: Mapping[str, str] = field(default_factory=dict)
    tried: Mapping[str, tuple[Prediction, ...]] = field(default_factory=dict)
    ranks: int = 1
    estimated: tuple[str, ...] = ()
    memory: int | None = None

    def __getitem__(self, gpu: str) -> Prediction:
        return self.by_gpu[self._named(gpu)]

    def _named(self, gpu: str) -> str:
        if len(found := gpu_table.called(gpu, self.by_gpu)) != 1:
            raise InvalidInput(f"{gpu!r} was not asked for. There are {', '.join(self.by_gpu)}.")
        return found[0]

    @property
    def fitting(self) -> tuple[str, ...]:
        """The GPUs on which it fits."""
        return tuple(gpu for gpu, one in self.by_gpu.items() if one.verdict == FITS)

    def fits_with(self, gpu: str) -> tuple[Prediction, ...]:
        """Return what fits a GPU instead, the answer first, then what changes least; nothing where none is needed."""
        fastest, tried = self.instead(gpu).fastest, self.tried.get(self._named(gpu), ())
        fitting = [one for one in tried if one.verdict == FITS]
        return tuple(sorted(fitting, key=lambda one: fastest is None or one.settings != fastest.settings))

    def instead(self, gpu: str) -> Instead:
        """Return what to train with on a GPU that it does not surely fit."""
        now, tried = self[gpu], self.tried.get(self._named(gpu))
        fits, unfinished = list(map(as_fit, tried or ())), tried is None
        return instead_of(now.settings, self.ranks, fits, now, splits=now.splits, unfinished=unfinished)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each GPU; ``fits_with`` is what to change so that it fits."""
        return [
            {
                "gpu": gpu,
                **one.columns,
                "device_bytes": one.device_bytes,
                "largest_batch": self.largest[gpu],
                "fits_with": next((typed(one.settings, other.settings) for other in self.fits_with(gpu)), None),
            }
            for gpu, one in self.by_gpu.items()
        ]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self._sentences]

    @property
    def _sentences(self) -> list[str]:
        gpus: dict[str, list[str]] = {}
        for gpu, why in self.unknown.items():
            gpus.setdefault(why, []).append(self._in_words(gpu))
        said = [f"{self._in_words(gpu)}: {self._instead(gpu)}." for gpu in self.by_gpu if self._is_short(gpu)]
        said += [f"Largest batch of {', '.join(those)} not known: {why}" for why, those in gpus.items()]
        said += [f"{why}." for why in self.notes.values()]
        if self.estimated:
            error = max(gpu_table.find(gpu).beside(self.ranks)[1] for gpu in self.estimated)
            those = ", ".join(map(self._in_words, self.estimated))
            said.append(
                f"The memory of {those}, or what CUDA takes of it, was not measured: the upper end "
                f"of 95 % has up to {format_bytes(error)} more for that, much for a small model. Verdicts allow for it."
            )
        return said

    def _in_words(self, gpu: str) -> str:
        return gpu_table.in_words(gpu, self.memory)

    def _is_short(self, gpu: str) -> bool:
        return self.by_gpu[gpu].verdict not in (FITS, NO_LIMIT)

    def _instead(self, gpu: str) -> str:
        """Return what fits instead, with what it needs and does, as a clause."""
        if gpu not in self.tried:
            return f"what would fit was not found within {SEARCH_S} s and the memory of a dry run"
        now = self.by_gpu[gpu]
        found = self.instead(gpu)
        if found.offers:
            return found.reason(now.settings).rstrip(".")
        least = next(iter(self.tried[gpu]), None)
        if least is None:
            return "there is nothing to try: no other setting of the knobs needs less memory"
        held = [f"{what} {format_bytes(size)}" for what in _HELD if (size := least.categories.get(what))]
        of_which = f" ({', '.join(held)})" if held else ""
        return (
            f"nothing that was tried surely fits, the lightest being {typed(now.settings, least.settings)}, whose live "
            f"peak is {format_bytes(least.live_peak_bytes)}{of_which} of {format_bytes(least.limit_bytes)}"
        )

    def _fits_with_text(self, gpu: str) -> str:
        if not self._is_short(gpu):
            return ""
        if gpu not in self.tried:
            return _UNKNOWN
        fitting = self.fits_with(gpu)
        return typed(self.by_gpu[gpu].settings, fitting[0].settings) if fitting else _NOTHING

    def _largest_text(self, gpu: str) -> str:
        if gpu in self.unknown:
            return _UNKNOWN
        return _FIXED if self.largest[gpu] is None else str(self.largest[gpu] or "none")

    @property
    def _table(self) -> Table:
        rows = tuple(
            (
                self._in_words(gpu),
                one.verdict,
                self._largest_text(gpu),
                self._fits_with_text(gpu),
                format_bytes(one.reserved_peak_bytes),
                f"{format_bytes(one.low_bytes)} to {format_bytes(one.high_bytes)}",
                format_bytes(one.limit_bytes),
            )
            for gpu, one in self.by_gpu.items()
        )
        settings = next(iter(self.by_gpu.values())).settings
        plain = Settings(batch_size=settings.batch_size)
        changed = {
            name for name in settings.changed_from(plain) if KNOBS[name].moves
        }  # memory: others say nothing here
        others = typed(plain, plain.replace(**{name: getattr(settings, name) for name in changed}))
        asked = " ".join(filter(None, [f"batch_size={settings.batch_size}", others]))
        words = frozenset({"GPU", "verdict", _INSTEAD})
        headings = ("GPU", "verdict", "largest batch", _INSTEAD, "reserved", "95 %", "may be reserved")
        return Table(f"Which GPU fits {asked}?", headings, rows, words)


_INSTEAD = "fits with"
