"""Tensors of a GPU on their way through host memory, for ranks that Horovod lets reduce there.

Ranks that share a GPU, and any Horovod without NCCL, add gradients up on the host. Horovod alone copies every tensor on
the stream that computes, where backward waits for it, and back from a thread that waits for all of backward. Here a
group of tensors has page-locked memory that is made once, and is copied on a stream of its own while backward goes on.
It travels as one tensor (for each type), so Horovod neither agrees on many nor copies them into its fusion buffer.

Who waits for whom: the copying stream waits for what the computing stream was given so far; the process sends a group
once that copy is done; the results go back on the copying stream when the process takes them, and the computing stream
waits for that copy. So nothing needs ``record_stream``, which would let the caching allocator keep gradients for longer
than it is predicted to: what is copied is held until its group has been waited for, or until the rank gives all of them
up, which waits for the copies.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .communicator import ADASUM, Separated, Transfer
from .signals import postponed

GPU = "cuda"
_PAUSE_S = 2e-4  # between looks at copies of gradients that are still computed
Send = Callable[[Sequence[Tensor], str, str], Transfer]


class HostStage:
    """One rank's memory on the host, and the groups of tensors that are on their way through it.

    Args:
        send: begins to reduce tensors of the host in place, by name and operation.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._rooms: dict[str, dict[torch.dtype, Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        # Who lets go of a group gives it up: it is not sent any more.
        self._begun: deque[weakref.ref[_Staged]] = deque()
        self._sent: deque[weakref.ref[_Staged]] = deque()

    def start(self, tensors: Sequence[Tensor], name: str, operation: str) -> Transfer:
        """Begin to carry a group to the host; see :meth:`Communicator.start_reduction`.

        Its tensors may lie on the host on one rank and on a GPU on another.
        """
        flat = self._room(tensors, name)
        places = _places(tensors, flat)
        carried = list(flat.values()) if operation != ADASUM else places  # which looks at each by itself
        staged = _Staged(self, tensors, places, lambda: self._send(carried, name, operation))
        self._begun.append(weakref.ref(staged))
        return staged

    def go_on(self) -> bool:
        """Send the groups that have come to the host, in the order in which they were begun; says if all are sent."""
        while self._begun:
            staged = self._begun[0]()
            if staged is not None and not staged.came():
                return False
            with postponed():  # what Horovod has begun must be known
                self._sent.append(self._begun.popleft())
                if staged is not None:
                    staged.send()
        return True

    def send_all(self) -> None:
        """Wait until all groups that were begun have come to the host, and send them."""
        while not self.go_on():
            while self._sent and ((staged := self._sent[0]()) is None or staged.arrived()):
                self._sent.popleft()  # which has noted when
            time.sleep(_PAUSE_S)
        self._sent.clear()

    def forget(self) -> None:
        """Give up what is on its way, and all memory, once nothing is copied: the ranks come apart, or join anew."""
        with suppress(RuntimeError):  # of a GPU that answers nothing any more
            for stream in self._streams.values():
                stream.synchronize()
        self._begun.clear()
        self._sent.clear()
        self._rooms.clear()

    def copied_out(self, tensors: Sequence[Tensor], places: Sequence[Tensor]) -> list[Any]:
        """Copy a group to its places on the host; returns an event of each GPU, after which it is there."""
        events = []
        for device, pairs in _by_device(tensors, places).items():
            with self._copying(device) as stream:
                for tensor, place in pairs:
                    place.copy_(tensor, non_blocking=True)
            if stream is not None:
                events.append(stream.record_event())
        return events

    def copied_back(self, tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Copy a group back from the host; what is computed from now on waits for it."""
        for device, pairs in _by_device(tensors, places).items():
            with self._copying(device) as stream:
                for tensor, place in pairs:
                    tensor.copy_(place, non_blocking=True)
            if stream is not None:
                torch.cuda.current_stream(device).wait_stream(stream)

    @contextmanager
    def _copying(self, device: torch.device) -> Iterator[Any]:
        """Inside, copies are on a stream of their own, which is given, after what was computed before; on GPUs."""
        if device.type != GPU:
            yield None
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream

    def _room(self, tensors: Sequence[Tensor], name: str) -> Mapping[torch.dtype, Tensor]:
        """Return the group's memory: that of the last time, or new memory where it has other sizes now."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        rooms = self._rooms.get(name)
        if rooms is not None and {dtype: flat.numel() for dtype, flat in rooms.items()} == sizes:
            return rooms
        if rooms is not None:  # groups were made anew, so that others may be there no more
            self._rooms.clear()
        pinned = any(tensor.device.type == GPU for tensor in tensors)
        self._rooms[name] = {dtype: _memory(size, dtype, pinned) for dtype, size in sizes.items()}
        return self._rooms[name]


class _Staged:
    """A group on its way."""

    def __init__(
        self, stage: HostStage, tensors: Sequence[Tensor], places: Sequence[Tensor], send: Callable[[], Transfer]
    ) -> None:
        self._stage, self._tensors, self._places, self._send = stage, list(tensors), places, send
        self._sent: Transfer | None = None
        self.arrived_s: float | None = None
        self._copied = stage.copied_out(tensors, places)

    def came(self) -> bool:
        """Return whether it lies on the host by now."""
        return all(event.query() for event in self._copied)

    def send(self) -> None:
        """Begin to reduce it."""
        self._sent = self._send()

    def arrived(self) -> bool:
        """Return whether it is reduced, and note when that was seen first."""
        if self._sent is None or not self._sent.done():
            return False
        self.arrived_s = self.arrived_s or time.perf_counter()
        return True

    def done(self) -> bool:
        """Go on as far as that takes no time; says whether the group is reduced."""
        self._stage.go_on()
        return self.arrived()

    def wait(self) -> None:
        """Wait until what is computed from now on finds the result in the tensors."""
        self._stage.send_all()  # the others may wait for any of them
        if self._sent is None:
            raise Separated("The ranks came apart before these tensors were sent.")
        self._sent.wait()
        self.arrived_s = self.arrived_s or time.perf_counter()
        self._stage.copied_back(self._tensors, self._places)


def _places(tensors: Sequence[Tensor], flat: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
    """Return for each tensor its piece of the memory of its type."""
    pieces = {}
    for dtype, memory in flat.items():
        ends = accumulate(tensor.numel() for tensor in tensors if tensor.dtype == dtype)
        pieces[dtype] = iter(memory.tensor_split(list(ends)))
    return [next(pieces[tensor.dtype]).view(tensor.shape) for tensor in tensors]


def _by_device(
    tensors: Sequence[Tensor], places: Sequence[Tensor]
) -> Mapping[torch.device, list[tuple[Tensor, Tensor]]]:
    found: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for tensor, place in zip(tensors, places, strict=True):
        found.setdefault(tensor.device, []).append((tensor, place))
    return found


def _memory(size: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    if pinned:
        with suppress(RuntimeError):  # the host may have too little of it: then copies are slower, and the same
            return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
    return torch.empty(size, dtype=dtype, device="cpu")
