"""What forward sets up the first time it runs is gone when that step is undone; rare things that it may keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo
from gpumem_nb.internals.torch_internals import hooks_of, hooks_of_tensor
from tests.unit.test_one_rank import loss

WIDTH = 4
CALLS: int
helpers: Any = ModuleType("helpers_of_a_notebook")


class Meter:
    """Can be referenced weakly."""


class Net(nn.Module):
    """Runs whatever it is given before its linear layer."""

    def __init__(self, change: Callable[[Net], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return cast(Tensor, self.linear(x))


class Counted(Net):
    """Of which one more is counted on the class."""


def count_on_class(net: Net) -> None:
    kind: Any = type(net)
    kind.calls = getattr(kind, "calls", 0) + 1


def count_on_itself(net: Net) -> None:
    function: Any = count_on_itself
    function.calls = getattr(function, "calls", 0) + 1


def count_in_a_global(net: Net) -> None:
    global CALLS
    CALLS = globals().get("CALLS", 0) + 1


def count_in_a_module(net: Net) -> None:
    helpers.calls = getattr(helpers, "calls", 0) + 1


def counting_in_a_closure(number: int = 0) -> tuple[Callable[[Net], None], Callable[[], object]]:
    def count(net: Net) -> None:
        nonlocal number
        try:
            number += 1
        except NameError:
            number = 1

    def counted() -> object:
        try:
            return number
        except NameError:
            return None

    del number
    return count, counted


COUNTERS: dict[str, tuple[Callable[[Net], None], Callable[[], object]]] = {
    "a class": (count_on_class, lambda: getattr(Counted, "calls", None)),
    "a function": (count_on_itself, lambda: getattr(count_on_itself, "calls", None)),
    "a global": (count_in_a_global, lambda: globals().get("CALLS")),
    "a module": (count_in_a_module, lambda: getattr(helpers, "calls", None)),
    "a closure": counting_in_a_closure(),
}


@pytest.mark.parametrize("where", COUNTERS)
def test_what_is_counted_for_the_first_time_is_not_counted_when_it_is_undone(where: str) -> None:
    count, counted = COUNTERS[where]
    net = Counted(count)
    state = ForwardState([net], loss)
    for before in (None, 1, 2):
        assert counted() == before
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        assert counted() == (before or 0) + 1
        undo.undo()
        assert counted() == before
        net(torch.ones(2, WIDTH))


def hooks_once(net: Net) -> None:
    """As code does that finds its layers when it is called first."""
    if not hasattr(net, "hooked"):
        net.hooked = cast(Any, True)
        net.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        net.linear.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
        net.linear.weight.register_hook(lambda grad: grad * 2)


def test_hooks_that_an_undone_step_registered_are_gone() -> None:
    net = Net(hooks_once)
    state = ForwardState([net], loss)

    def stepped() -> tuple[Tensor, Tensor]:
        net.zero_grad()
        loss(net, [torch.ones(2, WIDTH)]).backward()
        return net(torch.ones(2, WIDTH)), cast(Tensor, net.linear.weight.grad)

    for _ in range(2):
        undo = ForwardUndo(state)
        then = stepped()
        undo.undo()
        assert not any(hooks_of(net.linear))
        assert not hooks_of_tensor(net.linear.weight)
    assert all(map(torch.equal, stepped(), then)), "as often as in a plain loop"


def test_hooks_that_an_undone_step_removed_are_there_again_and_get_the_same() -> None:
    seen: list[object] = []
    net = Net(lambda net: None)
    handle = net.linear.register_forward_hook(lambda m, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
    state = ForwardState([net], loss)
    ForwardUndo(state).undo()
    undo = ForwardUndo(state)
    handle.remove()
    undo.undo()
    net(torch.ones(2, WIDTH))
    assert seen == [{}]


def test_a_weak_proxy_of_what_is_gone_stops_no_step() -> None:
    net, other = nn.Linear(WIDTH, WIDTH), Meter()
    cast(Any, net).other = weakref.proxy(other)
    del other
    ForwardUndo(ForwardState([net], loss)).undo()


def test_the_mask_of_an_array_and_generators_of_bits_are_put_back() -> None:
    net, array, bits = nn.Linear(WIDTH, WIDTH), np.ma.ones(2), np.random.PCG64(0)
    cast(Any, net).kept = array, bits
    then = array.tolist(), bits.state
    undo = ForwardUndo(ForwardState([net], loss))
    array[0] = np.ma.masked
    bits.random_raw()
    undo.undo()
    assert (array.tolist(), bits.state) == then
