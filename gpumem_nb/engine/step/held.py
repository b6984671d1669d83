"""A tensor that is held to be handed out again, without the graph that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...internals.torch_internals import version
from ...memory.ledger.recorder import Recorder
from .cannot import cannot


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor and the version it had. Its graph would hold what belongs to it in a circle that nobody collects."""

    tensor: Tensor
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Held:
        """Hold a tensor, which the ledger counts as saved."""
        if Recorder.current:
            Recorder.current.saved(tensor)
        return cls(tensor.detach(), version(tensor), tensor.requires_grad)

    def get(self) -> Tensor:
        """The tensor, a leaf now.

        Raises:
            WorkloadError: somebody changed it in place.
        """
        if version(self.tensor) != self.version:
            raise cannot(
                "its input was changed in place after the block used it",
                "Use checkpointing=none, or replace the in-place operation in the model.",
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


def without_graph(value: Any) -> Any:
    """What to hold of any value: itself, unless it is a tensor that belongs to a graph."""
    return Held.of(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def given(value: Any) -> Any:
    """The value of which that was held."""
    return value.get() if type(value) is Held else value
