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
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...shared.errors import WorkloadError
from .segment import Segment

SEGMENT_BLOCKS: dict[str, Callable[[int], int]] = {
    "blocks": lambda count: 1,
    "sqrt": lambda count: math.ceil(math.sqrt(count)),
}


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model in order of definition, or its direct children when nothing repeats."""
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
    """Checkpointing of one model under one mode, active from construction to :meth:`remove`."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], mode: str) -> None:
        if not blocks:
            raise WorkloadError(
                f"checkpointing={mode} needs a model with sub-modules to wrap; this one has none. "
                "Use checkpointing=none or name them in Workload(blocks=...)."
            )
        self._length = SEGMENT_BLOCKS[mode](len(blocks))
        self._last_index = -1
        self._last: weakref.ref[Segment] | None = None  # weak: only the graph keeps a segment's inputs alive
        self._open: tuple[Segment, saved_tensors_hooks] | None = None
        self._hooks = []
        for index, block in enumerate(blocks):
            self._hooks.append(
                block.register_forward_pre_hook(
                    lambda block, args, kwargs, index=index: self._enter(index, block, args, kwargs), with_kwargs=True
                )
            )
            self._hooks.append(
                block.register_forward_hook(
                    lambda block, args, kwargs, output: self._leave(block, output), with_kwargs=True, always_call=True
                )
            )
        self._restore_cache = _switch_off_generation_cache(model)

    def abandon(self) -> None:
        """Forget a pass that was left half way: torch calls no hooks after a ``KeyboardInterrupt``."""
        Segment.replaying = False
        if self._open:
            self._open[1].__exit__()
        self._open = self._last = None

    def remove(self) -> None:
        """Take everything off the model again."""
        self.abandon()
        for hook in self._hooks:
            hook.remove()
        self._restore_cache()

    def _enter(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or Segment.replaying or self._open is not None:
            return
        follows = index == self._last_index + 1 and index % self._length != 0
        segment = (self._last() if follows and self._last else None) or Segment()
        segment.record(block, args, kwargs)
        hooks = saved_tensors_hooks(segment.pack, segment.unpack)
        hooks.__enter__()
        self._last_index, self._last, self._open = index, weakref.ref(segment), (segment, hooks)

    def _leave(self, block: nn.Module, output: Any) -> None:
        if self._open is None or Segment.replaying or self._open[0].block is not block:
            return
        segment, hooks = self._open
        self._open = None
        hooks.__exit__()
        segment.returned(output)


def _switch_off_generation_cache(model: nn.Module) -> Callable[[], None]:
    """Hugging Face models keep keys and values for generation even in training; a replay would append to them."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return lambda: None
    config.use_cache = False
    return lambda: setattr(config, "use_cache", True)
