"""Training and evaluation mode of every module, as training finds them and as it goes on with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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
