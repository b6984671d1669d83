"""One rank by itself: everything is already what it would become. Nothing is copied, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .communicator import AVERAGE, Communicator, Separated, Transfer


class _Arrived:
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

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Leave the tensors as they are."""

    def separated(self) -> bool:
        """Return no: there is no other rank."""
        return False

    def is_separation(self, error: BaseException) -> bool:
        """Return whether a link said so."""
        return isinstance(error, Separated)

    def leave(self, what: str) -> None:
        """Do nothing: no rank waits."""

    def rejoin(self, count: int | None = None) -> set[int]:
        """Do nothing: there is no other rank to join, and no thread communicates."""
        return set()
