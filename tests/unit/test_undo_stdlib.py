"""Objects of Python's own modules that a forward pass changes are put back when its step is undone."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo


class OfThread(threading.local):
    def __init__(self) -> None:
        self.count = 0


def counted(thing: Any) -> None:
    thing.count = getattr(thing, "count", 0) + 1
    thing.seen = [*getattr(thing, "seen", ()), thing.count]


class Keeping(nn.Module):
    def __init__(self, kept: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = {"it": kept}
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.kept["it"])
        return cast(Tensor, self.linear(x))


def filled(of: Any) -> Any:
    for number in range(3):
        of.put(number)
    return of


def held(of: Any) -> object:
    return [*of.queue], of.unfinished_tasks


@pytest.mark.parametrize(
    ("kept", "change", "told"),
    [
        (bytearray(b"abc"), lambda kept: kept.append(1), bytes),
        (bytearray(b"abc"), lambda kept: kept.__setitem__(0, kept[0] + 1), bytes),
        (array("d", [1.0, 2.0]), lambda kept: kept.append(3.0), list),
        (array("i", [1, 2]), lambda kept: kept.__setitem__(1, kept[1] + 1), list),
        (filled(queue.Queue()), lambda kept: kept.put(kept.get()), held),
        (filled(queue.LifoQueue()), lambda kept: kept.put(4), held),
        (filled(queue.PriorityQueue()), lambda kept: kept.get(), held),
        (threading.local(), counted, lambda kept: dict(vars(kept))),
        (OfThread(), counted, lambda kept: dict(vars(kept))),
    ],
)
def test_what_forward_changes_in_them_is_put_back(
    kept: Any, change: Callable[[Any], object], told: Callable[[Any], object]
) -> None:
    net = Keeping(kept, change)
    state = ForwardState([net])
    before = told(kept)
    for _ in range(2):
        undo = ForwardUndo(state)
        net(torch.ones(1, 2))
        assert told(kept) != before
        undo.undo()
        assert told(kept) == before
    undo = ForwardUndo(state)
    net(torch.ones(1, 2))  # a step that counts
    before = told(kept)
    undo = ForwardUndo(state)
    net(torch.ones(1, 2))
    undo.undo()
    assert told(kept) == before


def test_a_queue_works_on_after_its_step_was_undone() -> None:
    line: queue.Queue[int] = queue.Queue(maxsize=1)
    net = Keeping(line, lambda kept: kept.put_nowait(1))
    undo = ForwardUndo(ForwardState([net]))
    net(torch.ones(1, 2))
    undo.undo()
    line.put(2, timeout=1)
    assert line.get(timeout=1) == 2
