"""Records which storages a step makes, and where in your code; only on while a leak is looked for."""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ...internals.torch_dispatch_internals import LookingMode
from ...internals.torch_internals import FILES_AROUND_MODES, address
from ..tensors import storage_of, tensors_in

_PACKAGE = str(Path(__file__).parents[2])
# The innermost frame outside of all of these is the user's own code.
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, _PACKAGE)
_TORCH = str(Path(torch.__file__).parent)
# What calls the model, and what torch puts around a dispatch mode.
_NOBODYS = (
    f"{_PACKAGE}/engine",
    f"{_PACKAGE}/memory",
    *FILES_AROUND_MODES,
)
_NOBODY = 3


class Birth:
    """A storage, for as long as it lives, and what it was made as."""

    __slots__ = ("_code", "_line", "_storage", "dtype", "nbytes", "shape", "step")

    def __init__(self, tensor: Tensor, step: int, made_at: tuple[CodeType | None, int]) -> None:
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage)
        self.nbytes, self.shape, self.dtype = storage.nbytes(), tuple(tensor.shape), str(tensor.dtype)
        self.step = step
        self._code, self._line = made_at

    @property
    def alive(self) -> bool:
        """Return whether anything still holds it, autograd's graphs included."""
        return self._storage() is not None

    @property
    def address(self) -> int:
        """Of the storage, while it lives."""
        storage = self._storage()
        return 0 if storage is None else address(storage)

    @property
    def made_at(self) -> str:
        """The line of code, for people: of their own if there is one, else of a library; empty where there is none."""
        if self._code is None:
            return ""
        name = self._code.co_filename
        where = name if name.startswith("<") else Path(name).name
        function = "" if self._code.co_name == "<module>" else f" in {self._code.co_qualname}"
        return f"{where}:{self._line}{function}"


class Births(LookingMode):
    """Notes every storage that an operator makes on the device; reading operators changes nothing about them.

    Attributes:
        step: the number that new births get.
        births: those of the steps seen so far; :meth:`prune` drops the dead.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._thread = 0
        self.step = 0
        self.births: list[Birth] = []
        self._outermost = 0

    def __enter__(self) -> Any:
        self._outermost, self._thread = id(sys._getframe(1)), threading.get_ident()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def prune(self) -> None:
        """Forget what has died."""
        self.births = [birth for birth in self.births if birth.alive]

    def forget_step(self) -> None:
        """The step under way was discarded."""
        self.births = [birth for birth in self.births if birth.step != self.step]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # torch.tensor() makes its storage where no mode looks, and shows it here.
        lifts = func is torch.ops.aten.lift_fresh.default
        with suppress(RuntimeError):  # of tensors of custom classes that have no storage
            known = set() if lifts else {place for _, place in self._storages([args, kwargs])}
            for tensor, place in self._storages([result]):
                if place not in known:
                    self.births.append(Birth(tensor, self.step, self._caller()))
        return result

    def _caller(self) -> tuple[CodeType | None, int]:
        """Return the line that makes a tensor now; on a thread of autograd's, the line that waits for it."""
        here = _innermost(sys._getframe(1), self._outermost)
        if here[0] or threading.get_ident() == self._thread:
            return here
        return _innermost(sys._current_frames().get(self._thread), self._outermost)

    def _storages(self, values: list[Any]) -> Iterator[tuple[Tensor, int]]:
        for tensor in tensors_in(values):
            if tensor.device == self._device and (storage := storage_of(tensor)) is not None:
                yield tensor, address(storage)


def _innermost(frame: FrameType | None, outermost: int) -> tuple[CodeType | None, int]:
    """Return the first frame outwards in the user's own code, else in a library, else in torch."""
    best: tuple[CodeType | None, int] = (None, 0)
    best_rank = _NOBODY
    while frame is not None and best_rank:
        rank = _rank(frame.f_code.co_filename)
        if rank < best_rank:
            best, best_rank = (frame.f_code, frame.f_lineno), rank
        frame = None if id(frame) == outermost else frame.f_back
    return best


@cache
def _rank(file: str) -> int:
    """Return how little a file says about where something was made; 0 for the user's own code."""
    if file.startswith(_NOBODYS):
        return _NOBODY
    if file.startswith(_TORCH):
        return 2
    return 1 if file.startswith((*_LIBRARIES, "<frozen")) else 0
