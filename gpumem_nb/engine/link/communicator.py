"""The interface through which ranks communicate, whatever library carries it, and a rank by itself.

A backend is one file with a :class:`Communicator`; ``tests/link_promises.py`` says what each of them must do.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
AVERAGE, SUM, ADASUM = "average", "sum", "adasum"
"""What tensors of all ranks become, by the names of the knob ``reduction``."""


class Separated(RuntimeError):
    """The ranks came apart: what this rank waited for will not come, and whatever it computed now would be lost."""


class Transfer(Protocol):
    """A group of tensors under way.

    Attributes:
        arrived_s: when it was seen to have the result, on the clock of ``time.perf_counter``, if it looked by itself.
    """

    arrived_s: float | None

    def done(self) -> bool:
        """Return at once, and whether :meth:`wait` would."""

    def wait(self) -> None:
        """Wait until the tensors hold the result, the same bits on all ranks.

        Raises:
            Separated: the ranks came apart.
        """


class Communicator(ABC):
    """One rank's link to the others. Every method but the plain readings is collective: all ranks call it alike.

    Attributes:
        rank: the number of this rank, from 0.
        size: how many ranks are joined.
        local_rank: the number of this rank on its host.
        local_size: how many of them are on this host.
        others_late_s: so much later than this rank the others may come to what it waits for next: that is no stall.
        on_host: whether gradients of a GPU are carried to the host, so a rank without memory on it may send others.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    on_host = False
    others_late_s = 0.0

    def __init__(self) -> None:
        # Made ahead of time: a rank without any memory left can vote, whatever torch's defaults are by then.
        self._vote = torch.zeros(1, dtype=torch.float32, device="cpu")

    @abstractmethod
    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Begin to reduce these tensors in place.

        Args:
            tensors: dense, contiguous and not empty, of the same shapes and types on all ranks.
            name: the same on all ranks, and of nothing else that is under way; people read it when ranks wait.
            operation: ``AVERAGE``, ``SUM`` or ``ADASUM``.

        Raises:
            Separated: the ranks came apart.
        """

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return this rank's share of the sum: rows in rank order, the first ranks have one more if they don't divide.

        Raises:
            Separated: the ranks came apart.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str, room: Tensor | None = None) -> Tensor:
        """Return the rows of all ranks in rank order; only the number of rows may differ between ranks.

        Args:
            tensor: this rank's rows.
            name: the same on all ranks.
            room: memory in which they are returned, of just as many rows, so that none is taken.

        Raises:
            Separated: the ranks came apart.
        """

    @abstractmethod
    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Overwrite these tensors with rank 0's, bit for bit, in any type and layout.

        Args:
            named: of the same names, shapes and types on all ranks.

        Raises:
            Separated: the ranks came apart.
        """

    @abstractmethod
    def separated(self) -> bool:
        """Return whether this rank is known to be apart from the others. Not collective."""

    @abstractmethod
    def is_separation(self, error: BaseException) -> bool:
        """Return whether an error says that the ranks came apart, also one of the backend's own. Not collective."""

    @abstractmethod
    def leave(self, what: str) -> None:
        """End what all ranks wait for, because this one cannot take part in ``what`` any more. Not collective."""

    @abstractmethod
    def rejoin(self, count: int | None = None) -> set[int]:
        """Join the other ranks again, whether they came apart or not; what was under way is lost.

        Args:
            count: join only the first so many ranks, which alone call it; the others must have left.

        Returns:
            The system's numbers of threads that communicate.

        Raises:
            Separated: not every rank takes part.
        """

    def all_reduce(self, tensors: Sequence[Tensor], name: str, operation: str = SUM) -> None:
        """Reduce tensors in place, and wait for it; see :meth:`start_reduction`."""
        self.start_reduction(tensors, name, operation).wait()

    def check(self) -> None:
        """Raise ``Separated`` when this rank is known to be apart from the others. Not collective."""
        if self.separated():
            raise Separated("The ranks came apart.")

    def any_rank(self, vote: bool, about: str) -> bool:
        """Return whether any rank votes yes; needs no memory. ``about`` names the question."""
        self._vote.fill_(vote)
        self.all_reduce([self._vote], f"gpumem_nb.{about}")
        return self._vote.item() > 0

    def numbers(self, own: Sequence[int], about: str) -> list[list[int]]:
        """Return every rank's numbers, in rank order; as many on each, and each below 2**63."""
        row = torch.tensor([list(own)], dtype=torch.int64, device="cpu")
        rows: list[list[int]] = self.all_gather(row, f"gpumem_nb.{about}").tolist()
        return rows

    def from_first(self, content: bytes, about: str) -> bytes:
        """Return rank 0's bytes; the others' are not looked at."""
        length = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
        self.broadcast({f"gpumem_nb.{about}.length": length})
        data = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else data
        self.broadcast({f"gpumem_nb.{about}": data})
        return data.numpy().tobytes()

    def of_each(self, content: bytes, about: str) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        ends = list(accumulate(row[0] + 1 for row in self.numbers([len(content)], f"{about}.length")))
        own = torch.frombuffer(bytearray(b"." + content), dtype=torch.uint8)  # a rank may have nothing to send
        whole = self.all_gather(own, f"gpumem_nb.{about}").numpy().tobytes()
        return [whole[begin + 1 : end] for begin, end in pairwise((0, *ends))]


class _Arrived:
    arrived_s: float | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Single(Communicator):
    """The only rank there is."""

    rank = local_rank = 0
    size = local_size = 1

    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Leave the tensors as they are."""
        return _Arrived()

    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, name: str, room: Tensor | None = None) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Leave the tensors as they are."""

    def separated(self) -> bool:
        """Return ``False``: there is no other rank."""
        return False

    def is_separation(self, error: BaseException) -> bool:
        """Return whether a link said so."""
        return isinstance(error, Separated)

    def leave(self, what: str) -> None:
        """Do nothing: no rank waits."""

    def rejoin(self, count: int | None = None) -> set[int]:
        """Do nothing: there is no other rank to join, and no thread communicates."""
        return set()


_of_process: Communicator | None = None
_of_thread = threading.local()


def here() -> Communicator:
    """Return this rank's link to the others. A process that was joined to none is a rank by itself."""
    global _of_process
    if _of_process is None:  # not made before it is asked for: a virtual GPU counts its vote
        _of_process = Single()
    return getattr(_of_thread, "link", None) or _of_process


def use(link: Communicator) -> None:
    """Let this process reach the other ranks so."""
    global _of_process
    _of_process = link


@contextmanager
def used_by_thread(link: Communicator) -> Iterator[Communicator]:
    """Inside, the calling thread is a rank of its own."""
    before, _of_thread.link = getattr(_of_thread, "link", None), link
    try:
        yield link
    finally:
        _of_thread.link = before


def together(about: str, work: Callable[[], Result]) -> Result | None:
    """Do what may fail on one rank alone; ``None`` when it did on another one. All ranks come here."""
    failure: BaseException | None = None
    result = None
    try:
        result = work()
    except BaseException as error:
        failure = error
    if here().any_rank(failure is not None, about):
        if failure:
            raise failure
        return None
    return result


def same_everywhere(number: int, about: str) -> bool:
    """Return whether all ranks have the same number, below 2**63. All ranks ask; ``about`` names the question."""
    return alike([number], about)[0]


def alike(numbers: Sequence[int], about: str) -> list[bool]:
    """Return for each of these numbers whether all ranks have the same, below 2**63. All ranks ask."""
    rows = here().numbers(numbers, about)
    return [all(row[place] == number for row in rows) for place, number in enumerate(numbers)]
