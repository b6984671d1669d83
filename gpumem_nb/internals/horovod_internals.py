"""Undocumented parts of Horovod. Only for ranks.

Horovod does not tell who waits in which collective. Everything it offers to torch starts and waits through a few
functions of ``horovod.torch.mpi_ops``, found by name at each call, so they can be wrapped:

- ``_allreduce_async`` and its like start a collective and return its handle; they take its ``name``.
- ``mpi_lib.horovod_torch_join`` and ``horovod_torch_barrier`` start one without a name.
- ``mpi_lib.horovod_torch_wait_and_clear`` waits for a handle, ``horovod_torch_poll`` asks whether that would take time.
- ``_allgather_async`` also takes the tensor that becomes its result; the public function gives it an empty one.
- ``_basics.shutdown`` ends Horovod's threads. The public ``hvd.shutdown`` first drops the handles that another thread
  may wait for.

The sentences with which a collective fails after a shutdown are Horovod's own too, and so is what a timeline's file
says. Rank 0 writes it, as it coordinates the others. While it may be written a thread of rank 0 looks for news without
a pause, which takes a core, also after ``hvd.stop_timeline``: only a shutdown ends it. So Horovod must not be started
with ``HOROVOD_TIMELINE`` for longer than a timeline is wanted, and all ranks must be started alike.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from horovod.torch import mpi_ops

CHECKED_WITH = ("0.28.1",)

Start = Callable[..., int]
"""Starts a collective and returns its handle."""

# What starts a collective, and what people call it.
KINDS = {
    "_allreduce_async": "all-reduce",
    "_grouped_allreduce_async": "grouped all-reduce",
    "_allgather_async": "all-gather",
    "_grouped_allgather_async": "grouped all-gather",
    "_broadcast_async": "broadcast",
    "_alltoall_async": "all-to-all",
    "_reducescatter_async": "reduce-scatter",
    "_grouped_reducescatter_async": "grouped reduce-scatter",
}
NAMELESS = ("join", "barrier")
_SHUT_DOWN = ("Horovod has been shut down", "Horovod has not been initialized")


@dataclass(frozen=True, slots=True)
class Activity:
    """An activity of Horovod on a tensor; times in microseconds since the clock's zero.

    ``details`` are those that Horovod gives: the tensor's type and shape.
    """

    tensor: str
    name: str
    began_us: float
    ended_us: float
    details: dict[str, Any]


def wrap_starts(wrap: Callable[[Start, Callable[[int], str], str], Start]) -> None:
    """Replace what starts a collective with a name by ``wrap(start, own_name, kind)``.

    ``own_name(handle)`` is the name that Horovod gives to a collective without one.
    """
    for start, kind in KINDS.items():
        setattr(mpi_ops, start, wrap(getattr(mpi_ops, start), _own_name(start), kind))


def wrap_nameless_starts(wrap: Callable[[Start, str], Start]) -> None:
    """Replace what starts a collective that has no name by ``wrap(start, kind)``."""
    for kind in NAMELESS:
        function = f"horovod_torch_{kind}"
        setattr(mpi_ops.mpi_lib, function, wrap(getattr(mpi_ops.mpi_lib, function), kind))


def wrap_wait(wrap: Callable[[Callable[[int], None], Callable[[int], int]], Callable[[int], None]]) -> None:
    """Replace what waits for a handle by ``wrap(wait, done)``; ``done`` says at once whether it is over."""
    lib = mpi_ops.mpi_lib
    lib.horovod_torch_wait_and_clear = wrap(lib.horovod_torch_wait_and_clear, lib.horovod_torch_poll)


def wrap_shutdown(wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Replace what ends Horovod's threads, also when ``hvd.shutdown`` asks for it."""
    mpi_ops._basics.shutdown = wrap(mpi_ops._basics.shutdown)


def start_gathering(tensor: Any, room: Any, name: str) -> int:
    """Start an all-gather whose result has its memory already, and return its handle.

    Horovod gives its result the size that it turns out to have, on a thread of its own, where a failure for want of
    memory would end the process. A tensor that is made smaller keeps its memory, and takes no other one.
    """
    handle: int = mpi_ops._allgather_async(tensor, room.detach().resize_(0), name, mpi_ops.global_process_set)
    return handle


def end_threads() -> None:
    """Shut Horovod down and leave the handles alone that another thread waits for. Every rank must take part in it."""
    mpi_ops._basics.shutdown()


def says_shut_down(error: BaseException) -> bool:
    """Return whether a collective failed because Horovod is not there any more."""
    return any(text in str(error) for text in _SHUT_DOWN)


def read_timeline(text: str, zero_us: float) -> Iterator[Activity]:
    """Yield what a timeline's file tells that is closed, in the order in which it ended.

    A tensor is a process there, whose activities enclose each other; that a rank is ready for it takes no time.
    What was under way when recording began or ended is left out.

    Args:
        text: of the file, which is empty when nothing happened.
        zero_us: where the clock's zero lies, in microseconds since 1970.
    """
    tensors: dict[int, str] = {}
    open_ones: dict[int, list[tuple[str, float]]] = defaultdict(list)
    start_us = 0.0
    for event in json.loads(text) if text.strip() else ():
        args, pid = event.get("args", {}), event.get("pid", 0)
        if event["ph"] == "M":
            start_us = args.get("start_time_since_epoch_in_micros", start_us + zero_us) - zero_us
            if pid and "name" in args:
                tensors[pid] = args["name"]
        elif event["ph"] == "B":
            open_ones[pid].append((event["name"], start_us + event["ts"]))
        elif event["ph"] == "E" and open_ones[pid]:
            name, began_us = open_ones[pid].pop()
            yield Activity(tensors[pid], name, began_us, start_us + event["ts"], args)
        elif event["ph"] == "X":
            at_us = start_us + event["ts"]
            yield Activity(tensors[pid], f"rank {event['name']} is ready", at_us, at_us, args)


def _own_name(start: str) -> Callable[[int], str]:
    prefix = start.strip("_").removesuffix("_async")
    return lambda handle: f"{prefix}.noname.{handle}"
