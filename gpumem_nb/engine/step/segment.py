"""One segment of checkpointed blocks: how each was called, and the recomputation of what backward asks for."""

from __future__ import annotations

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
