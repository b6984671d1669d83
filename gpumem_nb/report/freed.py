"""Memory that was given back to the devices, what holds the rest, and what ranks keep from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..shared.messages import Freed, Leak, RankInfo
from ..shared.readings import LiveBytes
from ..shared.units import format_bytes, name_ranks
from .tables import Report, Table


@dataclass(frozen=True, slots=True, repr=False)
class FreeReport(Report):
    """The memory that each rank gave back; :attr:`bytes` of all ranks together."""

    ranks: tuple[RankInfo, ...]
    freed: tuple[Freed, ...]

    @property
    def bytes(self) -> int:
        """Return how much came back, of all ranks together."""
        return sum(one.before.reserved_bytes - one.after.reserved_bytes for one in self.freed)

    @property
    def shown(self) -> list[Table | str]:
        """A row for each rank, and what would free more."""
        headings = ("rank", "device", "came back", "reserved", "live", "held by")
        rows = tuple(
            (
                str(info.rank),
                info.device_name,
                format_bytes(one.before.reserved_bytes - one.after.reserved_bytes),
                format_bytes(one.after.reserved_bytes),
                format_bytes(one.after.live_bytes),
                _holders(one),
            )
            for info, one in zip(self.ranks, self.freed, strict=True)
        )
        what = f"{format_bytes(self.bytes)} came back: cached memory that no tensor used. Training takes it again."
        graphs = _by_rank([one.live.with_graph for one in self.freed])
        notes = [
            f"{name} keeps what its backward pass would need, on {name_ranks(of)}: make it under torch.no_grad(), or "
            f"keep {name}.detach()."
            for name, of in graphs.items()
        ]
        own = [name for one in self.freed for name, _ in one.live.variables]
        notes += [f"A variable is freed by del in a %%hvd cell, such as: del {own[0]}"] if own else []
        return [Table("", headings, rows, frozenset({"device", "held by"})), what, *notes]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One for each rank: bytes that came back, are reserved and live, and those of each category."""
        return [
            {
                "rank": info.rank,
                "came_back_bytes": one.before.reserved_bytes - one.after.reserved_bytes,
                "reserved_bytes": one.after.reserved_bytes,
                "live_bytes": one.after.live_bytes,
                **{f"{name.replace(' ', '_')}_bytes": nbytes for name, nbytes in one.live.held.items()},
                "variables": dict(one.live.variables),
            }
            for info, one in zip(self.ranks, self.freed, strict=True)
        ]


def _holders(one: Freed) -> str:
    known = {name: nbytes for name, nbytes in one.live.held.items() if nbytes}
    named = [f"{name} {format_bytes(nbytes)}" for name, nbytes in sorted(known.items(), key=lambda held: -held[1])]
    own = [f"variable {name} {format_bytes(nbytes)}" for name, nbytes in one.live.variables]
    return ", ".join([*named, *own]) or "nothing"


def held_by_cells(live: LiveBytes) -> str:
    """Return which variables of cells hold much of a rank's memory, and what to type instead; empty if none does."""
    return f"{cells_hold(live)} {free_cells(live)}" if live.notable else ""


def cells_hold(live: LiveBytes) -> str:
    """Return which variables of cells hold much of a rank's memory; there must be some."""
    return f"Variables of cells hold memory: {', '.join(f'{n} {format_bytes(b)}' for n, b in live.notable.items())}."


def free_cells(live: LiveBytes) -> str:
    """Return what to type so that these hold it no more."""
    named = live.notable
    graphs = [name for name in named if name in live.with_graph]
    advice = (
        f"{' and '.join(graphs)} keep{'s' * (len(graphs) == 1)} what a backward pass would need: compute outputs "
        "under torch.no_grad(), and keep them as output.detach().cpu(). "
        if graphs
        else ""
    )
    return f"{advice}To free it, in a %%hvd cell: del {', '.join(named)}"


def _by_rank(names: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(names):
        for name in of_rank:
            found.setdefault(name, []).append(rank)
    return found


def leak_in_words(leaks: Sequence[Leak]) -> str:
    """Return what grows, how fast, what holds it, and what to do about it.

    The leaks of one call have the same holder on different ranks.
    """
    return f"{leak_headline(leaks)}. {leak_what(leaks[0])} {leaks[0].fix}"


def leak_headline(leaks: Sequence[Leak]) -> str:
    """Whose memory grows, and how fast."""
    fastest = max(leak.bytes_per_step for leak in leaks)
    who, verb = name_ranks([leak.rank for leak in leaks]), "keeps" if len(leaks) == 1 else "keep"
    return f"{who} {verb} {format_bytes(fastest)} more after every step"


def leak_what(leak: Leak) -> str:
    """Return what is kept, where it was made, and what holds it."""
    dtype, shape = leak.dtype.removeprefix("torch."), "×".join(map(str, leak.shape))
    tensor = f"a {dtype} tensor of {shape}" if shape else f"a {dtype} number"
    made_at = f", made at {leak.made_at}" if leak.made_at else ""
    about = f"{tensor} ({format_bytes(leak.tensor_bytes)}{made_at})"
    return f"The largest part of that is {about}, held by {leak.holder}."
