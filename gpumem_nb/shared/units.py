"""Numbers for people: sizes, seeds and ranks that they type, sizes and throughputs that they read."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from keyword import iskeyword
from numbers import Integral, Real
from typing import Any

from .errors import InvalidInput

_UNIT_BYTES = {
    "B": 1,
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)},
}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNIT_BYTES.items()}
_LARGEST_BYTES = 1024 * 2**40
_ALLOWED = (
    "a whole number of bytes, or a number with KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000), "
    "above 0 and at most 1024 TiB, such as '2GiB', '512 MiB' or '1.5GB'"
)


def parse_size(size: str | int) -> int:
    """Return the bytes that ``size`` means; a bare number is bytes, units are read in any case.

    Raises:
        InvalidInput: not a size, not above 0, or beyond 1024 TiB.
    """
    n = _bytes(size)
    if n is None or not 1 <= n <= _LARGEST_BYTES:
        raise InvalidInput(f"{size!r} is not a memory size: it must be {_ALLOWED}.")
    return n


def _bytes(size: object) -> int | None:
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", str(size), re.ASCII | re.IGNORECASE)
    if not isinstance(size, str) or match is None:
        return None
    number, unit = match.groups()
    factor = _BY_LOWER_CASE.get(unit.lower() or "b")
    if factor is None or (factor == 1 and "." in number):  # half a byte: a unit was forgotten
        return None
    return int(Decimal(number) * factor)


def typed_size(n: int) -> str:
    """Return ``n`` bytes in the largest unit of which they are a whole number: what :func:`parse_size` reads back."""
    unit = max((unit for unit, factor in _UNIT_BYTES.items() if n % factor == 0), key=_UNIT_BYTES.__getitem__)
    return str(n) if unit == "B" else f"{n // _UNIT_BYTES[unit]}{unit}"


def format_bytes(n: int | None) -> str:
    """``n`` with one decimal in the largest binary unit that keeps it at 1 or more; ``n/a`` for what is not known."""
    if n is None:
        return "n/a"
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.95:  # 1024.0 after rounding belongs to the next unit
            break
        value, unit = value / 1024, larger
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"


def format_rate(value: float | None) -> str:
    """Return a throughput for people; ``n/a`` for what is not known."""
    return "n/a" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def format_duration(seconds: float) -> str:
    """Return how long something takes in milliseconds, or from a second on in seconds."""
    milliseconds = f"{1000 * seconds:.0f}"
    if len(milliseconds) < 4:
        return f"{milliseconds} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


DEFAULT_SEED = 0
LARGEST_SEED = 2**32 - 1
"""NumPy's global random numbers take no larger one."""


def as_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> int | None:
    """Return a whole number within these bounds as Python's own, NumPy's too; ``None`` for anything else."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else math.nan
    return int(number) if least <= number <= most else None


def checked_flag(name: str, given: Any) -> bool:
    """Return ``True`` or ``False`` given for ``name``, NumPy's too; ``InvalidInput`` for what may mean either."""
    of_numpy = type(given).__module__ == "numpy" and type(given).__name__ in ("bool", "bool_")
    if not (of_numpy or isinstance(given, bool)):
        raise InvalidInput(f"{name}={given!r} cannot be used: it must be True or False.")
    return bool(given)


def checked_seed(value: Any) -> int:
    """Return a seed given as a number or, as magics pass it, as text; ``InvalidInput`` says what is allowed."""
    try:
        if isinstance(value, bool):
            raise TypeError
        seed = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        seed = -1
    if not 0 <= seed <= LARGEST_SEED:
        raise InvalidInput(f"seed={value!r} cannot be used: it must be a whole number from 0 to {LARGEST_SEED}.")
    return seed


_LONGEST_S = 10**8


def checked_seconds(name: str, given: Any, example: int) -> float:
    """Return a finite number of seconds above 0 given for ``name``; ``InvalidInput`` says what is allowed.

    More than three years are three years: operating systems wait no longer than some number of milliseconds.
    """
    if isinstance(given, int):  # which may be more than a float holds
        seconds = 0.0 if isinstance(given, bool) else float(max(0, min(given, _LONGEST_S)))
    else:
        seconds = float(given) if isinstance(given, Real) else 0.0
    if not 0 < seconds < math.inf:
        raise InvalidInput(
            f"{name}={given!r} cannot be used: it must be a number of seconds above 0, such as {example}."
        )
    return min(seconds, _LONGEST_S)


def is_variable(name: object) -> bool:
    """Return whether a variable can have this name."""
    return isinstance(name, str) and name.isidentifier() and not iskeyword(name)


def check_names(names: Mapping[str, Any], needed: Collection[str] = ()) -> None:
    """Check what is given in place of names of variables on the ranks; ``None`` where none of ``needed`` is given.

    Raises:
        InvalidInput: one is not text, such as the object itself.
    """
    for role, name in names.items():
        if not isinstance(name, str) and (name is not None or role in needed):
            raise InvalidInput(
                f"{role}= must be the name of a variable on the ranks, as text such as 'net'; this is of type "
                f"{type(name).__name__}. Define the variable in a %%hvd cell first."
            )


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
    chosen = [ranks] if isinstance(ranks, Integral) else ranks
    if isinstance(ranks, Mapping | bytes) or not isinstance(chosen, Iterable):
        raise _unreadable(ranks)
    found: set[int] = set()
    for rank in chosen:
        if (number := as_whole(rank)) is None:
            raise _unreadable(ranks)
        if not 0 <= number < size:
            raise _not_there(ranks, size)
        found.add(number)
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
