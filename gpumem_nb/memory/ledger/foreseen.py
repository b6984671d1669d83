"""The allocations of an update, from a dry run of it: events that follow those of a step that was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensors import tensors_in
from .events import Events, TensorLog

_FIRST = 2**48  # above all numbers of allocations that were made
_NUMBER = 8  # bytes of a Python number
_OF_NUMBERS = {"rsub", "eq", "ne", "lt", "le", "gt", "ge"} | {
    f"{many}{name}{end}" for name in ("add", "sub", "mul", "div") for many in ("", "_foreach_") for end in ("", "_")
}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The allocations and releases of a dry run of an update.

    Attributes:
        rows: number of the allocation, bytes (negative for a release) and the operator call, counted from 1.
        owned: the optimizer's state afterwards: the allocation's number, its bytes, and the weight it is kept for.
    """

    rows: tuple[tuple[int, int, int], ...] = ()
    owned: tuple[tuple[int, int, Tensor], ...] = ()

    @property
    def highest_bytes(self) -> int:
        """Return by how much live bytes grow at most."""
        return int(np.cumsum([0, *(nbytes for _, nbytes, _ in self.rows)]).max())

    def after(self, events: Events, live_bytes: int, now_ns: int, update_s: float) -> Events:
        """Return the events of a step with those of its update behind them.

        Args:
            events: of the step until then.
            live_bytes: when the step began.
            now_ns: when it came to the update, on the clock of ``time.perf_counter_ns``.
            update_s: how long updates take.
        """
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 3)
        calls_known = bool(events.call.any())
        last = int(events.call.max(initial=0))
        times = now_ns + np.linspace(0, update_s * 1e9, len(rows)).astype(np.int64)
        live = live_bytes + int(events.bytes.sum())
        return Events(
            np.concatenate([events.allocation, rows[:, 0]]),
            np.concatenate([events.bytes, rows[:, 1]]),
            np.concatenate([events.time_ns, times]),
            np.concatenate([events.foreign, np.zeros(len(rows), dtype=np.bool_)]),
            np.concatenate([events.call, (rows[:, 2] + last) * calls_known]),
            events.casts,
            max(events.live_peak_bytes, live + self.highest_bytes),
        )


class UpdateLog(TensorLog):
    """Events of an update on fake tensors, operator call by operator call.

    Args:
        device: that the fake tensors are said to be on.
        allocation: gives the number of the allocation in which a real tensor lies, 0 for none.
    """

    def __init__(self, device: torch.device, allocation: Callable[[Tensor], int]) -> None:
        super().__init__(device, lambda: (0, 0))
        self._of_real = allocation
        self._made = itertools.count(_FIRST)
        self._calls = self._call = 0  # how many there were, and the number of the one under way
        self.begin([])

    def stands_for(self, fake: Tensor, real: Tensor) -> None:
        """Take note that the memory of a fake tensor is that of a real one, which the update finds there."""
        if (known := self.known(fake)) is not None:
            known.number = self._of_real(real)

    @contextmanager
    def operator(self, operator: Any, args: Sequence[Any]) -> Iterator[None]:
        """Inside, an operator runs."""
        self._calls += 1
        self._call = self._calls
        pieces = [(self._new_number(), nbytes) for nbytes in self._numbers(operator, args)]
        for number, nbytes in pieces:
            self._note(number, nbytes)
        try:
            yield
        finally:
            for number, nbytes in pieces:
                self._note(number, -nbytes)
            self._call = 0

    def foreseen(self, owned: Iterable[tuple[Tensor, Tensor]]) -> Foreseen:
        """Return what was seen; ``owned`` are the optimizer's state and the real weights that it is kept for."""
        found = [(self._number(fake, new=False), fake.untyped_storage().nbytes(), weight) for fake, weight in owned]
        self._logging = False
        self._known = {}
        return Foreseen(tuple(self._rows), tuple(one for one in found if one[0]))

    def _numbers(self, operator: Any, args: Sequence[Any]) -> list[int]:
        """Bytes of a number that the CPU's kernels compute with as a tensor: as it comes, and in their own type."""
        if self._device.type != "cpu" or len(args) < 2 or _name(operator) not in _OF_NUMBERS:
            return []
        first = next(tensors_in(args[0]), None)
        number = args[1][0] if isinstance(args[1], (list, tuple)) and args[1] else args[1]
        if first is None or not isinstance(number, (bool, int, float)):
            return []
        return [_NUMBER, *([first.element_size()] if first.dtype is not torch.float64 else [])]

    def _new_number(self) -> int:
        return next(self._made)

    def _known_before(self) -> int:
        return 0  # of what no real tensor is known for, a release says nothing

    def _note(self, number: int, change: int) -> None:
        if number:
            self._rows.append((number, change, self._call))


def _name(operator: Any) -> str:
    """Of an operator, without that of its overload."""
    return str(operator.name()).removeprefix("aten::").partition(".")[0]
