"""A report on whether all ranks hold the same weights, gradients and samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..shared.questions import SyncLook
from ..shared.units import name_ranks
from .tables import Report

_MOST_NAMED = 5  # samples


@dataclass(frozen=True, repr=False)
class SyncReport(Report):
    """Weights, gradients and samples of all ranks, compared.

    Attributes:
        looks: what each rank saw, in rank order.
    """

    looks: Sequence[SyncLook]

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Return what is wrong, in sentences."""
        return [sentence for sentence, is_fault in (self.weights, self.gradients, self.samples) if is_fault]

    @property
    def shown(self) -> list[str]:
        """A sentence about each of the three."""
        return [f"{'WRONG: ' if one['wrong'] else 'ok: '}{one['sentence']}" for one in self.records]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each of the three of which something is known."""
        found = (self.weights, self.gradients, self.samples)
        return [{"sentence": sentence, "wrong": is_fault} for sentence, is_fault in found if sentence]

    @property
    def weights(self) -> tuple[str, bool]:
        """Return a sentence about weights and buffers, and whether they differ."""
        weights = [look.weights for look in self.looks]
        if difference := _difference(weights, "weights"):
            return f"{difference}. Broadcast them from rank 0: %hvd_sync, or hvd.broadcast_parameters in a loop.", True
        buffers = _difference([look.buffers for look in self.looks], "buffers")
        own = f" {buffers.capitalize()}: right for statistics that each rank gathers for itself." if buffers else ""
        return f"weights: {len(weights[0])} are the same on all ranks, bit for bit.{own}", False

    @property
    def gradients(self) -> tuple[str, bool]:
        """Return a sentence about gradients, and whether they differ."""
        gradients = [look.gradients for look in self.looks]
        if not any(gradients):
            return "gradients: there are none now. Check again after a backward, before they are cleared.", False
        if difference := _difference(gradients, "gradients"):
            return f"{difference}. They are not averaged over ranks, or changed afterwards on one of them.", True
        return f"gradients: {len(gradients[0])} are the same on all ranks, bit for bit.", False

    @property
    def samples(self) -> tuple[str, bool]:
        """Return a sentence about the samples that ranks see (empty if not known), and whether it is a problem."""
        rows = [look.samples for look in self.looks if look.samples]
        if len(rows) < len(self.looks):
            return "", False
        what, numbered = rows[0].what, all(row.numbered for row in rows)
        if not all(row.numbers for row in rows):
            return f"data: not compared, because on some rank no whole step is left of an epoch's {what}.", False
        if len({row.dataset for row in rows}) > 1:
            return "data: each rank has a dataset of its own, so numbers of samples say nothing.", False
        seen = [set(row.numbers) for row in rows]
        counts = Counter(sample for of_rank in seen for sample in of_rank)
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        if not twice:
            return f"data: no two ranks see the same of {sum(map(len, seen)):,} {what}.", False
        where = name_ranks([rank for rank, of_rank in enumerate(seen) if twice[0] in of_rank])
        said = f"data: {len(twice):,} of {len(counts):,} {what} are seen by several ranks"
        if numbered:
            numbers = ", ".join(map(str, twice[:_MOST_NAMED])) + (", …" if len(twice) > _MOST_NAMED else "")
            said += f": number {numbers} (the first by {where})"
        else:
            said += f", the first by {where}"
        if any(row.repeats for row in rows):
            return f"{said}; the sampler draws some more than once.", False
        few = numbered and len(twice) < len(self.looks)
        if few and len({len(row.numbers) for row in rows}) == 1:
            return f"{said}. So few may come from filling up the last step, as DistributedSampler does.", False
        return f"{said}. Share samples out: DistributedSampler(dataset, hvd.size(), hvd.rank()).", True


def _difference(found: Sequence[Mapping[str, int]], what: str) -> str:
    """Return the first name under which ranks hold different things; empty if there is none."""
    for rank, names in enumerate(found):
        if unlike := sorted(names.keys() ^ found[0].keys()):
            return f"{what}: rank {rank} and rank 0 have not the same ones, {unlike[0]} for example"
    differ = [name for name in found[0] if len({names[name] for names in found}) > 1]
    if not differ:
        return ""
    others = [rank for rank, names in enumerate(found) if names[differ[0]] != found[0][differ[0]]]
    more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    return f"{what}: {differ[0]} is not the same on {name_ranks(others)} as on rank 0{more}"
