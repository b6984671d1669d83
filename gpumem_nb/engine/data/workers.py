"""Worker processes that fetch ahead: torch's own ``DataLoader`` does the work."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ...internals.torch_internals import end_pinning, is_handler_of_loaders
from ...shared.errors import WorkloadError, text_of
from ...shared.settings import Settings
from .fetching import Fetcher, FromWorker, Task

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_TIMEOUT_S = 1.0
_PERHAPS: dict[int, str] = {
    signal.SIGKILL: " (the system may be short of memory)",
    signal.SIGBUS: " (/dev/shm may be full)",
}

At = tuple[int, int, int]
"""A step: its position in the stream, batch size and micro-batches."""


class Workers:
    """Fetches what comes in the stream, in that order, with the processes that the settings ask for.

    Without processes the rank fetches, and torch's loader pins what it gets.

    Attributes:
        at: the step whose first micro-batch comes next; ``None`` in the middle of one.
    """

    def __init__(self, fetcher: Fetcher, loading: Settings, handed_on: Mapping[str, Any], seed: int) -> None:
        self.at: At | None = None
        self._coming = _Coming()
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._iterator: Iterator[Any] | None = None
        options: dict[str, Any] = {"num_workers": 0}
        if loading.num_workers:
            # Forked, unless the data's own loader says otherwise: what cells define cannot be pickled by name, and
            # a dataset need not be copied. A worker calls neither MPI nor Horovod nor CUDA, and ends without their
            # clean-up; the virtual GPU is told of forks.
            options = {
                "num_workers": loading.num_workers,
                "prefetch_factor": loading.prefetch_factor,
                "persistent_workers": True,  # so that going elsewhere starts no new processes
                "multiprocessing_context": "fork",
                **handed_on,
                "worker_init_fn": _Begin(os.getpid(), handed_on.get("worker_init_fn")),
            }
        self._loader: DataLoader[Any] | None = DataLoader(
            _Fetching(fetcher, in_worker=loading.num_workers > 0),
            batch_size=None,
            sampler=self._coming,
            collate_fn=_as_it_is,
            pin_memory=loading.pin_memory,
            generator=torch.Generator().manual_seed(seed),  # workers' seeds: not drawn from the model's
            **options,
        )

    def go_to(self, at: At, coming: Iterator[Task]) -> None:
        """Begin again with this step, whatever was fetched before."""
        assert self._loader is not None
        self._coming.tasks = coming
        others = set(multiprocessing.active_children()) - self._processes
        with self._ended_if_it_fails(), _signals_left_alone(), _on_the_host():
            try:
                self._iterator = iter(self._loader)
            finally:
                self._processes = set(multiprocessing.active_children()) - others
        self.at = at

    def next(self, then: At | None) -> tuple[Any, tuple[str, ...]]:
        """The next micro-batch and a sentence for each sample that is missing; ``then`` is the step behind it, if any.

        Raises:
            WorkloadError: a worker ended, or what :meth:`Fetcher.batch` raises.
        """
        assert self._iterator is not None
        self.at = None
        with self._ended_if_it_fails():
            batch, bad, failed = next(self._iterator)
        if failed:
            message, trace = failed
            raise WorkloadError(message) from FromWorker(trace)
        self.at = then
        return batch, bad

    @contextmanager
    def _ended_if_it_fails(self) -> Iterator[None]:
        """End the workers if the code inside fails: an interrupt may have lost what one sent."""
        try:
            yield
        except BaseException as error:
            try:
                ended = self._ended(connection_broke=isinstance(error, OSError | EOFError))
            finally:
                self.close()
            if ended and isinstance(error, Exception):  # torch says it in several ways
                raise WorkloadError(_in_words(ended[0])) from None
            raise

    def _ended(self, connection_broke: bool) -> list[multiprocessing.process.BaseProcess]:
        """Return the processes that have ended; connections to one that is ending break some moments before."""
        if connection_broke and self._processes:
            ending = wait([process.sentinel for process in self._processes], _TIMEOUT_S)
            for process in self._processes:
                process.join(_TIMEOUT_S if process.sentinel in ending else 0)
        return [process for process in self._processes if not process.is_alive()]

    @property
    def closed(self) -> bool:
        """Return whether its processes were ended."""
        return self._loader is None

    def close(self) -> None:
        """End the processes."""
        self.at = None
        end_pinning(self._iterator, _TIMEOUT_S)  # it would wait for ever for what a worker did not send to its end
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = set()
        self._iterator = self._loader = None


class _Coming(Sampler[Task]):
    """The tasks to come, in the form that torch's loader asks for."""

    def __init__(self) -> None:
        self.tasks: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.tasks


@dataclass
class _Fetching(Dataset[Any]):
    """A dataset whose items are micro-batches, by their tasks. What goes wrong in a worker is an answer too."""

    fetcher: Fetcher
    in_worker: bool

    def __getitem__(self, task: Task) -> tuple[Any, tuple[str, ...], tuple[str, str] | None]:
        try:
            return *self.fetcher.batch(task), None
        except Exception as error:
            if not self.in_worker:
                raise
            own = isinstance(error, WorkloadError)
            message = text_of(error) if own else f"{type(error).__name__}: {text_of(error)}"
            return None, (), (message, "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class _Begin:
    """The first action of a worker, before what the data's own loader asks for."""

    parent: int
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # Interrupts and nudges are the rank's business; a worker ends when it is told to, or its rank is gone.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A rank prints through a thread and sockets that the worker does not have.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:  # which was gone before
            os._exit(1)
        # The user's code asks torch for the worker's copy of the dataset, and sets attributes of it.
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.fetcher.dataset)
        if self.then:
            self.then(worker)


def _on_the_host() -> AbstractContextManager[object]:
    """Where torch draws a seed by a generator of the host's, though a cell may have made a GPU its default device."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Take back the handler with which torch raises, wherever the main thread is, when a worker has died.

    Between a reduction and its update an exception would leave the other ranks waiting. A rank that waits for a worker
    learns of its end some seconds later.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if (
            is_handler_of_loaders(signal.getsignal(signal.SIGCHLD))
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_handler_of_loaders(before) else before)


def _in_words(process: multiprocessing.process.BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    why = _PERHAPS.get(signal.Signals(-code), "") if code < 0 else ""
    return (
        f"A data worker (pid {process.pid}) {how}{why}. Its step was undone; train again to start new workers, or load "
        "without them: num_workers=0."
    )
