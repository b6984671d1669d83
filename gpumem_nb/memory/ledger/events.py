"""Allocations and releases of one step, as the virtual GPU's allocator or tensors alone tell them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...internals.torch_internals import TorchDispatchMode, address
from ...shared.allocator_settings import DEFAULT, AllocatorSettings
from ..tensors import tensors_in


@dataclass(frozen=True, slots=True)
class Base:
    """The allocations that were alive when a log began.

    Attributes:
        foreign_bytes: the part that other threads had asked for.
        layout: where it lay in the caching allocator's segments, as :func:`..virtual_gpu.replay.replay` takes it;
            empty where that is not known.
        allocator: how the caching allocator is set.
    """

    live_bytes: int
    foreign_bytes: int
    layout: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    allocator: AllocatorSettings = DEFAULT


@dataclass(frozen=True, slots=True)
class Events:
    """A log, one element an event.

    Attributes:
        allocation: which one; the same number for its release.
        bytes: negative for a release.
        time_ns: on the clock of ``time.perf_counter_ns``.
        foreign: whether a thread of another library (Horovod) had asked for it.
        call: the outermost operator call in which it happened, numbered from 1; 0 outside of operators or not known.
        casts: allocations that are copies of a parameter in another type, each with the parameter's index.
        live_peak_bytes: the highest live bytes meanwhile, as tensors and operators asked for them.
    """

    allocation: NDArray[np.int64]
    bytes: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    foreign: NDArray[np.bool_]
    call: NDArray[np.int64]
    casts: dict[int, int]
    live_peak_bytes: int


class EventLog(Protocol):
    """The source of a device's events.

    Attributes:
        exact: whether every allocation is seen, also those inside operators and of other threads.
    """

    exact: bool

    def begin(self, params: Sequence[Tensor]) -> Base:
        """Log from now on, on the thread that computes; copies of these parameters are told from other tensors."""
        ...

    def watching(self) -> AbstractContextManager[object]:
        """Return what must be around the computation."""
        ...

    def allocation(self, tensor: Tensor) -> int:
        """Return the number of the allocation in which a tensor lies; 0 for one that is not the device's."""
        ...

    def end(self) -> Events:
        """Return what happened since :meth:`begin`."""
        ...


class TensorLog:
    """Events of the tensors that are shown to it; a storage is released when it is freed, on any thread.

    For devices whose allocator cannot be listened to at the cost of a sampled step.

    Args:
        device: whose tensors are meant.
        requested: the live bytes that were asked for, now and at their highest since the peak was reset.
        allocator: how the device's caching allocator is set.
    """

    exact = False

    def __init__(
        self,
        device: torch.device,
        requested: Callable[[], tuple[int, int]],
        allocator: AllocatorSettings = DEFAULT,
    ) -> None:
        self._device = device
        self._requested = requested
        self._allocator = allocator
        self._known: dict[int, Known] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._params: dict[int, int] = {}
        self._casts: dict[int, int] = {}
        self._logging = False

    def begin(self, params: Sequence[Tensor]) -> Base:
        """Log from now on."""
        self._known, self._rows, self._logging = {}, [], True
        self._params, self._casts = {id(param): index for index, param in enumerate(params)}, {}
        return Base(self._requested()[0], 0, allocator=self._allocator)

    def watching(self) -> AbstractContextManager[object]:
        """Shows the log every operator's tensors."""
        return _Operators(self)

    def allocation(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; 0 for one of another device."""
        return self._number(tensor, new=False)

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of what went into an operator and what came out."""
        for tensor in tensors_in([args, kwargs]):
            self._number(tensor, new=False)
        for tensor in tensors_in(result):
            number = self._number(tensor, new=True)
            if operator is torch.ops.aten._to_copy.default and id(args[0]) in self._params:
                self._casts[number] = self._params[id(args[0])]

    def _number(self, tensor: Tensor, new: bool) -> int:
        known = self.known(tensor, new)
        return known.number if known else 0

    def known(self, tensor: Tensor, new: bool = False) -> Known | None:
        """Return the storage of a tensor, ``new`` if an operator has made it; ``None`` for one of another device."""
        if tensor.layout is not torch.strided or tensor.device != self._device:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(address(storage))
        if known is None or known() is None:
            known = Known(storage, self._died)
            known.number, known.nbytes = self._new_number() if new else self._known_before(), storage.nbytes()
            self._known[address(storage)] = known
            if new:
                self._note(known.number, known.nbytes)
        elif change := storage.nbytes() - known.nbytes:  # storages are also resized in place
            self._note(known.number, change)
            known.nbytes += change
        return known

    def end(self) -> Events:
        """Return what happened since :meth:`begin`."""
        self._logging = False
        self._known = {}
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3)
        none = np.zeros(len(rows), dtype=np.int64)
        peak = self._requested()[1]
        return Events(rows[:, 0], rows[:, 1], rows[:, 2], none.astype(np.bool_), none, self._casts, peak)

    def _new_number(self) -> int:
        return new_number()

    def _known_before(self) -> int:
        """Return the number of what an operator is given and has not been seen before."""
        return new_number()

    def _died(self, known: Known) -> None:
        if self._logging:
            self._note(known.number, -known.nbytes)

    def _note(self, number: int, change: int) -> None:
        self._rows.append((number, change, time.perf_counter_ns()))


_numbers = itertools.count(1)


def new_number() -> int:
    """Return a number that no allocation of this process has yet."""
    return next(_numbers)


class _Operators(TorchDispatchMode):
    """Shows every operator's tensors to a log."""

    def __init__(self, log: TensorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._log.see(func, args, kwargs, result)
        return result


class Known(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that remembers its number and bytes."""

    __slots__ = ("nbytes", "number")
    number: int
    nbytes: int
