"""Wrong answers made of right ones: another number, unit, operator or word, as slips and misconceptions make them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e\d+)?(?![\w.])")
_FACTORS = (2, 0.5, 8, 1.4)
_UNITS = {"MiB": ("GiB", "KiB"), "MB": ("GB", "KB"), "GiB": ("MiB",), "bytes": ("bits",)}
_OPERATORS = {" + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", "max(": "min(", "min(": "max(", "sum(": "len("}
_ITEM = re.compile(r"""(?:, )?("[^"]*"|'[^']*')(?=[,\]}])""")


def of(answer: str) -> Iterator[str]:
    """Yield sources that differ from an answer's in one place; of functions on the ranks, without a line of them."""
    lines = answer.strip().splitlines(keepends=True)
    inside = [place for place, line in enumerate(lines) if line.startswith(" ")]
    if lines[0].startswith("%%hvd") and inside:
        yield from ("".join(lines[:place] + lines[place + 1 :]) for place in inside)
        return
    for found in _NUMBER.finditer(answer):
        for factor in _FACTORS:
            number = float(found[0]) * factor
            text = f"{number:g}" if "e" in found[0] else f"{number:.10g}"
            yield answer[: found.start()] + _whole(text, found[0]) + answer[found.end() :]
    for old, others in (*_UNITS.items(), *((old, (new,)) for old, new in _OPERATORS.items())):
        for found in re.finditer(rf"{'(?<![A-Za-z])' if old[0].isalpha() else ''}{re.escape(old)}", answer):
            yield from (answer[: found.start()] + new + answer[found.end() :] for new in others)
    for found in _ITEM.finditer(answer):
        left = answer[: found.start()] + answer[found.end() :]
        yield left.replace("[, ", "[").replace("{, ", "{")


def _whole(text: str, instead_of: str) -> str:
    """Return a number that is whole where the one in its place was."""
    return text if "." in instead_of or "." not in text else str(max(1, round(float(text))))
