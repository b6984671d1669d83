"""Detection of checkpointed blocks that draw random numbers of Python and NumPy, whose states are slow to read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from .. import cells
from .cannot import cannot


class Draws:
    """Knows whether numbers of Python and NumPy are drawn while a model's forward runs.

    To ask where they stand takes a tenth of a millisecond, too much for each block. So each call asks in the first
    pass only; when nothing was drawn in it, later ones ask at their begin and before their first replay.

    Attributes:
        recorded: each call has to ask.
    """

    def __init__(self) -> None:
        self.recorded = True
        self._settled = False
        self._began: tuple[Any, Any] | None = None
        self._cells = cells.ran()

    def block_begins(self) -> None:
        """A block is called: the first of a pass, perhaps."""
        if cells.ran() != self._cells:
            self._cells, self.recorded, self._settled = cells.ran(), True, False
        if self._began is None and not (self._settled and self.recorded):
            self._began = _slow_state()

    def replay_begins(self) -> None:
        """A block will run once more: the first of a pass, perhaps.

        Raises:
            WorkloadError: numbers were drawn in this pass, and calls did not ask.
        """
        if self._began is None:
            return
        began, self._began = self._began, None
        drawn = not _same(began, _slow_state())
        if not self._settled:
            self._settled, self.recorded = True, drawn
        elif drawn:
            self.recorded = True
            raise cannot(
                "for the first time it drew random numbers of Python or NumPy. Train on, and they are recorded"
            )

    def forget(self) -> None:
        """The pass was given up."""
        self._began = None


def _slow_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return bool(one[0] == other[0] and all(map(np.array_equal, one[1], other[1])))
