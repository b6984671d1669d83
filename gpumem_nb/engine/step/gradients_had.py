"""The weights that had gradients in steps that counted: a step may leave out a layer, on all ranks or on some."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor


class GradientsHad:
    """Facts about the steps so far.

    Attributes:
        any_step: whether there was one.
        partial: whether a weight ever had a gradient on some ranks only.
    """

    def __init__(self) -> None:
        self.any_step = self.partial = False
        self._had: set[int] = set()
        self._lacked: set[int] = set()  # on all ranks, and were not frozen
        self._latest: Collection[int] | None = None

    def note(self, params: Sequence[Tensor], absent: Collection[int], partial: bool) -> None:
        """A step counted in which the ``absent`` ones of these weights, by id, had a gradient on no rank."""
        self.any_step, self.partial = True, self.partial or partial
        if absent is self._latest:  # as in the step before
            return
        self._latest = absent
        self._had.update(id(param) for param in params if id(param) not in absent)
        self._lacked.update(id(param) for param in params if id(param) in absent and param.requires_grad)

    def never(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had none in any step, though they were not frozen, and are not."""
        lacked = (param for param in params if param.requires_grad and id(param) in self._lacked)
        return [param for param in lacked if id(param) not in self._had]

    def sometimes(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had one in some steps, and in others on no rank."""
        return [param for param in params if id(param) in self._had and id(param) in self._lacked]
