"""What modules and optimizers keep in slots of their own classes is put back when a step is undone."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, UpdateUndo
from tests.unit.test_one_rank import loss

WIDTH = 4


class Slotted(nn.Module):
    """Keeps in slots of its own what a module usually keeps in its dict."""

    __slots__ = ("calls", "late", "mean", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.seen, self.mean = 0, list[int](), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.late = self.calls
        self.seen.append(1)
        self.mean.add_(1)
        return cast(Tensor, self.linear(x))


def test_what_a_module_keeps_in_slots_is_put_back() -> None:
    net = Slotted()
    state = ForwardState([net], loss)
    for _ in range(3):
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        assert (net.calls, net.seen, net.mean.tolist()) == (1, [1], [1.0, 1.0])
        undo.undo()
        assert (net.calls, net.seen, net.mean.tolist(), hasattr(net, "late")) == (0, [], [0.0, 0.0], False)


def test_what_an_optimizer_keeps_in_slots_is_put_back() -> None:
    class Own(torch.optim.SGD):
        __slots__ = ("updates", "widths")

        updates: int
        widths: list[float]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.updates += 1
            self.widths.append(1.0)

    net = nn.Linear(2, 2)
    optimizer: Any = Own(net.parameters(), lr=0.1)
    optimizer.updates, optimizer.widths = 0, list[float]()
    undo = UpdateUndo(net.parameters(), optimizer)
    optimizer.step()
    undo.undo()
    assert (optimizer.updates, optimizer.widths) == (0, [])
