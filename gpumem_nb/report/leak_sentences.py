"""Memory that ranks keep from step to step, in words. The leaks of one call have the same holder on different ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..shared.messages import Leak
from ..shared.ranklist import name_ranks
from ..shared.units import format_bytes


def in_words(leaks: Sequence[Leak]) -> str:
    """Return what grows, how fast, what holds it, and what to do about it."""
    return f"{headline(leaks)}. {what(leaks[0])} {leaks[0].fix}"


def headline(leaks: Sequence[Leak]) -> str:
    """Whose memory grows, and how fast."""
    fastest = max(leak.bytes_per_step for leak in leaks)
    who, verb = name_ranks([leak.rank for leak in leaks]), "keeps" if len(leaks) == 1 else "keep"
    return f"{who} {verb} {format_bytes(fastest)} more after every step"


def what(leak: Leak) -> str:
    """Return what is kept, where it was made, and what holds it."""
    dtype, shape = leak.dtype.removeprefix("torch."), "×".join(map(str, leak.shape))
    tensor = f"a {dtype} tensor of {shape}" if shape else f"a {dtype} number"
    made_at = f", made at {leak.made_at}" if leak.made_at else ""
    about = f"{tensor} ({format_bytes(leak.tensor_bytes)}{made_at})"
    return f"The largest part of that is {about}, held by {leak.holder}."
