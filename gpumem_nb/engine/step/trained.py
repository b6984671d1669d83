"""How many steps weights were trained for, whatever holds them now: they may have been attached before."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_steps = WeakTensorKeyDictionary()  # keeps nothing alive


def note_steps(params: Iterable[Tensor], steps: int) -> None:
    """These weights were trained for so many more."""
    if steps:
        for param in params:
            _steps[param] = _steps.get(param, 0) + steps


def steps_before(params: Iterable[Tensor]) -> int:
    """Return the most that any of these weights was trained for before."""
    return max((_steps.get(param, 0) for param in params), default=0)
