"""Several ranks in words: ``ranks 0,2-3``, written and read."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from .errors import InvalidInput

RankChoice = str | int | Sequence[int] | None
"""A choice of ranks: ``"0,2-3"``, one number, several, or ``None`` for all."""
_PART = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


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


def choose_ranks(ranks: RankChoice, size: int) -> list[int] | None:
    """Return the chosen ranks of ``size``, in order and each once; ``None`` chooses all.

    Raises:
        InvalidInput: it cannot be read, or names a rank that is not there.
    """
    if ranks is None:
        return None
    if isinstance(ranks, str):
        return parse_ranks(ranks, size)
    whole = (int, Integral)
    chosen = [ranks] if isinstance(ranks, whole) else ranks
    if isinstance(ranks, Mapping | bytes) or not isinstance(chosen, Iterable):
        raise _unreadable(ranks)
    found: set[int] = set()
    for rank in chosen:
        if isinstance(rank, bool) or not isinstance(rank, whole):
            raise _unreadable(ranks)
        if not 0 <= rank < size:
            raise _not_there(ranks, size)
        found.add(int(rank))
    if not found:
        raise _not_there(ranks, size)
    return sorted(found)


def parse_ranks(text: str, size: int) -> list[int]:
    """``"0,2-3"`` as ``[0, 2, 3]``, of ``size`` ranks.

    Raises:
        InvalidInput: it cannot be read, or names a rank that is not there.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        read = _PART.fullmatch(part.strip())
        if read is None:
            raise _unreadable(text)
        first, last = int(read[1]), int(read[2] or read[1])
        if first > last:
            raise InvalidInput(f"ranks={text!r}: the range {first}-{last} runs backwards. Write {last}-{first}.")
        if last >= size:
            raise _not_there(text, size)
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def _unreadable(ranks: object) -> InvalidInput:
    return InvalidInput(
        f"ranks={reprlib.repr(ranks)} cannot be read. Write single ranks and ranges, such as 0 or 0,2-3."
    )


def _not_there(ranks: object, size: int) -> InvalidInput:
    return InvalidInput(
        f"ranks={reprlib.repr(ranks)}: there {'is' if size == 1 else 'are'} {name_ranks(range(size))}. "
        "Try ranks 0 or 0,2-3."
    )
