"""Ranks that Horovod joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from ...internals import horovod_internals
from ..copies import overwrite
from . import collectives
from .communicator import ADASUM, AVERAGE, SUM, Communicator, Separated, Single, Transfer
from .staging import HostStage

VERSION: str = horovod.__version__
NAMES = {"hvd": hvd}
"""What cells find under which names."""
_OPERATIONS = {AVERAGE: hvd.Average, SUM: hvd.Sum, ADASUM: hvd.Adasum}


def join(on_cpu: bool) -> tuple[Communicator, set[int]]:
    """Join the other ranks for the first time; returns the link to them and the numbers of Horovod's threads."""
    threads = collectives.join(on_cpu)
    if hvd.size() == 1:
        return AloneUnderHorovod(), threads
    return OfHorovod(staged=not (on_cpu or on_nccl())), threads


def stop_timeline() -> None:
    """Write what Horovod's timeline holds; what is not written when Horovod is shut down would be lost."""
    hvd.stop_timeline()


def on_nccl() -> bool:
    """Return whether this Horovod was built for NCCL."""
    return bool(hvd.nccl_built())


class _Joined(Communicator):
    """Comes apart and joins again as Horovod does."""

    def separated(self) -> bool:
        """Return whether Horovod was shut down, by a rank or in a cell."""
        return collectives.separated()

    def is_separation(self, error: BaseException) -> bool:
        """Return whether an error is a link's or Horovod's own, as a collective of any code raises it."""
        return isinstance(error, Separated | HorovodInternalError)

    def leave(self, what: str) -> None:
        """Shut Horovod down in the background."""
        collectives.leave(what)

    def rejoin(self, count: int | None = None) -> set[int]:
        """Shut Horovod down, unless it is, and start it again in the same processes."""
        return collectives.join_again(count)


class AloneUnderHorovod(_Joined, Single):
    """The only rank: cells may use Horovod, and steps do without."""


class OfHorovod(_Joined):
    """One of several ranks.

    Args:
        staged: carry tensors through the host, where this Horovod reduces those of GPUs, too.
    """

    def __init__(self, staged: bool = False) -> None:
        super().__init__()
        self._stage = HostStage(self._send) if staged else None
        self.on_host = staged

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Its number, which Horovod forgets while ranks are apart."""
        return collectives.rank()

    @property
    def size(self) -> int:  # type: ignore[override]
        """Return how many are joined: all, or the first few."""
        return collectives.size()

    @property
    def local_rank(self) -> int:  # type: ignore[override]
        """Its number on this host."""
        return int(hvd.local_rank())

    @property
    def local_size(self) -> int:  # type: ignore[override]
        """Return how many are on this host."""
        return int(hvd.local_size())

    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Send the tensors as one Horovod group: negotiated once instead of once a tensor."""
        return self._stage.start(tensors, name, operation) if self._stage else self._send(tensors, name, operation)

    def leave(self, what: str) -> None:
        """Shut Horovod down in the background; what was on its way to the host is given up."""
        if self._stage:
            self._stage.forget()
        super().leave(what)

    def rejoin(self, count: int | None = None) -> set[int]:
        """Shut Horovod down, unless it is, and start it again; what was on its way to the host is given up."""
        if self._stage:
            self._stage.forget()
        return super().rejoin(count)

    def _send(self, tensors: Sequence[Tensor], name: str, operation: str) -> Transfer:
        with _saying_separated():
            return _Sent(hvd.grouped_allreduce_async_(list(tensors), name=name, op=_OPERATIONS[operation]))

    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return this rank's rows of the sum."""
        with _saying_separated():
            shared: Tensor = hvd.reducescatter(tensor, op=hvd.Sum, name=name)
        return shared

    def all_gather(self, tensor: Tensor, name: str, room: Tensor | None = None) -> Tensor:
        """Return the rows of all ranks; takes less time than ``hvd.allgather_object``."""
        with _saying_separated():
            if room is None:
                gathered: Tensor = hvd.allgather(tensor, name=name)
            elif self.on_host and tensor.device.type != "cpu":
                gathered = room.copy_(hvd.allgather(tensor.cpu(), name=name))
            else:
                gathered = hvd.synchronize(horovod_internals.start_gathering(tensor, room, name))
        return gathered

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Send rank 0's bytes: Horovod carries neither bool nor uint16, bfloat16 or complex numbers."""
        wires, copies = {}, []
        for name, tensor in named.items():
            if not tensor.numel():
                continue  # Horovod waits for ever for a tensor without bytes
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
            wires[name] = flat.reshape(-1).view(torch.uint8)
            if flat.data_ptr() != tensor.data_ptr():
                copies.append((tensor, flat))
        with _saying_separated():
            hvd.broadcast_parameters(wires, root_rank=0)
        for tensor, flat in copies:
            overwrite(tensor, flat)


class _Sent:
    arrived_s: float | None = None

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def done(self) -> bool:
        try:
            return bool(hvd.poll(self._handle))
        except ValueError:  # Horovod does not know it any more
            return True

    def wait(self) -> None:
        with _saying_separated():
            hvd.synchronize(self._handle)


@contextmanager
def _saying_separated() -> Iterator[None]:
    try:
        yield
    except HorovodInternalError as error:
        raise Separated(str(error)) from error
