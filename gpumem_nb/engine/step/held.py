"""A tensor that is held to be handed out again, without the graph that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...internals.torch_internals import version
from ...memory.ledger.recorder import Recorder
from ..undo.python_state import Holding, given
from .cannot import cannot


@dataclass(frozen=True, slots=True)
class SavedTensor(Holding):
    """A tensor and the version it had. Its graph would hold what belongs to it in a cycle that is not collected."""

    tensor: Tensor
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """Hold a tensor, which the ledger counts as saved."""
        if Recorder.current:
            Recorder.current.saved(tensor)
        return cls(tensor.detach(), version(tensor), tensor.requires_grad)

    def get(self) -> Tensor:
        """Give the tensor, a leaf now.

        Raises:
            WorkloadError: it was changed in place meanwhile.
        """
        if version(self.tensor) != self.version:
            raise cannot(
                "its input was changed in place after the block used it",
                "Use checkpointing=none, or replace the in-place operation in the model.",
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _SavedTuple(Holding):
    """A tuple with such tensors in it."""

    kind: Any
    items: list[Any]

    def get(self) -> Any:
        return self.kind(map(given, self.items))


def without_graph(value: Any) -> Any:
    """Return what to hold of a value: itself, unless it is a tensor of a graph, or a tuple of such tensors."""
    if isinstance(value, Tensor):
        return SavedTensor.of(value) if value.grad_fn is not None else value
    if isinstance(value, tuple) and any(isinstance(one, Tensor) and one.grad_fn is not None for one in value):
        return _SavedTuple(getattr(value, "_make", type(value)), list(map(without_graph, value)))
    return value
