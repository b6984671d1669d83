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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...internals.torch_internals import batch_norms, buffers_by_name, version
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.errors import WorkloadError

SEGMENT_BLOCKS: dict[str, Callable[[int], int]] = {
    "blocks": lambda count: 1,
    "sqrt": lambda count: math.ceil(math.sqrt(count)),
    "all": lambda count: count,
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


class _Slot:
    """Stands in the graph for one dropped tensor. While it lives, the tensor may still be asked for."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that came into the segment from outside, and the version it had."""

    tensor: Tensor
    version: int
    requires_grad: bool

    def get(self) -> Tensor:
        if version(self.tensor) != self.version:
            raise WorkloadError(
                "checkpointing cannot recompute a block: its input was changed in place after the block used it. "
                "Use checkpointing=none or replace the in-place operation in the model."
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _Link:
    """A tensor that an earlier call of the same segment returned: not held, computed again."""

    call: int
    output: int


@dataclass(slots=True)
class _Call:
    block: nn.Module
    args: Any
    kwargs: Any
    context: Callable[[], ExitStack]


class _Replayed(Exception):
    """Everything that backward still needs has been recomputed."""


class Segment:
    """The recorded calls of consecutive blocks, and the tensors that they saved."""

    replaying = False

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._slots: list[weakref.ref[_Slot]] = []
        self._recomputed: dict[int, Tensor] = {}
        self._outputs: list[tuple[weakref.ref[Tensor], int, _Link]] = []

    @property
    def block(self) -> nn.Module:
        """The block called last."""
        return self._calls[-1].block

    def record(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how a block is about to be called."""
        held_args, held_kwargs = _map_tensors(self._hold, (args, kwargs))
        self._calls.append(_Call(block, held_args, held_kwargs, _ambient_context()))

    def returned(self, output: Any) -> None:
        """Note what the block called last gave: a later block that gets the same tensor need not hold it."""
        call = len(self._calls) - 1
        for index, tensor in enumerate(tensors_in(output)):
            self._outputs.append((weakref.ref(tensor), version(tensor), _Link(call, index)))

    def _hold(self, tensor: Tensor) -> _Held | _Link:
        for reference, seen, link in self._outputs:
            if reference() is tensor and version(tensor) == seen:
                return link
        if Recorder.current:
            Recorder.current.saved(tensor)
        return _Held(tensor.detach(), version(tensor), tensor.requires_grad)

    def pack(self, tensor: Tensor) -> _Slot:
        """Drop a tensor that autograd wants to save."""
        slot = _Slot(len(self._slots))
        self._slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """The dropped tensor, recomputed."""
        if slot.index not in self._recomputed:
            self.replay()
        try:
            return self._recomputed.pop(slot.index)
        except KeyError:
            raise WorkloadError(
                "checkpointing cannot recompute a block: run a second time it did something else than the first time. "
                "Use checkpointing=none, or make the block depend on nothing but its inputs."
            ) from None

    def replay(self) -> None:
        """Run the segment once more and keep what backward still needs."""
        count = 0

        def keep(tensor: Tensor) -> None:
            nonlocal count
            if count < len(self._slots) and self._slots[count]() is not None:
                self._recomputed[count] = tensor.detach()
                if Recorder.current:
                    Recorder.current.saved(tensor)
            count += 1
            if count == len(self._slots):
                raise _Replayed

        outputs: list[list[Tensor]] = []

        def resolve(value: _Held | _Link) -> Tensor:
            return value.get() if isinstance(value, _Held) else outputs[value.call][value.output]

        Segment.replaying = True
        try:
            with saved_tensors_hooks(keep, _never), torch.random.fork_rng(devices=_cuda_devices()):
                for call in self._calls:
                    with call.context(), _copied_statistics(call.block):
                        args, kwargs = _map_held(resolve, (call.args, call.kwargs))
                        outputs.append(list(tensors_in(call.block(*args, **kwargs))))
        except _Replayed:
            pass
        finally:
            Segment.replaying = False


def _never(_: Any) -> Tensor:
    raise AssertionError("the replay's graph is never run backward")


def _ambient_context() -> Callable[[], ExitStack]:
    """Everything around a call that its result depends on: gradients on, autocast, random numbers, batch statistics."""
    cuda_devices = _cuda_devices()
    device_type = "cuda" if cuda_devices else "cpu"
    autocast: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    cpu_state = torch.get_rng_state()
    cuda_states = [torch.cuda.get_rng_state(device) for device in cuda_devices]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device_type, **autocast))
        torch.set_rng_state(cpu_state)
        for device, state in zip(cuda_devices, cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)
        return stack

    return enter


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []


@contextmanager
def _copied_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norm below ``module`` counts into copies of its running statistics: a replay must not count twice."""
    statistics = [buffers_by_name(norm) for norm in batch_norms(module)]
    originals = [dict(named) for named in statistics]
    for named in statistics:
        named.update({name: None if buffer is None else buffer.clone() for name, buffer in named.items()})
    try:
        yield
    finally:
        for named, original in zip(statistics, originals, strict=True):
            named.update(original)


def _switch_off_generation_cache(model: nn.Module) -> Callable[[], None]:
    """Hugging Face models keep keys and values for generation even in training; a replay would append to them."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return lambda: None
    config.use_cache = False
    return lambda: setattr(config, "use_cache", True)


def _map(kind: Any, function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, kind):
        return function(value)
    if type(value) is dict:
        return {key: _map(kind, function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(kind, function, item) for item in value)
    return value


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    return _map(Tensor, function, value)


def _map_held(function: Callable[[Any], Tensor], value: Any) -> Any:
    return _map((_Held, _Link), function, value)
