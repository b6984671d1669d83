"""Activation checkpointing of any model: each block's own forward is wrapped."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from math import ceil, sqrt

from .order import quoted

_NUMBERED = re.compile(r"(.*)\.(\d+)")


def segment_length(blocks: int, mode: str) -> int:
    """Return how many blocks are recomputed together."""
    return ceil(sqrt(blocks)) if mode == "sqrt" else 1


def checkpointed(names: Sequence[str], norms: bool, length: int) -> Iterator[str]:
    """Lines that recompute these modules of ``model`` in backward, ``length`` of them together.

    With ``norms``, recomputing is no other batch for statistics of batch norms.
    """
    if length > 1:
        yield f"recompute_together({_which(names)}, {length})"
        return
    yield f"for block in {_which(names)}:"
    if norms:
        yield "    contexts = functools.partial(once_in_statistics, block)"
        yield "    again = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)"
        yield "    block.forward = functools.partial(again, block.forward)"
    else:
        yield "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"


def _which(names: Sequence[str]) -> str:
    """Return an expression for the modules: the list that holds them, where they are all of it."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    parents = {match[1] if match else "" for match in found}
    if len(parents) == 1 and all(found) and [match and match[2] for match in found] == [*map(str, range(len(names)))]:
        parent = parents.pop()
        plain = all(part.isidentifier() and not keyword.iskeyword(part) for part in parent.split("."))
        whole = f"model.{parent}" if plain else f"model.get_submodule({quoted(parent)})"
        return f"{whole}[: {len(names)}]"
    listed = ", ".join(map(quoted, names))
    return f"map(model.get_submodule, [{listed}])"
