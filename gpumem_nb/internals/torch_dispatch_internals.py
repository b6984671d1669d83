"""Undocumented parts of torch around dispatch modes, which see operators below autograd. Only for ranks.

``TorchDispatchMode`` and the stack of them, an operator's ``_schema``, and ``_SetExcludeDispatchKeyGuard`` with the key
that counts changes in place, which a mode does not pass through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

CHECKED_WITH = ("2.13.0",)  # of torch


class LookingMode(TorchDispatchMode):
    """A mode that looks at operators, under which functions that torch.compile made are called as such.

    Under others torch calls the functions that they were made of, which give other bits and take other memory.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return ``True``, so that compiled functions are called as such."""
        return True


def count_modes() -> int:
    """Return how many dispatch modes are active on this thread."""
    return len(_get_current_dispatch_mode_stack())


def leave_mode() -> None:
    """Leave the innermost dispatch mode, which was never left."""
    _pop_mode()


@cache
def writes(operator: Any) -> bool:
    """Return whether an operator writes numbers into any of its arguments, and does not give it another shape alone.

    One of higher order says nothing of that.
    """
    is_mutable = hasattr(operator, "_schema") and operator._schema.is_mutable
    return bool(is_mutable and torch.Tag.inplace_view not in operator.tags)


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return which of the arguments of a call an operator writes into."""
    given = arguments(operator, args, kwargs)
    return [given[one.name] for one in operator._schema.arguments if one.name in given and _is_written(one)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by their names, without those that were left out."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def sharing(tensor: Tensor) -> Tensor:
    """Return a tensor without a graph in the same storage; both count changes in place together, in a mode as well."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
