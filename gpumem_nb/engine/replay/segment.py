"""One segment of checkpointed blocks: how each was called, and the recomputation of what backward asks for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...internals.torch_internals import dynamo_is_there, func_transforms_allowed, not_compiled, version
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import mapped, tensors_in
from .block_state import (
    OTHER_BLOCKS,
    SOMETHING_ELSE,
    BlockState,
    Draws,
    Fingerprint,
    SavedTensor,
    Seen,
    cannot,
    undone_afterwards,
)
from .offload import Aside, Offload
from .selective import Run


class _Slot:
    """Stands in the graph for one dropped tensor, or holds a kept one. While it lives, that may still be asked for."""

    __slots__ = ("__weakref__", "dtype", "index", "kept", "shape")

    def __init__(self, index: int, tensor: Tensor, keep: bool) -> None:
        self.index, self.shape, self.dtype = index, tensor.shape, tensor.dtype
        self.kept = SavedTensor.of(tensor) if keep else None


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
    seen: Seen
    run: Run
    fingerprint: Fingerprint | None = None


class _Replayed(Exception):
    """Everything that backward still needs has been recomputed."""


class Segment:
    """The recorded calls of consecutive blocks, and the tensors that they saved.

    Args:
        on: has the hooks on the model that tell of each call; a replay needs them.
        offload: puts the inputs of blocks aside; ``None``: they stay.

    Attributes:
        replaying: the one that is recomputed just now.
        depth: how often the block that runs was entered, and not left: it may call itself.
    """

    replaying: Segment | None = None

    def __init__(self, on: Callable[[], AbstractContextManager[None]], offload: Offload | None) -> None:
        self._on, self._offload = on, offload
        self._calls: list[_Call] = []
        self._slots: list[weakref.ref[_Slot]] = []
        self._recomputed: dict[int, Tensor] = {}
        self._replayed = False
        self._outputs: list[tuple[weakref.ref[Tensor], int, _Link]] = []
        self.depth = 0
        self._running = False  # the block called last
        self._count = 0  # tensors saved in a replay
        self._last: int | None = None  # after so many, the replay has done its work
        self._results: list[list[Tensor]] = []  # of calls in a replay

    @property
    def block(self) -> nn.Module:
        """The block that runs, or did last."""
        calls = self._calls[: len(self._results) + 1] if Segment.replaying is self else self._calls
        return calls[-1].block

    def record(self, state: BlockState, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> None:
        """Note how a block is about to be called, and what is kept of that."""
        self._running, self.depth = True, 1
        seen = Seen(state, draws, (args, kwargs))
        hold = _alike_for_alike(self._hold)  # a block may ask whether two of its arguments are one tensor
        held_args, held_kwargs = _map_tensors(hold, (args, kwargs))
        self._calls.append(_Call(state.block, held_args, held_kwargs, _ambient_context(), seen, run))

    def returned(self, output: Any) -> None:
        """Note what the block called last gave: a later block that gets the same tensor need not hold it.

        Raises:
            WorkloadError: the block changed something by which it cannot be run a second time.
        """
        self._running = False
        if output is None:  # what torch tells of a block that raised
            return
        number, call = len(self._calls) - 1, self._calls[-1]
        call.run.returned(output)
        for index, tensor in enumerate(tensors_in(output)):
            self._outputs.append((weakref.ref(tensor), version(tensor), _Link(number, index)))
        call.seen.returned()
        if call.seen.compared:
            call.fingerprint = Fingerprint(output, len(self._slots))

    def returned_again(self, output: Any) -> None:
        """Note what a block gave that is run once more.

        Raises:
            WorkloadError: it did something else than the first time.
        """
        if output is None:
            return
        call = self._calls[len(self._results)]
        self._results.append(list(tensors_in(output)))
        if call.fingerprint and not call.fingerprint.is_of(output, self._count):
            raise cannot(SOMETHING_ELSE)

    def forget(self) -> None:
        """Let go of everything: the graph that would ask for it was given up."""
        self._calls, self._outputs, self._recomputed = [], [], {}
        for slot in filter(None, (reference() for reference in self._slots)):
            slot.kept = None

    def _hold(self, tensor: Tensor) -> SavedTensor | Aside | _Link:
        for reference, seen, link in self._outputs:
            if reference() is tensor and version(tensor) == seen:
                return link
        aside = self._offload.put_aside(tensor) if self._offload else None
        return aside or SavedTensor.of(tensor)

    def hooks(self) -> saved_tensors_hooks:
        """Inside them, a block runs whose tensors are dropped."""
        return saved_tensors_hooks(self._uncompiled(Segment.pack), self._uncompiled(Segment.unpack))

    def _uncompiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_uncompiled(method, dynamo_is_there()), self)

    def pack(self, tensor: Tensor) -> _Slot:
        """Drop a tensor that autograd wants to save, unless it is kept."""
        slot = _Slot(len(self._slots), tensor, self._calls[-1].run.holds(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """Return the kept tensor, or the dropped one, recomputed.

        Raises:
            WorkloadError: it cannot be recomputed.
        """
        if self._running:
            raise cannot("it computes gradients in its own forward", OTHER_BLOCKS)
        if not self._replayed or (slot.kept is None and slot.index not in self._recomputed):
            self.replay()
        if slot.kept is not None:
            return slot.kept.get()
        tensor = self._recomputed.pop(slot.index, None)
        if tensor is None or (tensor.shape, tensor.dtype) != (slot.shape, slot.dtype):
            raise cannot(SOMETHING_ELSE)
        return tensor

    def _is_wanted(self, slot: _Slot | None) -> bool:
        return slot is not None and slot.kept is None

    def keep(self, tensor: Tensor) -> None:
        """Keep a recomputed tensor, if backward still needs it."""
        index = self._count
        if index < len(self._slots) and self._is_wanted(self._slots[index]()):
            self._recomputed[index] = tensor.detach()
            if Recorder.current:
                Recorder.current.saved(tensor)
        self._count += 1
        if self._count == self._last:
            raise _Replayed

    def replay(self) -> None:
        """Run the segment once more and keep what backward still needs."""
        self._replayed = True
        self._count, self._results, self.depth = 0, [], 0
        # What follows the last tensor that is needed is of use for comparing only.
        wanted = [index for index, slot in enumerate(self._slots, 1) if self._is_wanted(slot())]
        self._last = None if self._calls[-1].fingerprint else max(wanted, default=0)
        if wanted:
            self._run_again()
        for call in self._calls:
            call.run.let_go()

    def _run_again(self) -> None:

        def resolve(value: SavedTensor | Aside | _Link) -> Tensor:
            return self._results[value.call][value.output] if isinstance(value, _Link) else value.get()

        Segment.replaying = self
        try:
            with (
                self._on(),
                undone_afterwards([call.seen for call in self._calls]),
                func_transforms_allowed(),
                saved_tensors_hooks(self._uncompiled(Segment.keep), _never),
            ):
                for call in self._calls:
                    with call.context():
                        call.seen.enter()
                        args, kwargs = _map_held(_alike_for_alike(resolve), (call.args, call.kwargs))
                        with call.run.again():
                            call.block(*args, **kwargs)
        except _Replayed:
            pass
        finally:
            Segment.replaying, self._results = None, []


@cache
def _uncompiled(function: Callable[..., Any], dynamo: bool) -> Callable[..., Any]:
    return not_compiled(function)


def _never(_: Any) -> Tensor:
    raise AssertionError("the replay's graph is never run backward")


def _ambient_context() -> Callable[[], ExitStack]:
    """Return what torch keeps around a call that its result depends on: gradients on, and autocast."""
    device_type = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    autocast: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device_type, **autocast))
        return stack

    return enter


def _alike_for_alike(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives the same object again for the same object, as long as that is held."""
    given: dict[int, Any] = {}

    def give(value: Any) -> Any:
        if id(value) not in given:
            given[id(value)] = function(value)
        return given[id(value)]

    return give


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    return mapped(Tensor, function, value)


def _map_held(function: Callable[[Any], Tensor], value: Any) -> Any:
    return mapped((SavedTensor, Aside, _Link), function, value)
