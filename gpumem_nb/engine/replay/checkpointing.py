"""Activation checkpointing, put around a model from outside and taken off again without a trace.

Consecutive blocks form segments. While a segment's forward runs, every tensor that autograd wants to save is dropped;
what is kept is how each block was called. The first time backward needs one of them, the segment is run once more from
its inputs and the tensors are handed out (Chen et al. 2016, arXiv 1604.06174). Because calls are recorded as they
happen, the model's own code between the blocks, its keyword arguments and tuples stay as they are; torch's own
``checkpoint`` wraps one function and could only join blocks by rewriting the model's forward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...internals.torch_internals import (
    func_transforms_allowed,
    hooks_are_allowed,
    is_compiled,
    not_compiled,
    uncompiled,
)
from ...shared.errors import WorkloadError
from .block_state import BlockState, Draws
from .offload import Offload
from .segment import Segment
from .selective import Run, Selection

SEGMENT_BLOCKS: dict[str, Callable[[int], int]] = {
    "selective": lambda count: 1,
    "blocks": lambda count: 1,
    "sqrt": lambda count: math.ceil(math.sqrt(count)),
}


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model in order of definition, or its direct children when nothing repeats."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        repeats = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in children}) == 1
        if repeats and all(next(child.children(), None) is not None for child in children):
            found.extend(children)
            return
        for child in children:
            visit(child)

    visit(model)
    if found:
        return found
    layers = list(model.children())
    if len(layers) == 1:
        return find_blocks(layers[0]) or layers
    return layers


class Checkpointing:
    """Checkpointing of one model under one mode, on from construction until :meth:`take_off`.

    Training has it on inside of its steps only: in cells the model is a plain one, to call, to copy and to pickle.

    Attributes:
        blocks: those that are checkpointed.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        mode: str,
        selection: Selection | None = None,
        offload: Callable[[], Offload | None] = lambda: None,
    ) -> None:
        """Begin to checkpoint these blocks; a selection says what they keep, and offloading where their inputs wait.

        Raises:
            WorkloadError: there are none, or what is compiled cannot be computed again so.
        """
        if not blocks:
            raise WorkloadError(
                f"checkpointing={mode} needs a model with sub-modules to wrap; this one has none. "
                "Use checkpointing=none or name them in Workload(blocks=...)."
            )
        _refuse_what_is_compiled_around(model, blocks)
        self._selection, self._offload = selection, offload
        if selection:
            selection.take(blocks)
        self._length = SEGMENT_BLOCKS[mode](len(blocks))
        self._mode = mode
        self.blocks = blocks
        self._entered = False
        self._draws = Draws()
        self._last_index = -1
        self._last: weakref.ref[Segment] | None = None  # weak: only the graph keeps a segment's inputs alive
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._open: tuple[Segment, ExitStack] | None = None
        self._states = [BlockState(block) for block in blocks]
        self._hooks = [self._hooks_of(index, state) for index, state in enumerate(self._states)]
        self._handles: list[RemovableHandle] = []  # of the hooks that are on the model now
        self._configs = generation_configs(model)
        self._caching: list[Any] = []  # of these configurations, those that cache when checkpointing is taken off
        self.put_on()

    def put_on(self) -> None:
        """Checkpoint whatever the model computes from now on."""
        for block, (enter, leave) in zip(self.blocks, self._hooks, strict=True):
            # First and last of all hooks, so that a replay runs the others on the same inputs.
            self._handles += [
                block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                block.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]
        self._caching += switched_off(self._configs)

    def take_off(self) -> None:
        """Leave the model as it was. A graph that was made before can still be run backward."""
        for handle in self._handles:
            handle.remove()
        for config in self._caching:
            config.use_cache = True
        self._handles, self._caching = [], []
        self._draws.forget()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have it on inside."""
        if self._handles:
            yield
            return
        if self._selection:
            self._selection.begin()
        self.put_on()
        try:
            yield
        finally:
            self.take_off()

    def finished(self) -> None:
        """A forward and backward of the model is over.

        Raises:
            WorkloadError: it called none of the blocks, so nothing was checkpointed.
        """
        if not self._entered:
            raise WorkloadError(
                f"checkpointing={self._mode} has no effect: forward calls none of the {len(self.blocks)} blocks; the "
                f"first is a {type(self.blocks[0]).__name__}. Use checkpointing=none, or name modules that forward "
                "calls in Workload(blocks=...)."
            )

    @property
    def changed(self) -> list[str] | None:
        """Return what blocks change when they run, by name, except batch norm statistics; ``None`` before they ran."""
        if not self._entered:
            return None
        drawn = ["random numbers of Python or NumPy"] * self._draws.seen
        return drawn + [name for state in self._states for name in (*state.changing.names, *sorted(state.counted))]

    def abandon(self) -> None:
        """Forget a pass that was left half way: torch calls no hooks after a ``KeyboardInterrupt``."""
        Segment.replaying = None
        if self._open:
            self._open[1].close()
        for segment in list(self._segments):
            segment.forget()
        self._draws.forget()
        self._open = self._last = None

    def remove(self) -> None:
        """Take everything off the model again, for good."""
        self.abandon()
        self.take_off()

    def _hooks_of(self, index: int, state: BlockState) -> tuple[_Hook, _Hook]:
        def enter(args: Any, kwargs: Any) -> None:
            self._enter(index, state, args, kwargs)

        def leave(args: Any, kwargs: Any, output: Any) -> None:
            self._leave(state.block, output)

        return _Hook(state.block, enter), _Hook(state.block, leave)

    @property
    def _running(self) -> Segment | None:
        return Segment.replaying or (self._open[0] if self._open else None)

    def _enter(self, index: int, state: BlockState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if running := self._running:
            running.depth += running.block is state.block
        if running or not torch.is_grad_enabled() or not hooks_are_allowed():
            return
        follows = index == self._last_index + 1 and index % self._length != 0
        segment = (self._last() if follows and self._last else None) or Segment(self.on, self._offload())
        run = self._selection.run_of(index, state.block) if self._selection else Run()
        segment.record(state, self._draws, args, kwargs, run)
        hooks = ExitStack()
        hooks.enter_context(func_transforms_allowed())
        hooks.enter_context(segment.hooks())
        hooks.enter_context(run.running())
        self._segments.add(segment)
        self._last_index, self._last, self._open = index, weakref.ref(segment), (segment, hooks)
        self._entered = True

    def _leave(self, block: nn.Module, output: Any) -> None:
        running = self._running
        if not running or running.block is not block:
            return
        running.depth -= 1
        if running.depth:
            return
        if Segment.replaying:
            Segment.replaying.returned_again(output)
        elif self._open:
            segment, hooks = self._open
            self._open = None
            hooks.close()
            segment.returned(output)


class _Hook:
    """A hook on one block. A copy of that block, also one that was pickled, has a hook that does nothing instead."""

    def __init__(self, block: nn.Module, act: Callable[..., None]) -> None:
        self._block = block
        self._act = not_compiled(act)

    def __call__(self, block: nn.Module, *told: Any) -> None:
        if block is self._block:  # not one that was copied shallowly, and shares its hooks
            self._act(*told)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and is read without this package


def _refuse_what_is_compiled_around(model: nn.Module, blocks: list[nn.Module]) -> None:
    """A replay runs a block outside of what ``torch.compile`` made of its surroundings, and saves other tensors."""
    for module in filter(is_compiled, model.modules()):
        inside = {id(part) for part in module.modules() if part is not module}
        if any(id(block) in inside for block in blocks):
            name = type(uncompiled(module)).__name__
            raise WorkloadError(
                f"checkpointing cannot recompute blocks of the {name} that torch.compile compiled as a whole. Compile "
                "its blocks instead, each by block.compile(), or use checkpointing=none."
            )


def switched_off(configs: list[Any]) -> list[Any]:
    """Switch these caches off; returns the configurations of those that were on."""
    found = []
    for config in (config for config in configs if config.use_cache):
        with suppress(AttributeError):  # one that is frozen
            config.use_cache = False
            found.append(config)
    return found


def generation_configs(model: nn.Module) -> list[Any]:
    """Configurations by which Hugging Face models cache keys and values even in training; a replay would append.

    The decoder of an encoder-decoder has a configuration of its own.
    """
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if hasattr(config, "use_cache")]
