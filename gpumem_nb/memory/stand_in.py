"""The virtual GPU's stand-in in Python, for machines where the allocator cannot be built."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..shared.messages import Reading
from ..shared.units import format_bytes
from .ledger.events import TensorLog
from .tensors import tensors_in, tensors_of_this_process
from .virtual_gpu.gpu import DEFAULT_LIMIT_BYTES


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that remembers what it was counted with."""

    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


class _Ledger:
    """Bytes of the CPU storages seen so far and still alive."""

    def __init__(self) -> None:
        self._live = 0
        self._watches: dict[int, _Watch] = {}
        # Storages die on any thread, also in the middle of a count: their deaths are only noted, and settled later.
        self._deaths: deque[_Watch] = deque()
        self.peak = 0

    def live(self) -> int:
        while self._deaths:
            watch = self._deaths.popleft()
            self._live -= watch.nbytes
            if self._watches.get(watch.address) is watch:
                del self._watches[watch.address]
        return self._live

    def see(self, values: Iterable[object]) -> int:
        """Count the storages of all tensors in ``values``, however nested, and return the live bytes."""
        self.live()
        for value in values:
            for tensor in tensors_in(value):
                self._see_storage(tensor)
        self.peak = max(self.peak, self._live)
        return self._live

    def reset_peak(self) -> None:
        self.peak = self.live()

    def _see_storage(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # fake tensors say cpu and hold no bytes
            return
        watch, nbytes = self._watches.get(storage._cdata), storage.nbytes()
        if watch is None or watch() is None:
            watch = _Watch(storage, self._deaths.append)
            watch.address, watch.nbytes = storage._cdata, 0
            self._watches[watch.address] = watch
        self._live += nbytes - watch.nbytes  # storages are also resized in place
        watch.nbytes = nbytes


class _Accounting(TorchDispatchMode):
    """Shows every operator's tensors to the ledger, and refuses the result that passes the limit."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_in = stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._stand_in.admits((args, kwargs, result)):
            del result  # or the traceback would keep it
            raise self._stand_in.out_of_memory(str(func))
        return result


class StandIn:
    """A virtual GPU without the C++ allocator: counts the storages of the tensors that training steps touch.

    It sees an operator's results only after the operator, on the thread inside ``step_scope()``, and tensors made
    elsewhere once a step uses them or the next idle reading finds them. ``reserved`` and ``device_used`` are not known.
    """

    def __init__(self, local_rank: int, memory_limit: int | None = None, *, why: str) -> None:
        self.kind: Literal["virtual", "cuda"] = "virtual"
        self.torch_device = torch.device("cpu")
        self.note = (
            f"A Python ledger stands in for the virtual GPU's allocator ({why}): it does not see memory inside "
            "operators or of other threads (Horovod's buffers), and knows no reserved bytes."
        )
        self._limit = memory_limit or DEFAULT_LIMIT_BYTES
        self.name = f"virtual GPU {local_rank} ({format_bytes(self._limit)}, stand-in)"
        self._enforced = True
        self._thread = threading.get_ident()
        self._live = 0
        self._stepped = False
        self._ledger = _Ledger()

    def reading(self) -> Reading:
        """The memory at this moment, in bytes; looks for tensors itself when no step has run since the last time."""
        if threading.get_ident() == self._thread:  # other threads get what was known last
            if not self._stepped:
                self._ledger.see(tensors_of_this_process())
            self._stepped = False
            self._live = self._ledger.live()
        return Reading(self._live, self._ledger.peak, None, None, None, self._limit or None)

    def room(self) -> None:
        """Nothing: reserved bytes are not known."""

    def use(self) -> None:
        """Nothing: there is no device that NVML could read."""

    def reset_peak(self) -> None:
        """Let the peak count from here."""
        self._ledger.reset_peak()

    def set_limit(self, limit: int | None) -> None:
        """Move the limit, in bytes; ``None`` for none."""
        self._limit = limit or 0

    def empty_cache(self) -> None:
        """Nothing to do: reserved bytes are not known."""

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Inside, the limit is not enforced."""
        before, self._enforced = self._enforced, False
        try:
            yield
        finally:
            self._enforced = before

    def communicates_on(self, threads: Collection[int]) -> None:
        """Nothing to do: other threads are not seen."""

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """Account for the operators inside; the first time also for everything that existed before."""
        if not self._stepped:
            self._ledger.see(tensors_of_this_process())
        self._stepped = True
        with _Accounting(self):
            yield

    def event_log(self) -> TensorLog:
        """The tensors that come and go; memory inside operators is not seen."""
        return TensorLog(self.torch_device, self._counted)

    def _counted(self) -> tuple[int, int]:
        now = self.reading()
        return now.live_bytes, now.live_peak_bytes

    def admits(self, values: Iterable[object]) -> bool:
        """Count the tensors among ``values``; false when the limit is enforced and they pass it."""
        live = self._ledger.see(values)
        return not (self._enforced and self._limit and live > self._limit)

    def out_of_memory(self, operator: str) -> torch.OutOfMemoryError:
        """The error that a GPU of this size would have raised."""
        held, capacity = format_bytes(self._ledger.live()), format_bytes(self._limit)
        return torch.OutOfMemoryError(
            f"virtual GPU out of memory. The result of {operator} does not fit. The virtual GPU has a total "
            f"capacity of {capacity}, of which {held} is allocated by tensors."
        )
