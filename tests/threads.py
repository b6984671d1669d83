"""Ranks that are threads of one process: the same promises as Horovod's, without processes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gpumem_nb.engine.copies import overwrite
from gpumem_nb.engine.link.communicator import ADASUM, AVERAGE, Communicator, Separated, Transfer, used_by_thread

Result = TypeVar("Result")


class Meeting:
    """The meeting point of the threads.

    Args:
        size: how many ranks there are.
        timeout_s: how long a rank waits for the others before it says that they came apart.
        link: makes a rank's link, of the meeting and its number.
    """

    def __init__(
        self, size: int, timeout_s: float = 60.0, link: Callable[[Meeting, int], Communicator] | None = None
    ) -> None:
        self.size = size
        self._link = link or OfThread
        self._timeout_s = timeout_s
        self._news = threading.Condition()
        self._brought: dict[tuple[str, int], dict[int, list[Tensor]]] = defaultdict(dict)
        self._taken: dict[tuple[str, int], int] = defaultdict(int)
        self._apart = False
        self._rejoining: set[int] = set()
        self._joined = 0

    def run(self, work: Callable[[Communicator], Result]) -> list[Result]:
        """Do the work on every rank at once, each on a thread of its own; the first error of any is raised."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def as_rank(rank: int) -> None:
            with used_by_thread(self._link(self, rank)) as link:
                try:
                    results[rank] = work(link)
                except BaseException as error:
                    errors.append(error)
                    self.end()

        threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]

    @property
    def apart(self) -> bool:
        """Return whether the ranks came apart."""
        return self._apart

    def bring(self, key: tuple[str, int], rank: int, tensors: Sequence[Tensor]) -> None:
        """Put down what this rank gives."""
        with self._news:
            if self._apart:
                raise Separated("The ranks came apart.")
            self._brought[key][rank] = [tensor.detach().clone() for tensor in tensors]
            self._news.notify_all()

    def complete(self, key: tuple[str, int]) -> bool:
        """Return whether all ranks have given theirs."""
        return self._apart or len(self._brought[key]) == self.size

    def take(self, key: tuple[str, int]) -> list[list[Tensor]]:
        """Wait for what all ranks gave, in rank order."""
        with self._news:
            if not self._news.wait_for(lambda: self.complete(key), self._timeout_s):
                self._apart = True
                self._news.notify_all()
            if self._apart and len(self._brought[key]) < self.size:
                raise Separated("The ranks came apart.")
            brought = self._brought[key]
            self._taken[key] += 1
            if self._taken[key] == self.size:
                del self._brought[key], self._taken[key]
            return [brought[rank] for rank in range(self.size)]

    def end(self) -> None:
        """End what all ranks wait for."""
        with self._news:
            self._apart = True
            self._news.notify_all()

    def join(self, rank: int) -> None:
        """Wait until all ranks are here, and begin anew."""
        with self._news:
            joined = self._joined
            self._rejoining.add(rank)
            if len(self._rejoining) == self.size:
                self._rejoining.clear()
                self._brought.clear()
                self._taken.clear()
                self._apart = False
                self._joined += 1
                self._news.notify_all()
            elif not self._news.wait_for(lambda: self._joined > joined, self._timeout_s):
                raise Separated("Not every rank joined again.")


class OfThread(Communicator):
    """One thread's link to the others.

    Args:
        meeting: where they meet.
        rank: of this one.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self._meeting = meeting
        self._times: dict[str, int] = defaultdict(int)
        self.rank = self.local_rank = rank
        self.size = self.local_size = meeting.size

    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Give the tensors; the result is worked out when it is waited for."""
        return _Reduction(self._meeting, self._give(tensors, name), tensors, operation)

    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return this rank's rows of the sum."""
        total = torch.stack([of[0] for of in self._exchange([tensor], name)]).sum(0)
        return total.tensor_split(self.size)[self.rank].clone()

    def all_gather(self, tensor: Tensor, name: str, room: Tensor | None = None) -> Tensor:
        """Return the rows of all ranks."""
        return torch.cat([of[0] for of in self._exchange([tensor], name)], out=room)

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Take rank 0's."""
        first = self._exchange(list(named.values()), " ".join(named))[0]
        for tensor, content in zip(named.values(), first, strict=True):
            overwrite(tensor, content)

    def separated(self) -> bool:
        """Return whether a rank has left."""
        return self._meeting.apart

    def is_separation(self, error: BaseException) -> bool:
        """Return whether a link said so."""
        return isinstance(error, Separated)

    def leave(self, what: str) -> None:
        """End what all ranks wait for."""
        self._meeting.end()

    def rejoin(self, count: int | None = None) -> set[int]:
        """Join the others again; no thread beside theirs communicates."""
        self._times.clear()
        self._meeting.join(self.rank)
        return set()

    def _give(self, tensors: Sequence[Tensor], name: str) -> tuple[str, int]:
        self._times[name] += 1
        key = (name, self._times[name])
        self._meeting.bring(key, self.rank, tensors)
        return key

    def _exchange(self, tensors: Sequence[Tensor], name: str) -> list[list[Tensor]]:
        return self._meeting.take(self._give(tensors, name))


class _Reduction:
    arrived_s: float | None = None

    def __init__(self, meeting: Meeting, key: tuple[str, int], tensors: Sequence[Tensor], operation: str) -> None:
        self._meeting, self._key, self._tensors, self._operation = meeting, key, tensors, operation
        self._arrived = False

    def done(self) -> bool:
        return self._arrived or self._meeting.complete(self._key)

    def wait(self) -> None:
        brought = self._meeting.take(self._key)
        self._arrived = True
        for place, tensor in enumerate(self._tensors):
            tensor.copy_(_reduced([of[place] for of in brought], self._operation))


def _reduced(tensors: list[Tensor], operation: str) -> Tensor:
    if operation == ADASUM:
        while len(tensors) > 1:
            tensors = [_adasum(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        return tensors[0]
    total = torch.stack(tensors).sum(0)
    return total / len(tensors) if operation == AVERAGE else total


def _adasum(one: Tensor, other: Tensor) -> Tensor:
    """Maleki et al. 2020 (arXiv 2006.02924), equation 4, of a power of two of ranks."""
    both, of_one, of_other = ((a * b).sum() for a, b in ((one, other), (one, one), (other, other)))
    return (1 - both / (2 * of_one)) * one + (1 - both / (2 * of_other)) * other
