"""The memory ladder: one change after the other, each on top of those before it, down to the least memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.differences import changes, typed
from ..report.instead import LARGER
from ..report.tables import Report, Table
from ..shared.errors import InvalidInput
from ..shared.knobs import CHANGES
from ..shared.settings import Settings
from ..shared.units import as_whole, format_bytes, format_rate
from ..shared.workload import Splits
from .fit import fits
from .prediction import Prediction

LEAST_FREED = 0.02  # of the live peak above: a change that frees less is no rung
_ABOUT = 0.9
_LEAST_COST = 0.02  # of a sample's time: what is timed on trial differs by as much, so less counts as that


def next_rung(above: Prediction, found: Sequence[Prediction]) -> Prediction | None:
    """Return which of these settings frees most memory for the time that it costs; ``None`` where none is worth a rung.

    Of values of one knob that free about as much the mildest takes part, which is the first of them. Where it is not
    known how much the settings above need, because not even a small step fits, the fastest is taken.
    """
    known = [one for one in found if not one.lower_bound]
    if above.lower_bound:
        return max(known, key=lambda one: (fits(one), one.samples_per_s or 0.0), default=None)
    worth = [one for one in known if _freed(above, one) >= LEAST_FREED * above.live_peak_bytes]
    of_knobs: dict[frozenset[str], list[Prediction]] = defaultdict(list)
    for one in worth:
        of_knobs[frozenset(one.settings.changed_from(above.settings))].append(one)
    mildest = [_mildest(above, alike) for alike in of_knobs.values()]
    return max(mildest, key=lambda one: _freed(above, one) / _cost(above, one), default=None)


def _mildest(above: Prediction, alike: Sequence[Prediction]) -> Prediction:
    most = max(_freed(above, one) for one in alike)
    return next(one for one in alike if _freed(above, one) >= _ABOUT * most)


def _freed(above: Prediction, one: Prediction) -> int:
    return above.live_peak_bytes - one.live_peak_bytes


def _cost(above: Prediction, one: Prediction) -> float:
    """Return the share by which a sample takes longer; the least one for settings that were not timed."""
    if not above.samples_per_s or not one.samples_per_s:
        return _LEAST_COST
    return max(_LEAST_COST, above.samples_per_s / one.samples_per_s - 1)


@dataclass(frozen=True, repr=False)
class Ladder(Report):
    """The rungs from the present settings down to the least memory in which this model trains.

    Attributes:
        now: what the present settings need.
        rungs: what is needed with all changes down to each; the first one has one change.
        splits: what is known of training a micro-batch in parts.
        blocks: of the model.
        ended: why it ended before the last rung; empty if it did not.
    """

    now: Prediction
    rungs: tuple[Prediction, ...]
    splits: Splits
    blocks: int
    ended: str
    _set: Callable[[dict[str, Any]], object] = field(repr=False, compare=False)

    def apply(self, rung: int) -> None:
        """Train with all changes down to a rung from the next chunk on, whichever rung was taken before.

        Args:
            rung: its number, from 1 on; 0 are the settings that the ladder began with.

        Raises:
            InvalidInput: there is no such rung, or what is trained, or another knob that moves memory, has changed.
        """
        if (place := as_whole(rung, 0, len(self.rungs))) is None:
            allowed = f"a number from 1 to {len(self.rungs)}" if self.rungs else "0, the present settings, alone"
            raise InvalidInput(f"rung={rung!r} cannot be taken: write {allowed}.")
        self._set(self._knobs((self.now, *self.rungs)[place].settings))

    def taken(self, settings: Settings) -> int | None:
        """Return which rung these settings are, whatever else they set; ``None`` where they are none."""
        knobs = self._knobs(settings)
        all_of_them = enumerate((self.now, *self.rungs))
        return next((number for number, one in all_of_them if self._knobs(one.settings) == knobs), None)

    def _knobs(self, settings: Settings) -> dict[str, Any]:
        """Return what these settings have of the knobs that some rung moves."""
        moved = {name: None for one in self.rungs for name in one.settings.changed_from(self.now.settings)}
        return {name: getattr(settings, name) for name in moved}

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each rung, the present settings first; bytes of the rank with least room."""
        return [
            {
                "rung": number,
                "adds": adds,
                **one.columns,
                "mathematics": changes(self.now.settings, one.settings, self.splits),
            }
            for number, (adds, one) in enumerate(self._steps)
        ]

    @property
    def shown(self) -> list[Table | str]:
        """The table, and what to type."""
        rows = tuple(
            (
                str(number),
                adds,
                one.in_words(one.live_peak_bytes),
                self._change(one),
                one.in_words(one.reserved_peak_bytes),
                one.verdict,
                format_rate(one.samples_per_s),
                changes(self.now.settings, one.settings, self.splits),
            )
            for number, (adds, one) in enumerate(self._steps)
        )
        limit = f" (limit {format_bytes(self.now.limit_bytes)})" if self.now.limit_bytes else ""
        headings = ("rung", "adds", "live peak", "change", "reserved", "verdict", "samples/s", "mathematics")
        words = frozenset({"adds", "verdict", "mathematics"})
        return [Table(f"Memory ladder{limit}", headings, rows, words), *self.sentences]

    @property
    def sentences(self) -> list[str]:
        """Return how to read the table, and how to take a rung."""
        said = [self.ended] if self.ended else []
        if not self.rungs and self.now.lower_bound and not said:
            none = "Not even a small step fits, under the present settings or any that were tried in their place."
            return [f"{none} {LARGER}"]
        if not self.rungs:  # one that ended early has not seen all changes
            return said or [f"No change of a knob frees {100 * LEAST_FREED:.0f} % of the live peak."]
        said.append(
            "Each rung comes on top of those above it, and frees most memory for the time that it costs. Change and "
            "mathematics are those of all rungs down to it, beside the present settings."
        )
        if not any(one.samples_per_s for one in (self.now, *self.rungs)):
            said.append("No rung was timed, as steps take too long: the order counts each as costing no time.")
        first = next((number for number, one in enumerate(self.rungs, 1) if fits(one)), None)
        if first and not fits(self.now):
            said.append(f"The first that fits is rung {first}: {self._command(first)}")
        if first != len(self.rungs) or fits(self.now):
            said.append(f"Least memory, rung {len(self.rungs)}: {self._command(len(self.rungs))}")
        return [*said, *self._deeper]

    @property
    def _deeper(self) -> Iterator[str]:
        """How much larger a model of this kind would fit, where that is known."""
        least = self.rungs[-1]
        if more := least.more_blocks(self.blocks):
            now = 0 if self.now.lower_bound else self.now.more_blocks(self.blocks)
            as_it_is = "" if now is None else f", with {now or 'none'} as it is"
            yield (
                f"On rung {len(self.rungs)} a model with about {more} blocks more than its {self.blocks} "
                f"would fit{as_it_is}: each takes up to {format_bytes(least.block_bytes)} of the peak there."
            )

    def _command(self, rung: int) -> str:
        return f"%hvd_set {typed(self.now.settings, self.rungs[rung - 1].settings)}"

    @property
    def _steps(self) -> list[tuple[str, Prediction]]:
        """What each rung adds to the one above it, in words, and what it comes to."""
        all_of_them = (self.now, *self.rungs)
        pairs = zip(all_of_them, self.rungs, strict=False)
        return [
            ("as it is", self.now),
            *((typed(above.settings, one.settings), one) for above, one in pairs),
        ]

    def _change(self, one: Prediction) -> str:
        if one is self.now or self.now.lower_bound:
            return ""
        share = one.live_peak_bytes / max(1, self.now.live_peak_bytes) - 1
        return f"{100 * share:+.0f} %".replace("-", "−")


def may_be_rung(present: Settings, one: Settings, splits: Splits, same_mathematics: bool) -> bool:
    """Return whether settings may be a rung: of no fewer samples a step, and where asked for the same mathematics."""
    as_many = one.samples_per_rank >= present.samples_per_rank
    return as_many and (not same_mathematics or changes(present, one, splits) != CHANGES)
