"""Blocks whose forward ``torch.compile`` has compiled, put on a model inside of its steps and taken off again.

Blocks of one class share what is compiled of its forward, as far as they are alike. That is compiled of a copy of the
forward's code, to which torch ties all that it makes: with the copy it is gone, and code of the user's that compiles
the same class has its own.
"""

from __future__ import annotations

import os
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling

from ...internals.torch_internals import is_compiled, uncompiled
from ...memory.ledger.recorder import Recorder
from ...shared.errors import WorkloadError
from ...shared.knobs.step import COMPILED, COMPILED_AT_MOST
from ..link.communicator import here
from ..undo.reachable import Reachable
from .checkpointing import generation_configs, switched_off
from .loss_head import InsteadOfForward

if TYPE_CHECKING:
    from ...internals.torch_compile_internals import Compilation

BACKEND: Any = "inductor"  # torch's default
_METHODS = (FunctionType, classmethod, staticmethod)
_OFF = "Use compile=off"


def why_not(model: nn.Module, blocks: list[nn.Module], on_gpu: bool) -> str:
    """Return why blocks of this model cannot be compiled here; empty where they can, as far as that is seen at once."""
    if not blocks:
        return f"compile=blocks needs a model with sub-modules, and this one has none. {_OFF}."
    for module in filter(is_compiled, model.modules()):
        name = type(uncompiled(module)).__name__
        return f"compile=blocks would compile what torch.compile has compiled already, the {name}. {_OFF}."
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        return f"compile=blocks needs a C++ compiler, and none is found (g++, or the one that CXX names). {_OFF}."
    if on_gpu:
        return "" if find_spec("triton") else f"compile=blocks needs triton on a GPU: %pip install triton. {_OFF}."
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"compile=blocks needs Python's headers (Debian and Ubuntu: apt install python3-dev). {_OFF}."
    return ""


def refuse_frozen(blocks: list[nn.Module]) -> None:
    """Raise ``WorkloadError`` if blocks may draw from a ``random.Random`` of their own, which torch draws from once."""
    shared = getattr(random.random, "__self__", None)
    for one in Reachable(blocks).generators:
        if isinstance(one, random.Random) and one is not shared:
            raise WorkloadError(
                "compile=blocks would draw one number of a random.Random that blocks use, and take that in each step. "
                f"Draw from the module random, NumPy or torch there. {_OFF}."
            )


class Compiled:
    """The compiled blocks of one model.

    Attributes:
        blocks: in the order in which forward calls them.
        seconds: that compiling has taken.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Take hold of these blocks of the model; each is compiled when a step calls it."""
        self.blocks = blocks
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.seconds = self._told_s = 0.0
        self._called = False
        self._graphs = self._breaks = self._again = 0
        self._configs = generation_configs(model)
        self._methods = _methods(blocks)

    def follow(self, blocks: list[nn.Module]) -> bool:
        """Take note of classes that came into these blocks, and say whether what was compiled still holds.

        It does if these are the blocks, and their classes define what they did.
        """
        known, self._methods = self._methods, self._methods | _methods(blocks)
        others_came = any(methods != self._methods[kind] for kind, methods in known.items())
        return not others_came and list(map(id, self.blocks)) == list(map(id, blocks))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have the blocks compiled inside.

        Raises:
            WorkloadError: something else has replaced a block's forward.
        """
        from ...internals import torch_compile_internals as compiler

        for block in self.blocks:
            if "forward" in vars(block):
                raise WorkloadError(
                    f"compile=blocks takes the place of the {type(block).__name__}'s forward, and something else has "
                    f"replaced that already. {_OFF}, or delete the block's own attribute forward."
                )
        most = COMPILED_AT_MOST * len(self.blocks)
        caching = switched_off(self._configs)
        try:
            with compiler.listened(self._ended):
                for block in self.blocks:
                    block.forward = _Forward(block, partial(self._call, self._function(block), most))
                yield
        except compiler.TOO_OFTEN as error:
            raise WorkloadError(
                f"compile=blocks had to compile the same code more than {most} times, because blocks get something "
                f"else each time. {_OFF}."
            ) from error
        except compiler.FAILED as error:
            words = " ".join(str(error).strip().splitlines()[:2]).rstrip(".")
            raise WorkloadError(f"compile=blocks: torch.compile failed: {words}. {_OFF}.") from error
        finally:
            for block in self.blocks:
                vars(block).pop("forward", None)
            for config in caching:
                config.use_cache = True

    def finished(self) -> None:
        """A forward and backward of the model is over.

        Raises:
            WorkloadError: nothing was compiled.
        """
        if self._graphs:
            return
        kind = type(self.blocks[0]).__name__
        if not self._called:
            raise WorkloadError(
                f"compile=blocks has no effect: forward calls none of the {len(self.blocks)} blocks; the first is a "
                f"{kind}. {_OFF}, or name modules that forward calls in Workload(blocks=...)."
            )
        raise WorkloadError(f"compile=blocks has no effect: torch.compile compiles nothing of the {kind}. {_OFF}.")

    def told(self) -> tuple[str, ...]:
        """Return what was compiled, in a sentence, if that was not said before."""
        if self.seconds == self._told_s or here().rank:  # the others compile the same
            return ()
        self._told_s = self.seconds
        return (
            f"{COMPILED} {_count(self._graphs, 'graph')} of {_count(len(self.blocks), 'block')} in "
            f"{self.seconds:.1f} s, with {_count(self._again, 'recompilation')} and "
            f"{_count(self._breaks, 'graph break')}",
        )

    def _function(self, block: nn.Module) -> Callable[..., Any]:
        from ...internals import torch_compile_internals as compiler

        written = type(block).forward
        if written not in self._compiled:
            self._compiled[written] = compiler.compiled(_copied(written), BACKEND)
        return self._compiled[written]

    def _call(self, compiled: Callable[..., Any], most: int, *args: Any, **kwargs: Any) -> Any:
        """Call a block by the compiled form of its forward, which is compiled at most so often."""
        from ...internals import torch_compile_internals as compiler

        self._called = True
        with Recorder.current.not_inside() if Recorder.current else nullcontext(), compiler.strict(most):
            return compiled(*args, **kwargs)

    def _ended(self, one: Compilation) -> None:
        self.seconds += one.seconds
        self._again += one.again
        self._graphs += one.graphs
        self._breaks += one.breaks
        here().others_late_s += one.seconds  # they compile as well


class _Forward(InsteadOfForward):
    """In place of a block's ``forward``: compiled, but in a block that is compiled itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch."""
        if is_compiling():
            return type(self._module).forward(self._module, *args, **kwargs)
        return super().__call__(self._module, *args, **kwargs)


def _copied(function: Any) -> Any:
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _methods(blocks: list[nn.Module]) -> dict[type, dict[str, Any]]:
    """Functions by classes of modules: of most that are replaced torch takes no notice."""
    kinds = {kind for block in blocks for module in block.modules() for kind in type(module).__mro__}
    return {kind: {name: one for name, one in vars(kind).items() if isinstance(one, _METHODS)} for kind in kinds}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
