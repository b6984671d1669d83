"""What a step without memory knows of values, so that code which asks for them goes the way it would go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...internals.fake_internals import modes_set_aside
from ...internals.torch_dispatch_internals import TorchDispatchMode, written
from ...memory.tensors import tensors_in
from ..replay.segment import Segment

MOST_BYTES = 2**24
"""The largest tensor of which the values are kept."""
_aten = torch.ops.aten
_MAKERS = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.lift_fresh.default}
_ASKS = {_aten._local_scalar_dense.default, _aten.allclose.default}
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MARK = "_gpumem_nb_known"


class WrittenOver(Exception):
    """Something that is not known was written into a tensor of which the values were kept."""


class Answers(TorchDispatchMode):
    """Answers what is asked of numbers that are not there.

    An optimizer asks how many steps it has taken, and a block's recomputation is compared with its first run.

    Whole numbers and truth values that follow from ``arange`` and from numbers in code, such as positions, are real
    tensors, so a model may ask for them: Hugging Face's find no packed sequences in positions that count up, and make
    no mask then, and whether there is a mask decides which kernel computes attention. What follows from samples, from
    the model's own tensors or from random numbers is not known. The operator that needs it raises.

    Args:
        phase: the part of the step under way.
        knows: whether values are kept; where that fails, as where one is written over, a step goes without.
    """

    def __init__(self, phase: Callable[[], str], knows: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase, self._knows = phase, knows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._knows and self._phase() in ("forward", "backward"):
            taken = list(tensors_in([args, kwargs]))
            known = list(filter(_is_known, taken))
            if func in _MAKERS or (known and len(known) == len(taken)):
                return _followed(func, args, kwargs)
            if known and any(map(_is_known, tensors_in(written(func, args, kwargs)))):
                raise WrittenOver(str(func))
        if func in _ASKS and (self._phase() == "update" or Segment.replaying):
            return 1
        return func(*args, **kwargs)


def _followed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of what is known, with its values if these are to be kept."""
    if _OF_VALUES.isdisjoint(func.tags):
        result = func(*args, **kwargs)  # first without memory: it may be large
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(_can_be_kept, tensors_in(result))):
            return result
    with modes_set_aside():
        result = func(*args, **kwargs)
    for tensor in tensors_in(result):
        setattr(tensor, _MARK, True)
    return result


def _is_known(tensor: Tensor) -> bool:
    return hasattr(tensor, _MARK)


def _can_be_kept(tensor: Tensor) -> bool:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return whole and tensor.layout is torch.strided and tensor.nbytes <= MOST_BYTES
