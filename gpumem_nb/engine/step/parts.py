"""The parts that are trained: the model, a criterion with weights, and loose weights of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

CRITERION = "loss."
LOOSE = "optimizer."


def as_given(function: Any) -> Any:
    """Return the user's loss or metric inside of the function made of it here; any other function itself."""
    return getattr(function, "criterion", function)


class Parts:
    """The modules that take part in a step, and the tensors in them by name.

    The model's names are as in the model; those of the criterion begin with ``loss.``, those of weights that only an
    optimizer knows with ``optimizer.``.

    Attributes:
        named: modules by what stands before the names in them.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.named: dict[str, nn.Module] = {"": model}
        criterion = loss if isinstance(loss, nn.Module) else as_given(loss)
        if isinstance(criterion, nn.Module):
            self.named[CRITERION] = criterion
        self._optimizers: list[Optimizer] = []

    def join(self, *optimizers: Optimizer | None) -> None:
        """Count the weights that these optimizers train too, and no others from before."""
        self._optimizers = list({id(one): one for one in optimizers if one}.values())

    def parameters(self) -> Iterator[Tensor]:
        """Every weight once, trained or not."""
        return (param for _, param in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, trained or not."""
        seen: set[int] = set()
        for name, param in self._candidates():
            if id(param) not in seen:
                seen.add(id(param))
                yield name, param

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, also those that no state dict holds."""
        for before, part in self.named.items():
            yield from ((before + name, buffer) for name, buffer in part.named_buffers())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once."""
        for before, part in self.named.items():
            yield from ((before + name, module) for name, module in part.named_modules())

    def modules(self) -> Iterator[nn.Module]:
        """Every module once."""
        for part in self.named.values():
            yield from part.modules()

    def _candidates(self) -> Iterator[tuple[str, Tensor]]:
        for before, part in self.named.items():
            yield from ((before + name, param) for name, param in part.named_parameters())
        for index, param in enumerate(chain.from_iterable(map(in_groups, self._optimizers))):
            yield f"{LOOSE}{index}", param


def in_groups(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the weights that an optimizer trains, in its order."""
    return (param for group in optimizer.param_groups for param in group["params"])
