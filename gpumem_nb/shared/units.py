"""Numbers for people: sizes and seeds that they type, sizes and throughputs that they read."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
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


DEFAULT_SEED = 0
LARGEST_SEED = 2**32 - 1
"""NumPy's global random numbers take no larger one."""


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
