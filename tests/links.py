"""A rank of several that a test drives alone: it hears what is sent, and says what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from gpumem_nb.engine.link import communicator
from gpumem_nb.engine.link.communicator import AVERAGE, Single, Transfer


class Overheard(Single):
    """One of two ranks, of which the other one always sends the same as this one.

    Attributes:
        keeps: whether it keeps what it hears, which takes memory.
        sent: the tensors of each reduction that began, by name.
        on_send: called with name and tensors when one begins.
    """

    size = local_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.keeps = True
        self.sent: list[tuple[str, list[Tensor]]] = []
        self.on_send: Callable[[str, Sequence[Tensor]], object] = lambda name, tensors: None

    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Note what is sent."""
        if self.keeps:
            self.sent.append((name, list(tensors)))
        self.on_send(name, tensors)
        return super().start_reduction(tensors, name, operation)

    @property
    def buckets(self) -> list[list[Tensor]]:
        """The gradients that were sent, and the ballot among them."""
        return [tensors for name, tensors in self.sent if name.startswith("gpumem_nb.bucket")]


def overheard(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    """Let the process be such a rank."""
    link = Overheard()
    monkeypatch.setattr(communicator, "_of_process", link)
    return link
