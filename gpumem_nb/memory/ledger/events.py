"""Allocations and releases of one step, as the allocator, tensors alone or a dry run of an update tell them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...internals.torch_dispatch_internals import LookingMode
from ...internals.torch_internals import address
from ...shared.allocator_settings import DEFAULT, AllocatorSettings
from ..tensors import PLAIN, storage_of, tensors_in

_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True)
class Base:
    """The allocations that were alive when a log began.

    Attributes:
        foreign_bytes: the part that other threads had asked for.
        layout: where it lay in the caching allocator's segments, as :func:`..virtual_gpu.gpu.replay` takes it;
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


@dataclass(frozen=True, slots=True)
class Lying:
    """Where everything lies in the caching allocator's segments.

    Attributes:
        layout: as :class:`Base` has it.
        numbers: of the allocations in it, by the address where each begins.
    """

    layout: NDArray[np.int64]
    numbers: dict[int, int]


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
        lying: returns where everything lies now, or ``None`` where that cannot be said.
    """

    exact = False

    def __init__(
        self,
        device: torch.device,
        requested: Callable[[], tuple[int, int]],
        allocator: AllocatorSettings = DEFAULT,
        lying: Callable[[], Lying | None] = lambda: None,
    ) -> None:
        self._device = device
        self._requested = requested
        self._allocator = allocator
        self._lying = lying
        self._at: dict[int, int] = {}  # allocations from before that were not met yet, by address
        self._known: dict[int, Known] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._params: dict[int, int] = {}
        self._casts: dict[int, int] = {}
        self._logging = False

    def begin(self, params: Sequence[Tensor]) -> Base:
        """Log from now on."""
        self._known, self._rows, self._logging = {}, [], True
        self._params, self._casts = {id(param): index for index, param in enumerate(params)}, {}
        lying = self._lying()
        if lying is None or not all(self._lies_there(param, lying) for param in params):
            return Base(self._requested()[0], 0, allocator=self._allocator)
        self._at = dict(lying.numbers)
        return Base(self._requested()[0], 0, lying.layout, self._allocator)

    def _lies_there(self, tensor: Tensor, lying: Lying) -> bool:
        """Return whether a tensor is where it should be: what lies elsewhere would be counted a second time."""
        storage = storage_of(tensor) if tensor.device == self._device else None
        return storage is None or not storage.nbytes() or storage.data_ptr() in lying.numbers

    def watching(self) -> AbstractContextManager[object]:
        """Shows the log every operator's tensors."""
        return _Operators(self)

    def allocation(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; 0 for one of another device."""
        return self._number(tensor, new=False)

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of what went into an operator and what came out."""
        for value in (*args, *kwargs.values()) if kwargs else args:  # with every operator: one by one is quicker
            if isinstance(value, Tensor):
                self.known(value)
            elif type(value) not in PLAIN:
                for tensor in tensors_in(value):
                    self.known(tensor)
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            number = self._number(tensor, new=True)
            if operator is _TO_COPY and id(args[0]) in self._params:
                self._casts[number] = self._params[id(args[0])]

    def _number(self, tensor: Tensor, new: bool) -> int:
        known = self.known(tensor, new)
        return known.number if known else 0

    def known(self, tensor: Tensor, new: bool = False) -> Known | None:
        """Return the storage of a tensor, ``new`` if an operator has made it; ``None`` for one of another device."""
        storage = storage_of(tensor) if tensor.device == self._device else None
        if storage is None:
            return None
        known = self._known.get(address(storage))
        if known is None or known() is None:
            known = Known(storage, self._died)
            known.number = self._new_number() if new else self._known_before(storage)
            known.nbytes = storage.nbytes()
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
        self._known, self._at = {}, {}
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3)
        none = np.zeros(len(rows), dtype=np.int64)
        peak = self._requested()[1]
        return Events(rows[:, 0], rows[:, 1], rows[:, 2], none.astype(np.bool_), none, self._casts, peak)

    def _new_number(self) -> int:
        return new_number()

    def _known_before(self, storage: torch.UntypedStorage) -> int:
        """Return the number of what an operator is given and has not been seen before."""
        return (self._at.pop(storage.data_ptr(), 0) if self._at else 0) or new_number()

    def _died(self, known: Known) -> None:
        if self._logging:
            self._note(known.number, -known.nbytes)

    def _note(self, number: int, change: int) -> None:
        self._rows.append((number, change, time.perf_counter_ns()))


_numbers = itertools.count(1)


def new_number() -> int:
    """Return a number that no allocation of this process has yet."""
    return next(_numbers)


class _Operators(LookingMode):
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


_FIRST = 2**48  # above all numbers of allocations that were made
_NUMBER = 8  # bytes of a Python number
_OF_NUMBERS = {"rsub", "eq", "ne", "lt", "le", "gt", "ge"} | {
    f"{many}{name}{end}" for name in ("add", "sub", "mul", "div") for many in ("", "_foreach_") for end in ("", "_")
}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The allocations and releases of a dry run of an update.

    Attributes:
        rows: number of the allocation, bytes (negative for a release) and the operator call, counted from 1.
        owned: the optimizer's state afterwards: the allocation's number, its bytes, and the weight it is kept for.
        waiting_bytes: of that state what waits in host memory then, beside the allocations.
    """

    rows: tuple[tuple[int, int, int], ...] = ()
    owned: tuple[tuple[int, int, Tensor], ...] = ()
    waiting_bytes: int = 0

    @property
    def highest_bytes(self) -> int:
        """Return by how much live bytes grow at most."""
        return int(np.cumsum([0, *(nbytes for _, nbytes, _ in self.rows)]).max())

    def of_new(self) -> Foreseen:
        """Return the same with only that state owned which the update makes."""
        made = {number for number, nbytes, _ in self.rows if nbytes > 0}
        return replace(self, owned=tuple(one for one in self.owned if one[0] in made))

    def after(self, events: Events, live_bytes: int, now_ns: int, update_s: float) -> Events:
        """Return the events of a step with those of its update behind them.

        Args:
            events: of the step until then.
            live_bytes: when the step began.
            now_ns: when it came to the update, on the clock of ``time.perf_counter_ns``.
            update_s: how long updates take.
        """
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 3)
        calls_known = bool(events.call.any())
        last = int(events.call.max(initial=0))
        times = now_ns + np.linspace(0, update_s * 1e9, len(rows)).astype(np.int64)
        live = live_bytes + int(events.bytes.sum())
        return Events(
            np.concatenate([events.allocation, rows[:, 0]]),
            np.concatenate([events.bytes, rows[:, 1]]),
            np.concatenate([events.time_ns, times]),
            np.concatenate([events.foreign, np.zeros(len(rows), dtype=np.bool_)]),
            np.concatenate([events.call, (rows[:, 2] + last) * calls_known]),
            events.casts,
            max(events.live_peak_bytes, live + self.highest_bytes),
        )


class UpdateLog(TensorLog):
    """Events of an update on fake tensors, operator call by operator call.

    Args:
        device: that the fake tensors are said to be on.
        allocation: gives the number of the allocation in which a real tensor lies, 0 for none.
    """

    def __init__(self, device: torch.device, allocation: Callable[[Tensor], int]) -> None:
        super().__init__(device, lambda: (0, 0))
        self._of_real = allocation
        self._made = itertools.count(_FIRST)
        self._calls = self._call = 0  # how many there were, and the number of the one under way
        self.begin([])

    def stands_for(self, fake: Tensor, real: Tensor) -> None:
        """Take note that the memory of a fake tensor is that of a real one, which the update finds there."""
        if (known := self.known(fake)) is not None:
            known.number = self._of_real(real)

    @contextmanager
    def operator(self, operator: Any, args: Sequence[Any]) -> Iterator[None]:
        """Inside, an operator runs."""
        self._calls += 1
        self._call = self._calls
        pieces = [(self._new_number(), nbytes) for nbytes in self._numbers(operator, args)]
        for number, nbytes in pieces:
            self._note(number, nbytes)
        try:
            yield
        finally:
            for number, nbytes in pieces:
                self._note(number, -nbytes)
            self._call = 0

    def foreseen(self, owned: Iterable[tuple[Tensor, Tensor]]) -> Foreseen:
        """Return what was seen; ``owned`` are the optimizer's state and the real weights that it is kept for."""
        found = [(self._number(fake, new=False), fake.untyped_storage().nbytes(), weight) for fake, weight in owned]
        self._logging = False
        self._known = {}
        return Foreseen(tuple(self._rows), tuple(one for one in found if one[0]))

    def _numbers(self, operator: Any, args: Sequence[Any]) -> list[int]:
        """Bytes of a number that the CPU's kernels compute with as a tensor: as it comes, and in their own type."""
        if self._device.type != "cpu" or len(args) < 2 or _name(operator) not in _OF_NUMBERS:
            return []
        first = next(tensors_in(args[0]), None)
        number = args[1][0] if isinstance(args[1], (list, tuple)) and args[1] else args[1]
        if first is None or not isinstance(number, (bool, int, float)):
            return []
        return [_NUMBER, *([first.element_size()] if first.dtype is not torch.float64 else [])]

    def _new_number(self) -> int:
        return next(self._made)

    def _known_before(self, storage: torch.UntypedStorage) -> int:
        return 0  # of what no real tensor is known for, a release says nothing

    def _note(self, number: int, change: int) -> None:
        if number:
            self._rows.append((number, change, self._call))


def _name(operator: Any) -> str:
    """Of an operator, without that of its overload."""
    return str(operator.name()).removeprefix("aten::").partition(".")[0]
