"""What the kernel asks about a rank and its device: who it is, what its memory holds."""

from __future__ import annotations

import gc
import os
import platform
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..internals.torch_internals import MODULES_OWN
from ..memory.device import Device, opened
from ..memory.leaks.holders import saved_in
from ..memory.tensors import PLAIN, attributes, dense_parts
from ..shared import cluster_records, processes
from ..shared.categories import GRADIENTS, OPTIMIZER_STATE, OTHER, PARAMETERS
from ..shared.errors import StartError
from ..shared.messages import DeviceUse, Freed, RankInfo, Reading
from ..shared.readings import LiveBytes
from ..shared.version import __version__
from .link import horovod
from .link.communicator import here


def rank_info(device: Device) -> RankInfo:
    """Return this rank's identity: process, host and device."""
    return RankInfo(
        rank=here().rank,
        local_rank=here().local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(device.torch_device),
        device_name=device.name,
        virtual=device.kind == "virtual",
        memory_limit=device.reading().limit_bytes,
        driver=device.driver,
        threads=torch.get_num_threads(),
        note=device.note,
        allocator=device.allocator,
        machine=cluster_records.machine(),
        cores=tuple(sorted(os.sched_getaffinity(0)))[: processes.cores()],
        versions=(
            f"Python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"Horovod {horovod.VERSION}",
            f"gpumem_nb {__version__}",
        ),
    )


def check_sharing(ranks: int, gpus: int, nccl: bool) -> None:
    """Refuse more ranks than GPUs on a host where Horovod was built on NCCL, which allows one rank a GPU.

    Raises:
        StartError: there are more ranks than GPUs.
    """
    if nccl and ranks > gpus:
        raise StartError(
            f"{ranks} ranks cannot share {gpus} GPU{'s' * (gpus != 1)} with this Horovod, because NCCL allows one rank "
            f"on each. Start {max(1, gpus)}, or build Horovod so that ranks can share a GPU: "
            "python -m gpumem_nb.install.horovod_build --gpu staged"
        )


if TYPE_CHECKING:
    from ..memory.device import Device
    from .step.trainer import Trainer

MOST_VARIABLES = 5
MOST_OBJECTS = 100_000  # looked into of a variable


class LiveHolders:
    """Adds up the bytes that tensors hold on a device, each storage once.

    Attributes:
        by_category: of what is trained.
        variables: of cells, those that hold most, with their bytes.
        with_graph: the ones of these whose tensors keep what their backward pass would need, which is counted, too.
    """

    def __init__(self, device: Device, trainer: Trainer | None, variables: Mapping[str, Any]) -> None:
        self._device = device
        self._seen: set[int] = set()
        self.by_category: dict[str, int] = {}
        if trainer is not None:
            self._of_training(trainer)
        tensors = dict[str, list[Tensor]]()
        for name, value in variables.items():
            with suppress(Exception):  # objects may raise when they are looked into
                if _of_cells(name, value):
                    tensors |= {place: tensors_of(held) for place, held in _places(name, value)}
        found = {name: self._bytes(of_variable) for name, of_variable in tensors.items()}
        for name, of_variable in tensors.items():  # after all own ones: a graph saves weights and inputs of others
            found[name] += self._bytes(saved_in(of_variable))
        largest = sorted(((name, nbytes) for name, nbytes in found.items() if nbytes), key=lambda one: -one[1])
        self.variables = tuple(largest[:MOST_VARIABLES])
        self.with_graph = tuple(
            name for name, _ in self.variables if any(tensor.grad_fn is not None for tensor in tensors[name])
        )

    def _of_training(self, trainer: Trainer) -> None:
        live = trainer.live
        params = [param for _, param in live.parts.named_parameters()]
        optimizers = {id(one): one for one in (live.optimizer, live.own_optimizer) if one is not None}
        self.by_category[PARAMETERS] = self._bytes(params)
        self.by_category[GRADIENTS] = self._bytes(param.grad for param in params if param.grad is not None)
        self.by_category[OPTIMIZER_STATE] = sum(self._bytes(tensors_of(one)) for one in optimizers.values())
        data = tensors_of(trainer.stream.dataset)
        self.by_category[OTHER] = self._bytes([*(buffer for _, buffer in live.parts.named_buffers()), *data])

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        nbytes = 0
        for tensor in tensors:
            if not self._device.holds(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                nbytes += storage.nbytes()
        return nbytes


def _places(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a variable, and the attributes that the user's code has given to modules, as they are written in a cell."""
    yield name, value
    for inner, module in value.named_modules(prefix=name) if isinstance(value, nn.Module) else ():
        if all(map(str.isidentifier, inner.split("."))):
            yield from ((f"{inner}.{one}", held) for one, held in vars(module).items() if one not in MODULES_OWN)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a variable: of a module, an optimizer, a container, or an object's own attributes.

    What containers and attributes hold is looked into as well, objects of classes that cells define among it.
    """
    if isinstance(value, nn.Module):
        params = list(value.parameters())
        return [*params, *(param.grad for param in params if param.grad is not None), *value.buffers()]
    found, seen = list[Tensor](), set[int]()
    parts = [value.state if isinstance(value, Optimizer) else value, getattr(value, "__dict__", None)]
    while parts and len(seen) < MOST_OBJECTS:
        part = parts.pop()
        if type(part) in PLAIN or id(part) in seen:  # containers may hold themselves
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            found += dense_parts(part)
        elif isinstance(part, list | tuple | deque | set):
            parts.extend(part)
        elif isinstance(part, Mapping):
            parts.extend(part.values())
        elif isinstance(part, nn.Module):
            parts.extend(tensors_of(part))
        elif type(part).__module__ == "__main__":
            parts.append(getattr(part, "__dict__", None))
        else:
            parts.extend((attributes(part) or {}).values())
    return found


def _of_cells(name: str, value: Any) -> bool:
    """Return whether it may be a cell's variable; classes, functions and modules hold tensors of others."""
    return (
        not name.startswith("_")
        and not isinstance(value, type)
        and not hasattr(value, "__code__")
        and (type(value).__name__ != "module")
    )


if TYPE_CHECKING:
    from .step.trainer import Trainer

_use: DeviceUse | None = None  # as NVML had it when it was last asked


def reading() -> Reading:
    """Return the device's memory right now."""
    return opened().reading()


def device_use() -> DeviceUse | None:
    """Return what NVML says of the device right now; takes milliseconds, and chunks send on what it said."""
    global _use
    use = None  # should this fail, the next chunk does not send on what was true before
    try:
        use = opened().use()
    finally:
        _use = use
    return use


def latest_use() -> DeviceUse | None:
    """Return what NVML said when it was asked last."""
    return _use


CloserLook = tuple[Reading, DeviceUse | None, LiveBytes]


def look() -> tuple[Reading, DeviceUse | None]:
    """Return all that can be read of the device right now."""
    use = device_use()
    return reading(), use


def free(trainer: Trainer | None, variables: Mapping[str, Any]) -> Freed:
    """Give cached memory that no tensor uses back to the device, and say what holds the rest.

    Args:
        trainer: of what is loaded.
        variables: of cells.
    """
    device, before = opened(), reading()
    gc.collect()  # what hangs together in circles is held by nothing
    device.empty_cache()
    after, live = reading(), live_bytes(trainer, variables)
    device_use()
    return Freed(before, after, live)


def live_bytes(trainer: Trainer | None, variables: Mapping[str, Any]) -> LiveBytes:
    """Return what holds the live bytes right now: what is trained, and these variables of cells."""
    held, live = LiveHolders(opened(), trainer, variables), reading().live_bytes
    known = sum(held.by_category.values()) + sum(nbytes for _, nbytes in held.variables)
    held.by_category[OTHER] = held.by_category.get(OTHER, 0) + max(0, live - known)
    return LiveBytes(held.by_category, held.variables, held.with_graph)
