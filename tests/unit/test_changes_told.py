"""What forward has changed is told by its name, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo

WIDTH = 4


def added_to(tensor: Tensor) -> None:
    tensor += 1


# What a module keeps, what forward does with it, and whether it is then otherwise.
KEPT: dict[str, tuple[Any, Any, bool]] = {
    "a number that is none": (float("nan"), None, False),
    "an array of such": (np.full(3, np.nan), None, False),
    "an array of objects": (np.array([torch.ones(3), None], dtype=object), None, False),
    "a tensor of such": (torch.full((3,), torch.nan), None, False),
    "NumPy's number": (np.int64(1), lambda net: setattr(net, "kept", net.kept + 1), True),
    "a tuple": ((0, 1), lambda net: setattr(net, "kept", (0, 2)), True),
    "a tuple like it": ((0, 1), lambda net: setattr(net, "kept", tuple([0, 1])), False),
    "tuples in a list": ([(0, 1)], lambda net: net.kept.append(net.kept.pop()[::-1]), True),
    "tensors": ((torch.zeros(3), 1), lambda net: setattr(net, "kept", (torch.ones(3), 2)), False),
    "a dict": ({"calls": 0}, lambda net: net.kept.update(calls=1), True),
    "a list": ([0, 1], lambda net: net.kept.reverse(), True),
    "an array": (np.zeros(3), lambda net: net.kept.fill(1), True),
    "a tensor": (torch.zeros(3), lambda net: added_to(net.kept), True),
}


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("what", KEPT)
def test_what_forward_changes_is_told_and_nothing_else(what: str, buffer: bool) -> None:
    kept, changes, told = copy.deepcopy(KEPT[what])
    net: Any = nn.Linear(WIDTH, WIDTH)
    if not (buffer and isinstance(kept, Tensor)):
        net.kept = kept
    else:
        net.register_buffer("kept", kept)
    state = ForwardState([net])
    for _ in range(2):
        before = ForwardUndo(state)
        if changes:
            changes(net)
        assert bool(before.changed()) is told
        before.undo()


def test_a_buffer_that_is_bound_anew_is_told_if_it_holds_something_else() -> None:
    net = nn.BatchNorm1d(WIDTH)
    state = ForwardState([net])
    for grown, told in ((0.0, ""), (1.0, "running_mean")):
        before = ForwardUndo(state)
        assert net.running_mean is not None
        net.running_mean = net.running_mean + grown
        assert before.changed() == told
        before.undo()
    before = ForwardUndo(state)
    net.running_mean = torch.eye(WIDTH).to_sparse()
    assert before.changed() == "running_mean"
