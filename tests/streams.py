"""CUDA's streams without a GPU: what is put on a stream happens later, in its order, and between streams in any order.

The order is drawn at random, so a wait that is missing gives a wrong result under some seeds. Copies inside of
``torch.cuda.stream`` are put on that stream, computing by :meth:`Machine.compute`; time goes on when an event is asked
for or a stream is awaited.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_nb.engine.link import staging

_of_thread = threading.local()


class Stream:
    """One stream of a machine."""

    def __init__(self, device: object = None) -> None:
        self._machine: Machine = _of_thread.machine
        self.waiting: deque[tuple[Callable[[], object] | None, Event | None]] = deque()
        self.put = self.done = 0
        self._machine.streams.append(self)

    def add(self, work: Callable[[], object] | None, after: Event | None = None) -> None:
        """Put work on the stream."""
        self.waiting.append((work, after))
        self.put += 1

    def record_event(self) -> Event:
        """Return an event that comes after all that was put on the stream."""
        return Event(self)

    def wait_stream(self, other: Stream) -> None:
        """Let what comes wait for what was put on another stream."""
        self.add(None, other.record_event())

    def synchronize(self) -> None:
        """Wait for all that was put on the stream."""
        end = self.record_event()
        while not end.reached:
            assert self._machine.go_on(), "streams wait for each other"

    @property
    def ready(self) -> bool:
        """Return whether the next piece of work may happen."""
        return bool(self.waiting) and (self.waiting[0][1] is None or self.waiting[0][1].reached)

    def step(self) -> None:
        """Let it happen."""
        work, _ = self.waiting.popleft()
        if work is not None:
            work()
        self.done += 1


class Event:
    """A place on a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._place = stream, stream.put

    @property
    def reached(self) -> bool:
        """Return whether the stream has come here."""
        return self._stream.done >= self._place

    def query(self) -> bool:
        """Let some time go by, and say whether the stream has come here."""
        _of_thread.machine.go_on()
        return self.reached


class Machine(TorchDispatchMode):
    """The streams of one rank, which is a thread."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random.Random(seed)
        self.streams: list[Stream] = []
        _of_thread.machine = self
        self.computing = Stream()
        self.current: Stream | None = None  # of the copies

    def compute(self, work: Callable[[], object]) -> None:
        """Put work on the stream that computes."""
        self.computing.add(work)

    def go_on(self) -> bool:
        """Let a piece of work happen somewhere; says whether there was one that may."""
        ready = [stream for stream in self.streams if stream.ready]
        if ready:
            self._random.choice(ready).step()
        return bool(ready)

    def synchronize(self) -> None:
        """Wait for the stream that computes."""
        self.computing.synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self.current is not None:
            self.current.add(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    machine: Machine = _of_thread.machine
    before, machine.current = machine.current, stream
    try:
        yield
    finally:
        machine.current = before


def instead_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of the CPU be carried as those of a GPU are; each thread needs a :class:`Machine`."""
    monkeypatch.setattr(staging, "GPU", "cpu")
    monkeypatch.setattr(staging, "_memory", lambda size, dtype, pinned: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _of_thread.machine.computing)
