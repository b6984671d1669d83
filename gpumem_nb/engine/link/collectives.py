"""The collective that this rank waits in, and whether it is still joined to the others.

Horovod keeps both to itself: what starts collectives and waits for them is wrapped. On the CPU, its threads give way to
those that compute.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import torch

from ...install.horovod_source import MARK
from ...internals import horovod_internals
from ...memory.device import Device
from ...shared.answers import Waiting
from ...shared.errors import WorkloadError
from ...shared.knobs.communication import CYCLE_TIME
from .communicator import Separated, here

_FREEING_TIMEOUT_S = 5.0
_COUNT = "OMPI_COMM_WORLD_SIZE"  # where mpiexec says how many ranks there are
_CYCLE_ALONE_MS = "20"
# Pauses of a wait, as a share of how long it took so far, so that it ends little later than it could.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2e-5, 0.001

_on_cpu = False
_names: dict[int, str] = {}
_waiting: tuple[str, float] | None = None
_left: Waiting | None = None
_left_at_s = 0.0
_freeing: threading.Thread | None = None
_freed_from: Waiting | None = None
_shutting_down = threading.Lock()
_ranks = 0  # of the whole cluster
_rank = _size = 0  # of this one, and of those that are joined
_hosts_are_many = False  # where they are, Horovod does not come back from being given a list of ranks


def join(on_cpu: bool) -> set[int]:
    """Join the other ranks for the first time, and watch the collectives from now on; returns Horovod's threads."""
    global _on_cpu, _ranks, _rank, _size, _hosts_are_many
    _on_cpu = on_cpu
    _wrap_horovod()
    threads = _init(None)
    _rank, _ranks, _size, _hosts_are_many = hvd.rank(), hvd.size(), hvd.size(), hvd.local_size() != hvd.size()
    return threads


def check_again(variables: Collection[str] = ()) -> None:
    """Check that ranks can be joined again, with these variables set besides the environment. All ranks must come here.

    Raises:
        WorkloadError: some rank's Horovod would end its process; raised on all of them.
    """
    set_there = CYCLE_TIME in os.environ or CYCLE_TIME in variables
    if here().any_rank(set_there and not hasattr(horovod, MARK), "join again"):
        raise WorkloadError(
            f"this Horovod ends its process when ranks that were given {CYCLE_TIME} are joined again. Build the "
            "toolkit's own (python -m gpumem_nb.install.horovod_build) and %hvd_restart."
        )


def join_again(count: int | None = None) -> set[int]:
    """Join the other ranks again after Horovod was shut down, by whatever code. All ranks must come here.

    Args:
        count: join only the first so many ranks, which must come here; the others must shut Horovod down.

    Raises:
        Separated: Horovod could not be shut down yet.
    """
    global _freeing, _freed_from, _left, _size
    if _freeing is not None:
        _freeing.join(_FREEING_TIMEOUT_S)
        if _freeing.is_alive():
            raise Separated("Horovod could not be shut down, because not every rank takes part in it.")
        _freeing = None
    hvd.shutdown()
    # All ranks must give a list or none must, and Horovod takes those of the last time for none.
    threads = _init(None if _hosts_are_many else list(range(count or _ranks)))
    _size = count or _ranks
    _names.clear()
    _left = _freed_from = None
    return threads


def waiting() -> Waiting | None:
    """Return the collective that the main thread waits in right now."""
    now = _waiting
    return None if now is None else Waiting(now[0], max(0.0, time.monotonic() - now[1]))


def separated() -> bool:
    """Return whether this rank is apart from the others, so that its collectives would fail or confuse them."""
    return _left is not None or not hvd.is_initialized()


def left(since_s: float = 0.0) -> Waiting | None:
    """Return the collective in which this rank came apart, and how long it had waited; only the first time."""
    return _left if _left_at_s >= since_s else None


def rank() -> int:
    """Return the number of this rank, also while Horovod is shut down."""
    return _rank


def size() -> int:
    """Return how many ranks were joined last: all, or the first few."""
    return _size


def free(waited: Waiting) -> None:
    """End the waiting of all ranks by shutting Horovod down, in the background: the others must take part in that.

    ``waited`` is why, even if that collective ends at the last moment and the rank comes apart in the next one. To no
    effect if it has ended by now: the ranks may have been freed by another one, and be joined again.
    """
    global _freeing, _freed_from
    now = waiting()
    if now is None or now.collective != waited.collective or now.seconds < waited.seconds:
        return
    if _freeing is None:
        _freed_from = waited
        _freeing = threading.Thread(target=horovod_internals.end_threads, daemon=True)
        _freeing.start()


def leave(what: str) -> None:
    """End what all ranks wait for, because this one cannot take part in ``what`` any more. They join again later."""
    global _freeing, _left, _left_at_s
    if separated():
        return
    _left, _left_at_s = Waiting(what, 0.0), time.monotonic()
    if _freeing is None:
        _freeing = threading.Thread(target=horovod_internals.end_threads, daemon=True)
        _freeing.start()


def _init(ranks: list[int] | None) -> set[int]:
    alone = ranks == [0] or (ranks is None and os.environ.get(_COUNT) == "1")
    with new_threads_give_way() if _on_cpu else nullcontext(set[int]()) as threads, _seldom_awake(alone):
        hvd.init(comm=ranks)
    return threads


@contextmanager
def _seldom_awake(alone: bool) -> Iterator[None]:
    """Inside, Horovod begins with long cycles where a rank is ``alone``, unless the user wants others.

    Its steps negotiate nothing, for which a thread would look a thousand times a second: 2 % of a core that computes.
    """
    if not alone or CYCLE_TIME in os.environ or not hasattr(horovod, MARK):
        yield
        return
    os.environ[CYCLE_TIME] = _CYCLE_ALONE_MS
    try:
        yield
    finally:
        del os.environ[CYCLE_TIME]


def _wrap_horovod() -> None:
    horovod_internals.wrap_starts(_named)
    horovod_internals.wrap_nameless_starts(_unnamed)
    horovod_internals.wrap_wait(_watched)
    horovod_internals.wrap_shutdown(_one_at_a_time)


def _one_at_a_time(shutdown: Callable[[], None]) -> Callable[[], None]:
    def shut_down() -> None:
        with _shutting_down:  # two threads that join Horovod's own would end the process
            shutdown()

    return shut_down


def _named(start: Callable[..., int], own_name: Callable[[int], str], kind: str) -> Callable[..., int]:
    place = list(signature(start).parameters).index("name")

    def start_and_note(*args: Any, **kwargs: Any) -> int:
        name = kwargs["name"] if "name" in kwargs else args[place]
        with _noticing(name or kind):
            handle = start(*args, **kwargs)
        _names[handle] = f"{kind} {name or own_name(handle)!r}"
        return handle

    return start_and_note


def _unnamed(start: Callable[..., int], kind: str) -> Callable[..., int]:
    def start_and_note(*args: Any) -> int:
        with _noticing(kind):
            handle = start(*args)
        _names[handle] = kind
        return handle

    return start_and_note


def _watched(wait: Callable[[int], None], done: Callable[[int], int]) -> Callable[[int], None]:
    def wait_and_watch(handle: int) -> None:
        global _waiting
        what, link = _names.pop(handle, "collective"), here()
        _waiting, link.others_late_s = (what, time.monotonic() + link.others_late_s), 0.0
        try:
            with _noticing(what):
                _pause_until(done, handle)
                wait(handle)
        finally:
            _waiting = None

    return wait_and_watch


def _pause_until(done: Callable[[int], int], handle: int) -> None:
    """Wait without taking a core.

    Horovod's own wait yields its core in a loop, and never looks whether an interrupt came. Ranks that yield to each
    other can keep a core from everyone else for seconds: from ranks that compute, and from the notebook's process, when
    it has sent a request to some of the ranks only (docs/decisions.md).
    """
    began_s = time.perf_counter()
    while not done(handle):
        waited_s = time.perf_counter() - began_s
        time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * waited_s)))


@contextmanager
def _noticing(what: str) -> Iterator[None]:
    """Notice when the rank comes apart from the others in this collective."""
    global _left, _left_at_s
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if _left is None and (interrupted or horovod_internals.says_shut_down(error)):
            waited = None if interrupted else _freed_from or waiting()  # who was interrupted has not waited in vain
            _left, _left_at_s = waited or Waiting(what, 0.0), time.monotonic()
        raise


def greet(device: Device) -> None:
    """Prove the connection to the other ranks with a real all-reduce, of two numbers that travel together.

    From here on Horovod's fusion buffer is there in its size: made in a step it would come on top of the limit, and
    Horovod ends the process where it cannot make it. All ranks must come here.
    """
    link = here()
    with device.exempt():
        pair = [torch.ones(1, dtype=torch.float32, device=device.torch_device) for _ in range(2)]
        link.all_reduce(pair, "gpumem_nb.hello")
        for total in pair:
            if total.item() != link.size:
                raise RuntimeError(f"the all-reduce of {link.size} ones gave {total.item():g}")


# Waiting ranks yield their core, but to the scheduler a thread that yields in a loop is as hungry as one that computes.
# Five to ten steps of niceness let the training threads have the cores: on two cores 1.3 × the samples/s with four
# ranks (digits-resnet and text-gpt), and no change with two.
NICENESS = 10
_THREADS = Path("/proc/self/task")


@contextmanager
def new_threads_give_way() -> Iterator[set[int]]:
    """Threads that start inside run with lower priority than those that were there before.

    The set holds them afterwards, by the system's numbers.
    """
    before, new = _thread_ids(), set[int]()
    yield new
    new |= _thread_ids() - before
    for thread in new:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def give_way() -> None:
    """Let the calling thread run with lower priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _thread_ids() -> set[int]:
    return {int(path.name) for path in _THREADS.iterdir()}
