"""Several parts of one undoing, of which none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def each(parts: Iterable[Callable[[], Any]]) -> None:
    """Call all of these, whatever one of them raises; afterwards raise the first error, with the others as notes."""
    first: BaseException | None = None
    for part in parts:
        try:
            part()
        except BaseException as error:
            if first is None:
                first = error
            else:
                first.add_note(f"besides: {type(error).__name__}: {error}")
    if first is not None:
        raise first
