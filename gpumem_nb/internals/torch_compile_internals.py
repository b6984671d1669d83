"""Undocumented parts of torch's compiler. Only for ranks; importing this imports the compiler, which takes seconds.

``torch._dynamo.callback_handler`` (tells where each compilation begins and ends, and by the number behind the slash of
its id whether one of the same code came before), ``torch._dynamo.utils.counters``, what is raised by a compilation that
fails, and settings: how often the same code may be compiled, that more than that is an error (torch would go on
uncompiled, without a word), that hooks which come to a module later are noticed, that NumPy draws its random numbers
itself, that sizes which are the same by chance are told apart, and in how many processes kernels are built. These would
outlive a rank that is killed, so there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shapes_config

CHECKED_WITH = ("2.13.0",)  # of torch

FAILED = TorchDynamoException
TOO_OFTEN = FailOnRecompileLimitHit

_ALONE = {"compile_threads": 1}
with torch._inductor.config.patch(_ALONE):
    import torch._inductor.async_compile

_OPTIONS = {"fallback_random": True, **_ALONE}  # random numbers as without it
_SHAPES: Any = shapes_config
_ADDED_UP = 256  # torch's limit of all compilations of the same code, whatever the model


def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return the function compiled once for tensors of all sizes; it draws the same random numbers as before."""
    options: Any = _OPTIONS if backend == "inductor" else None
    made: Callable[..., Any] = torch.compile(function, dynamic=True, backend=backend, options=options)
    return made


@dataclass(frozen=True, slots=True)
class Compilation:
    """One of a piece of code, forward or backward.

    Attributes:
        seconds: that it took.
        again: whether the same code was compiled before, for something else.
        graphs: that it gave.
        breaks: how often a graph ended before its code did.
    """

    seconds: float
    again: bool
    graphs: int
    breaks: int


@contextmanager
def listened(ended: Callable[[Compilation], None]) -> Iterator[None]:
    """Inside, hear of compilations."""
    before = time.perf_counter(), 0, 0

    def begin(_: Any) -> None:
        nonlocal before
        before = time.perf_counter(), _graphs(), _breaks()

    def end(told: Any) -> None:
        began_s, graphs, breaks = before
        again = told.callback_trigger.name == "DYNAMO" and not str(told.compile_id).endswith("/0")
        ended(Compilation(time.perf_counter() - began_s, again, _graphs() - graphs, _breaks() - breaks))

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


@contextmanager
def strict(most: int) -> Iterator[None]:
    """Inside, on this thread: more than so many compilations of code fail.

    What is compiled does what the code would: hooks of modules and NumPy's random numbers, too. Sizes that are the same
    by chance are not taken to be the same always.
    """
    limits = {"recompile_limit": most, "accumulated_recompile_limit": max(most, _ADDED_UP)}
    as_written = {"skip_nnmodule_hook_guards": False, "use_numpy_random_stream": True}
    raising = {"fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits | as_written | raising), _SHAPES.patch(use_duck_shape=False):
        yield


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _breaks() -> int:
    return sum(counters["graph_break"].values())
