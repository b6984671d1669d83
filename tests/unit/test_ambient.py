from __future__ import annotations

import gc
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_nb.engine.replay.checkpointing import Checkpointing
from gpumem_nb.engine.replay.segment import Segment
from gpumem_nb.engine.step.ambient import Ambient, let_go

STRIDE = 11  # of some 1,300 lines that run in a step, every so many are interrupted


class Interrupter:
    """Raises ``KeyboardInterrupt`` at the n-th line of anything that runs inside."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # CPython 3.11 loses references when tracing raises while a with statement ends by an exception.
        if event == "line" and not source.startswith("with "):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self._trace


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))


def step(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.arange(8.0).reshape(2, 4)).square().mean()
    loss.backward()


def after_two_steps(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of the second one, with other weights than in the first: copies cached by that one would show."""
    for _ in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.grad = None
                param.add_(0.25)
        step(model)
    return [param.grad for param in model.parameters() if param.grad is not None]


def attempt(at: int) -> tuple[nn.Sequential, bool]:
    """A step with an interrupt at that moment, and what the trainer does afterwards; was the step over before it?"""
    model = make()
    checkpointing = Checkpointing(model, list(model), "sqrt")
    ambient = Ambient()
    interrupter = Interrupter(at)
    try:
        with interrupter:
            step(model)
    except KeyboardInterrupt as error:
        let_go(error)
    checkpointing.abandon()
    ambient.restore()
    gc.collect()
    checkpointing.remove()
    return model, interrupter.seen < at


@pytest.mark.full
def test_an_interrupt_at_any_moment_of_a_step_leaves_nothing_behind() -> None:
    # An error from inside of a trace function can leave Python with a handled one of that thread for good.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt_at_all_moments).result()


def interrupt_at_all_moments() -> None:
    expected = after_two_steps(make())
    assert attempt(sys.maxsize)[1]  # what torch imports on its first way through is no moment of a step
    gc.freeze()  # what is there by now need not be looked through again and again
    at, over = 1, False
    while not over:
        model, over = attempt(at)
        assert not [thing for thing in gc.get_objects() if type(thing) is Segment], at
        assert not torch.is_autocast_enabled("cpu"), at
        assert not Segment.replaying, at
        assert all(map(torch.equal, after_two_steps(model), expected)), at
        assert not model[0]._forward_hooks, at
        at += STRIDE
    assert at > 400


def test_what_was_on_before_stays_on() -> None:
    with torch.no_grad():
        ambient = Ambient()
        torch.set_grad_enabled(True)
        ambient.restore()
        assert not torch.is_grad_enabled()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks:
        ambient = Ambient()
        torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()
        ambient.restore()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
