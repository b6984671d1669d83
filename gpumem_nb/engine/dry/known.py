"""What a step without memory knows of values, so that code which asks for them goes the way it would go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...internals.fake_internals import is_fake, modes_set_aside
from ...internals.torch_internals import TorchDispatchMode, address, written
from ...memory.tensors import tensors_in
from ..replay.segment import Segment

MOST_BYTES = 2**24
"""The largest tensor of which the values are kept."""
_ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default)


class Answers(TorchDispatchMode):
    """Answers what is asked of numbers that are not there.

    An optimizer asks how many steps it has taken, and a block's recomputation is compared with its first run.

    Whole numbers and truth values that follow from sizes alone, such as positions, stay real tensors, so a model may
    ask for them: Hugging Face's find no packed sequences in positions that count up, and make no mask then, and whether
    there is a mask decides which kernel computes attention. What follows from samples or from random numbers is not
    known. The operator that needs it raises.

    Args:
        phase: the part of the step under way.
        fake: whether tensors are without memory.
    """

    def __init__(self, phase: Callable[[], str], fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase, self._fake = phase, fake
        self._spoilt: dict[int, Tensor] = {}  # by the address of what was written into with other values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and (self._phase() == "update" or Segment.replaying):
            return 1
        if not self._fake or self._phase() not in ("forward", "backward"):
            return func(*args, **kwargs)
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(map(self._knows, tensors_in([args, kwargs])))
        if not (known and func in _ASKS):
            result = func(*args, **kwargs)
            made = list(tensors_in(result))
            if not known or not made or not all(map(_can_be_kept, made)):
                self._spoil(func, args)
                return result
        with modes_set_aside():
            return func(*args, **kwargs)

    def _knows(self, tensor: Tensor) -> bool:
        return not is_fake(tensor) and _can_be_kept(tensor) and address(tensor.untyped_storage()) not in self._spoilt

    def _spoil(self, func: Any, args: Any) -> None:
        """Forget the values of what an operator has written into."""
        for tensor in tensors_in(written(func, args)):
            if not is_fake(tensor):
                self._spoilt[address(tensor.untyped_storage())] = tensor


def _can_be_kept(tensor: Tensor) -> bool:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return whole and tensor.layout is torch.strided and tensor.nbytes <= MOST_BYTES
