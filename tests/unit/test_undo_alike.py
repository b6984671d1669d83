"""Modules that are alike are read together before a step; each of them is put back when it is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import nn

from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo
from tests.unit.test_one_rank import loss


class Unit(nn.Linear):
    """One of many that are alike."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.calls, self.kept = 0, cast(Any, None)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda unit: setattr(unit, "calls", 1),
    "a tensor": lambda unit: setattr(unit, "kept", torch.ones(1)),
    "a container": lambda unit: setattr(unit, "kept", [1]),
    "a new name": lambda unit: setattr(unit, "late", 1),
    "no name": lambda unit: delattr(unit, "calls"),
    "a buffer": lambda unit: unit.register_buffer("seen", torch.ones(1)),
    "a module": lambda unit: unit.add_module("inner", nn.Linear(1, 1)),
    "a weight": lambda unit: setattr(unit, "bias", nn.Parameter(torch.ones(1))),
    "no weight": lambda unit: delattr(unit, "bias"),
    "the mode": lambda unit: unit.eval(),
}


@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_of_many_modules_that_are_alike_each_is_put_back_as_it_was(before: str, change: str) -> None:
    def state_of(unit: nn.Module) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(unit).items()}

    net = nn.Sequential(*(Unit() for _ in range(9)))
    state = ForwardState([net], loss)
    ForwardUndo(state)
    CHANGES[before](net[2])  # by a step that counts
    then = [state_of(unit) for unit in net]
    for place in (5, 2):
        undo = ForwardUndo(state)
        with suppress(AttributeError):  # it is not there any more
            CHANGES[change](net[place])
        undo.undo()
        for unit, known in zip(net, then, strict=True):
            now = state_of(unit)
            assert now.keys() == known.keys()
            assert all(now[name] is value or repr(now[name]) == repr(value) for name, value in known.items())
