"""The parts that are trained: the model, a criterion with weights, and loose weights of the optimizer; their modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ...internals.torch_internals import weights_by_name

_USUAL = frozenset({Tensor, nn.Parameter})
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
        self._known: tuple[list[Tensor] | None, ...] = (None, None)  # of which the others follow
        self._others: list[Tensor] = []

    def join(self, *optimizers: Optimizer | None) -> None:
        """Count the weights that these optimizers train too, and no others from before."""
        self._optimizers = list({id(one): one for one in optimizers if one}.values())

    def parameters(self) -> Iterator[Tensor]:
        """Every weight once, trained or not."""
        of_modules = chain.from_iterable(weights_by_name(module).values() for module in self.modules())
        yield from {id(param): param for param in (*of_modules, *self._loose()) if param is not None}.values()

    def zero_grad(self, trained: list[Tensor], weights: list[Tensor] | None) -> None:
        """Let go of the gradients of what is ``trained``, and of the parts' ``weights``; ``None``: look for these."""
        known = trained, weights
        if weights is None or not all(map(is_, known, self._known)):
            ids, self._known = set(map(id, trained)), known
            self._others = [one for one in (weights or self.parameters()) if id(one) not in ids]
        for param in chain(trained, self._others):
            param.grad = None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, trained or not."""
        seen: set[int] = set()
        for name, param in self._candidates():
            if id(param) not in seen:
                seen.add(id(param))
                yield name, param

    def freeze(self, frozen: Collection[str]) -> None:
        """Freeze the weights of these names and no others."""
        for name, param in self.named_parameters():
            if param.requires_grad == (name in frozen):
                param.requires_grad_(name not in frozen)

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
        yield from ((f"{LOOSE}{index}", param) for index, param in enumerate(self._loose()))

    def _loose(self) -> Iterator[Tensor]:
        """Yield all weights that the optimizers train, those outside of modules included."""
        return chain.from_iterable(map(in_groups, self._optimizers))


def in_groups(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights that an optimizer trains, in its order, without what is none: a cell may have put it there."""
    found = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    return found if _USUAL.issuperset(map(type, found)) else [one for one in found if isinstance(one, Tensor)]


class Modes:
    """The modes in which one module and those in it are trained.

    A model that comes in evaluation mode is put into training mode as a whole; in one that is in training mode, parts
    in evaluation mode (a frozen batch norm) stay as they are.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        if not root.training:
            root.train()
        self._modes = self._taken()

    def restore(self) -> None:
        """Before training goes on: an ``eval()`` of the whole in a cell is taken back; any other mode set there holds.

        One pass over the modules.
        """
        if not self._root.training:
            for module in self._root.modules():
                module.training = self._modes.get(module, True)  # True for one that is new
        self._modes = self._taken()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens to modes inside, they are afterwards as before, and training goes on with the same."""
        known, before = self._modes, self._taken()
        try:
            yield
        finally:
            self._modes = known
            for module, training in before.items():
                module.training = training

    def evaluating(self) -> set[nn.Module]:
        """Return the modules with which training goes on in evaluation mode."""
        modes = self._taken() if self._root.training else self._modes
        return {module for module, training in modes.items() if not training}

    def go_on_with(self, evaluating: set[nn.Module]) -> None:
        """Put these modules into evaluation mode and all others into training mode."""
        for module in self._root.modules():
            module.training = module not in evaluating
        self._modes = self._taken()

    def _taken(self) -> dict[nn.Module, bool]:
        return {module: module.training for module in self._root.modules()}


class AllModes:
    """The modes of a model and of what is trained besides it."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._of = parts, [Modes(part) for part in parts.named.values()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards they are those that cells had left."""
        with ExitStack() as stack:
            for modes in self._of:
                stack.enter_context(modes.kept())
            yield

    def resume(self) -> None:
        """Training goes on after cells may have run: an ``eval()`` of theirs is taken back."""
        for modes in self._of:
            modes.restore()

    def evaluating(self) -> list[str]:
        """Names of the modules with which training goes on in evaluation mode, such as a frozen batch norm."""
        theirs = set().union(*(modes.evaluating() for modes in self._of))
        return [name for name, module in self._parts.named_modules() if module in theirs]

    def go_on_as(self, evaluating: Collection[str]) -> None:
        """Put the modules of these names into evaluation mode, and all others into training mode."""
        theirs = {module for name, module in self._parts.named_modules() if name in evaluating}
        for modes in self._of:
            modes.go_on_with(theirs)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules in evaluation mode inside, one by one: some models change their weights in ``eval()``."""
    modes = [(module, module.training) for module in modules]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


_steps = WeakTensorKeyDictionary()  # keeps nothing alive


def note_steps(params: Iterable[Tensor], steps: int) -> None:
    """These weights were trained for so many more."""
    if steps:
        for param in params:
            _steps[param] = _steps.get(param, 0) + steps


def steps_before(params: Iterable[Tensor]) -> int:
    """Return the most that any of these weights was trained for before."""
    return max((_steps.get(param, 0) for param in params), default=0)
