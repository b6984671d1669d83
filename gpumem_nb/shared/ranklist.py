"""Several ranks in words: ``ranks 0,2-3``, written and read."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidInput


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0-3`` or ``ranks 0,2-3``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def parse_ranks(text: str) -> list[int]:
    """``"0,2-3"`` as ``[0, 2, 3]``."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InvalidInput(f"ranks={text!r} cannot be read. Write single ranks and ranges, such as 0 or 0,2-3.")
        chosen.extend(range(int(first), int(last if dash else first) + 1))
    return chosen
