"""``checkpointing=selective`` where blocks do what their first forward did not show, and what no operator tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.undo.step_undo import ForwardState
from tests.tiers import every, first_tier
from tests.unit.test_selective import WIDTH, Stack, rows, selective, step

STEPS = 8  # after the fourth call of a block only every 64th is compared with the first


class Block(nn.Module):
    """Two layers and a count of calls, by which later ones may differ."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.calls = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(()))

    @property
    def is_odd_call(self) -> bool:
        self.calls += 1
        return self.calls % 2 == 1


class OtherWrite(Block):
    """The first relu in place is once that of a result that is kept, and once that of one before it."""

    def forward(self, x: Tensor) -> Any:
        if self.is_odd_call:
            return x + self.narrow(self.wide(x).relu_())
        before = (x * 2).relu_()
        return x + self.narrow(self.wide(before).sigmoid())


class ShiftedWrite(Block):
    """The write into what is kept is the first one or the second one of its kind."""

    def forward(self, x: Tensor) -> Any:
        if not self.is_odd_call:
            x = x + (x * 2).relu_()
        return x + self.narrow(self.wide(x).relu_())


class ReadBetween(Block):
    """What is kept is read before it is written to an end, in every second call."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.wide(x)
        scale = 1.0 if self.is_odd_call else hidden.detach().cos()
        return x + self.narrow(hidden.relu_().sigmoid() * scale)


class Uncounted(Block):
    """Writes in place what autograd does not count."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.wide(x)
        hidden.data.mul_(2.0)
        return x + self.narrow(hidden.sigmoid())


class Parts(Block):
    """Copies into parts of a result; the buffer, which it leaves alone, is put back by a copy as well."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.wide(x)
        hidden[:, :4] = x[:, 4:8].repeat(1, 1, 2)
        hidden.mul_(0.5)
        return x + self.narrow(hidden.sigmoid()) * (1 + self.mean)


class Mapped(Block):
    """A function of one row, mapped: torch changes the shape of a result in place."""

    def forward(self, x: Tensor) -> Any:
        one = lambda row: torch.tanh(row @ self.wide.weight.T).sin()  # noqa: E731
        return x + self.narrow(torch.vmap(torch.vmap(one))(x))


@torch.library.custom_op("gpumem_nb_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.1)


noisy.register_autograd(lambda _, gradient: gradient)


class DrawsUntold(Block):
    """An operator of one's own draws random numbers, and another one draws after it."""

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(noisy(self.wide(x)).sin().cos().sin() * torch.rand(2 * WIDTH))


@torch.library.custom_op("gpumem_nb_tests::counted", mutates_args=("mean",))
def counted(x: Tensor, mean: Tensor) -> Tensor:
    mean.add_(x.mean())
    given: Tensor = x @ x.transpose(-1, -2) @ x
    return given


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Any:
        return counted(x, mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class WritesBeside(Block):
    """An operator of one's own gives a result and writes into a buffer, which the block reads afterwards."""

    def forward(self, x: Tensor) -> Any:
        hidden: Tensor = Counted.apply(x, self.mean)  # type: ignore[no-untyped-call]
        return x + self.narrow(self.wide(hidden.sin() * (1 + self.mean)))


class AddedUnseen(torch.autograd.Function):
    """As a kernel does that torch does not know: it adds into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        given = torch.zeros_like(x)
        given.numpy()[...] += np.tanh(x.numpy())
        ctx.save_for_backward(given)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (given,) = ctx.saved_tensors
        return gradients[0] * (1 - given * given)


class Unseen(Block):
    def forward(self, x: Tensor) -> Any:
        hidden: Tensor = AddedUnseen.apply(self.wide(x))  # type: ignore[no-untyped-call]
        return x + self.narrow(hidden.sin().cos().sin().cos())


BLOCKS = [
    OtherWrite,
    ShiftedWrite,
    ReadBetween,
    Uncounted,
    Parts,
    Mapped,
    DrawsUntold,
    WritesBeside,
    Unseen,
]


def results(block: Callable[[], nn.Module], budget: float | None) -> list[Tensor]:
    """Return losses and gradients of some steps, and the buffers and random numbers that they leave."""
    torch.manual_seed(1)
    model = Stack(block, 3).train()
    parts, state, batch = selective(model, budget), ForwardState([model]), rows()
    torch.manual_seed(7)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        found.append(step(model, parts, state, lambda: model(batch).square().mean()))
        found += [param.grad for param in model.parameters() if param.grad is not None]
    return [*found, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("block", first_tier(BLOCKS, every(3)))
def test_gradients_are_the_same_to_the_bit_on_paths_that_were_not_looked_at(block: type[Block]) -> None:
    expected = results(block, None)
    for budget in (0.3, 0.6, 0.95):
        found = results(block, budget)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_what_is_filled_piece_by_piece_counts_as_what_it_is_made_of() -> None:
    class Pieces(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = torch.zeros(*x.shape[:-1], 2 * WIDTH)
            for row in range(len(x)):
                hidden[row] = x[row].repeat(1, 2)
            return x + self.narrow(hidden).square()

    model, batch = Stack(Pieces, 1), rows()
    parts = selective(model, 0.6)
    step(model, parts, ForwardState([model]), lambda: model(batch).square().mean())
    assert ("aten.addmm.default", 0) in parts.kept[0]


def test_a_function_that_is_compiled_is_called_as_what_it_was_compiled_to() -> None:
    called = []

    def backend(graph: Any, _: Any) -> Any:
        def compiled(*told: Any) -> Any:
            called.append(torch.is_grad_enabled())
            return graph(*told)

        return compiled

    activation = torch.compile(lambda x: x.sin() * x.sigmoid(), backend=backend)

    class Compiled(Block):
        def forward(self, x: Tensor) -> Any:
            return x + self.narrow(activation(self.wide(x)))

    model, batch = Stack(Compiled, 2), rows()
    step(model, selective(model, 0.6), ForwardState([model]), lambda: model(batch).square().mean())
    assert len(called) == 2 * 3  # learned, kept, and computed again


def test_a_higher_order_operator_computes_what_it_does_without() -> None:
    class Conditional(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = self.wide(x)
            return x + self.narrow(torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,)))

    model, batch = Stack(Conditional, 1), rows()
    found = []
    for budget in (None, 0.6):
        model.zero_grad()
        step(model, selective(model, budget), ForwardState([model]), lambda: model(batch).square().mean())
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(map(torch.equal, *found))
