"""The allocations of a step on fake tensors, as a GPU's allocator would see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...internals.torch_dispatch_internals import TorchDispatchMode
from ...internals.torch_internals import address, backward_node, base_of, in_backward
from ...memory.ledger.events import Base, Events, Known, TensorLog, new_number
from ...memory.tensors import tensors_in
from ...shared.messages import Reading

_aten = torch.ops.aten
_CPU, _DEVICE = torch.device("cpu"), torch.ops.prim.device.default
_GEMMS = {getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")}
_WRITES = {  # into zeros that backward has made for that
    _aten.index_put.default,
    _aten.index_add.default,
    _aten.scatter.src,
    _aten.scatter_add.default,
}
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
Scratch = Callable[[Any, Any, Any], list[int]]
"""Bytes of the pieces that an operator takes inside, from the operator, its arguments and its result.

It gives them back before it returns.
"""
StandIn = Callable[[Tensor], Tensor | None]


class DryLog(TensorLog):
    """Events of the tensors that operators make, with what real kernels do otherwise than those of fake tensors.

    Where a tensor's gradient comes from several places (a residual connection, a tied weight, a further micro-batch),
    autograd adds in place to the first if no other code holds it, and never under a dispatch mode
    (torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``; ATen/TensorSubclassLikeUtils.h). There the first
    summand is released as soon as the sum is there, so the sum is taken to lie where that summand lay. A view is held
    by what it is a view of, and what a node's own formula adds up it has made itself: both stay apart. Backward of
    indexing writes into zeros, under a mode into a copy of them (torch/csrc/autograd/FunctionsManual.cpp,
    ``areAnyTensorSubclassLike``).

    cuBLAS asks torch's allocator for a workspace when a thread computes its first product, and keeps it: once in the
    thread that runs forward and once in that of backward (ATen/cuda/CublasHandlePool.cpp).

    Weights that have memory, such as those of a model that was there before, are taken for fake ones by each operator:
    what stands for a weight is that weight.

    Attributes:
        convolves: whether a convolution was seen.
        narrows: whether all convolutions gave 16-bit numbers.
        on_host: single numbers are in the host's memory for the moment.

    Args:
        held: bytes that are held by tensors, to be asked when a log begins.
        scratch: what operators use inside.
        gemm_workspace_bytes: each of cuBLAS's workspaces.
        stand_in: the fake tensor that stands for a real one; ``None`` for a fake one.
    """

    exact = True

    def __init__(self, held: Callable[[], int], scratch: Scratch, gemm_workspace_bytes: int, stand_in: StandIn) -> None:
        super().__init__(torch.device("cpu"), lambda: (held(), 0))
        self._scratch = scratch
        self._table: list[tuple[int, int, int, int]] = []
        self._call = 0
        self._taken: tuple[Known, Known] | None = None  # one, and another that may lie in its place
        self._makers: dict[int, tuple[int, int]] = {}  # the node that made an allocation in backward
        self._gemm_workspace_bytes = gemm_workspace_bytes
        self._stand_in = stand_in
        self._standing: dict[int, Tensor] = {}  # for real tensors, by their addresses
        self._gemms: set[bool] = set()  # whether backward ran, at each first one
        self.convolves = self.narrows = self.on_host = False

    def begin(self, params: Sequence[Tensor]) -> Base:
        """Log from now on."""
        self._table, self._call, self._taken, self._makers = [], 0, None, {}
        self._gemms, self._standing = set(), {}
        return super().begin(params)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, see every operator."""
        with _Watching(self):
            yield

    def given(self, args: Any) -> None:
        """Take note of what goes into an operator."""
        for tensor in tensors_in(args):
            if address(tensor) not in self._standing and (fake := self._stand_in(tensor)) is not None:
                self._standing[address(tensor)] = fake
                if known := self.known(tensor):
                    self._known[address(fake.untyped_storage())] = known

    def operated(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of what went into an operator and what came out."""
        self._call += 1
        if operator is _aten.convolution.default:
            self.narrows = result.dtype in _SIXTEEN_BIT and (self.narrows or not self.convolves)
            self.convolves = True
        if operator in _GEMMS and (backward := in_backward()) not in self._gemms:
            self._gemms.add(backward)
            self._note(new_number(), self._gemm_workspace_bytes)
        if self.on_host and isinstance(result, Tensor) and result.dim() == 0:
            return  # an optimizer counts its steps in the host's memory
        self.see(operator, args, kwargs, result)
        pieces = [(new_number(), nbytes) for nbytes in self._scratch(operator, args, result)]
        for number, nbytes in pieces:
            self._note(number, nbytes)
        for number, nbytes in pieces:
            self._note(number, -nbytes)
        if node := backward_node():
            if operator in _WRITES or (operator is _aten.add.Tensor and self._maker(args[0]) != node):
                self._may_be_in_place(args[0], result)
            for known in map(self.known, tensors_in(result)):
                if known:
                    self._makers.setdefault(known.number, node)

    def end(self) -> Events:
        """Return what happened since :meth:`begin`."""
        base = super().end()
        rows = np.array(self._table, dtype=np.int64).reshape(-1, 4)
        foreign = np.zeros(len(rows), dtype=np.bool_)
        live = np.cumsum(np.append(self._requested()[0], rows[:, 1]))
        return Events(rows[:, 0], rows[:, 1], rows[:, 2], foreign, rows[:, 3], base.casts, int(live.max()))

    def _maker(self, tensor: Tensor) -> tuple[int, int] | None:
        return self._makers.get(self.allocation(tensor))

    def _may_be_in_place(self, first: Tensor, result: Tensor) -> None:
        before, after = self.known(first), self.known(result)
        if before is None or after is None or before is after or base_of(first) is not None:
            return
        if (first.shape, first.dtype, before.nbytes) == (result.shape, result.dtype, after.nbytes):
            self._taken = before, after

    def _note(self, number: int, change: int) -> None:
        self._table.append((number, change, time.perf_counter_ns(), self._call))

    def _died(self, known: Known) -> None:
        if not self._logging:
            return
        before, after = self._taken or (None, None)
        if before is known and after and self._table[-1][:2] == (after.number, after.nbytes):
            self._table.pop()
            after.number, self._taken = known.number, None
            return
        self._table.append((known.number, -known.nbytes, time.perf_counter_ns(), 0))


class _Watching(TorchDispatchMode):
    """Shows every operator to a log."""

    def __init__(self, log: DryLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # two of three calls
            return _CPU
        kwargs = kwargs or {}
        self._log.given([args, kwargs])
        result = func(*args, **kwargs)
        self._log.operated(func, args, kwargs, result)
        return result


class DryDevice:
    """A device that a recorder can listen to; see :class:`gpumem_nb.memory.device.Listened`."""

    kind: Literal["virtual", "cuda"] = "virtual"

    def __init__(self, held: Callable[[], int], scratch: Scratch, gemm_workspace_bytes: int, stand_in: StandIn) -> None:
        self._held = held
        self._given = held, scratch, gemm_workspace_bytes, stand_in
        self.log = DryLog(*self._given)

    def event_log(self) -> DryLog:
        """Return a new log."""
        self.log = DryLog(*self._given)
        return self.log

    def reading(self) -> Reading:
        """Return what is held by tensors; nothing else is known of a device that is not there."""
        held = self._held()
        return Reading(held, held, held, held, None, None)

    def reset_peak(self) -> None:
        """Nothing to do: each log has its own peak."""


def held_by(tensors: Sequence[Any]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(list(tensors))]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())
