"""Undocumented parts of torch's fake tensors, which have shapes and no memory. Only for ranks and dry runs.

``torch._subclasses`` takes half a second to import, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_utils
from torch.utils._python_dispatch import _disable_current_modes

CHECKED_WITH = ("2.13.0",)  # of torch


def fake_mode() -> AbstractContextManager[Any]:
    """Inside, tensors have shapes and no memory, also where they meet real ones, such as weights of a loss."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]  # or a copied module could not meet the others
    return mode


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def stand_in(mode: Any, tensor: Tensor) -> Tensor | None:
    """Return the fake tensor that a fake mode uses for a real one, the same while it lives; ``None`` for a fake one."""
    return None if is_fake(tensor) else mode.from_tensor(tensor)


def in_fake_mode() -> bool:
    """Return whether new tensors have no memory now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def copied_as_fake(mode: Any) -> AbstractContextManager[Any]:
    """Inside, ``copy.deepcopy`` makes fake tensors of the tensors that it meets."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    return FakeCopyMode(mode)


def fake_constant(mode: Any, tensor: Tensor) -> Tensor:
    """Return a fake tensor that stands for a real one and knows its values, unless they depend on unknown ones."""
    constant = tensor.detach().clone()
    found: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, constant, make_constant=True)
    return found


def has_constant(tensor: Tensor) -> bool:
    """Return whether a fake tensor knows its values."""
    return getattr(tensor, "constant", None) is not None


@contextmanager
def foreach_as_for_real_tensors() -> Iterator[None]:
    """Inside, torch takes its ``foreach`` code for fake tensors where it would for real ones on their device.

    It asks for the exact type of each tensor (``_default_to_fused_or_foreach``, torch/optim/optimizer.py, and
    ``_has_foreach_support``, torch/utils/_foreach_utils.py). So by default an optimizer on CUDA would be foreseen
    without the temporary tensors of all weights together.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    for kinds in (_of_optimizers, _of_utils):
        kinds.append(FakeTensor)
    try:
        yield
    finally:
        for kinds in (_of_optimizers, _of_utils):
            kinds.remove(FakeTensor)


def modes_set_aside() -> AbstractContextManager[Any]:
    """Inside, operators run as they do without any dispatch mode."""
    return _disable_current_modes()


@contextmanager
def fake_weights_converted_in_place() -> Iterator[None]:
    """Inside, ``module.to(dtype)`` and its like work on fake weights: torch would swap them, and fails."""
    from torch._subclasses.fake_tensor import FakeTensor

    own: Callable[..., nn.Module] = nn.Module._apply

    def applied(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        names, weights = list(module._parameters), module._parameters
        fake: dict[str, Any] = {name: weights.pop(name) for name in names if isinstance(weights[name], FakeTensor)}
        for weight in fake.values():
            with torch.no_grad():
                weight.data = fn(weight)
        own(module, fn, recurse)
        for name in names:  # in the same order
            weights[name] = fake[name] if name in fake else weights.pop(name)
        return module

    nn.Module._apply = applied  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


def refused_operator(error: BaseException) -> str | None:
    """Return the operator that cannot be run on fake tensors, if that is what an error says."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    )
    return str(error.func) if isinstance(error, kinds) else None
