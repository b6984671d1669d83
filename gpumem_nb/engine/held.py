"""The holders of the live bytes on this rank's device: the workload, and the variables of cells."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..memory.leaks.graphs import saved_in
from ..memory.tensors import PLAIN, attributes
from ..shared.categories import GRADIENTS, OPTIMIZER_STATE, OTHER, PARAMETERS

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
                    tensors[name] = tensors_of(value)
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


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a variable: of a module, an optimizer, a container, or an object's own attributes."""
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
            found.append(part)
        elif isinstance(part, list | tuple | deque | set):
            parts.extend(part)
        elif isinstance(part, Mapping):
            parts.extend(part.values())
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
