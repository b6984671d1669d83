"""What a step changes, kept so that a step which one rank cannot finish can be undone on all of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...internals.torch_internals import buffers_by_name, forget_scaler
from . import optimizers
from .copies import host_copy, overwrite
from .random_state import RandomState


class ForwardUndo:
    """What a forward pass changes: buffers, such as batch norm's statistics, and the state of random numbers."""

    def __init__(self, model: nn.Module) -> None:
        # Code such as `self.mean = 0.9 * self.mean + x` binds the name anew, so names are kept beside contents.
        self._names = [(named, dict(named)) for named in map(buffers_by_name, model.modules())]
        # On a GPU the copy stays there: fetching it would wait for the device at every step.
        self._buffers = [(b, b.detach().clone() if b.is_cuda else host_copy(b)) for b in model.buffers()]
        self._random = RandomState.take()

    def undo(self) -> None:
        """Put everything back, bit by bit; buffers that were not there before are dropped."""
        for buffers, before in self._names:
            buffers.clear()
            buffers.update(before)
        for buffer, content in self._buffers:
            overwrite(buffer, content)
        self._random.put_back()


class UpdateUndo:
    """What an update changes: weights and the optimizer's state. The copies lie in host memory."""

    def __init__(self, params: Iterable[Tensor], optimizer: Optimizer) -> None:
        self._params = [_Kept(param, release=False) for param in params]
        self._state = KeptState(optimizer, release=False)

    def undo(self) -> None:
        """Put everything back, bit by bit; state that was not there before is dropped."""
        for param in self._params:
            param.restored()
        self._state.restore()
        forget_scaler(self._state.optimizer)


class KeptState:
    """The state of an optimizer in host memory.

    With ``release`` the optimizer gives up its own until :meth:`restore`: it is out of use, but may be wanted back.
    """

    def __init__(self, optimizer: Optimizer, release: bool) -> None:
        self.optimizer = optimizer
        self._state = {
            param: {name: _Kept(value, release) for name, value in values.items()}
            for param, values in optimizer.state.items()
        }
        self._groups = [dict(group) for group in optimizer.param_groups]
        if release:
            optimizer.state = defaultdict(dict)

    def restore(self) -> None:
        """Put state and options back."""
        state = {
            param: {name: kept.restored() for name, kept in values.items()} for param, values in self._state.items()
        }
        optimizers.put_state(self.optimizer, state, self._groups)


class _Kept:
    """One value. A tensor is put back in place where it was kept alive, else made anew."""

    def __init__(self, value: Any, release: bool) -> None:
        self._tensor = value if isinstance(value, Tensor) and not release else None
        self._device = value.device if isinstance(value, Tensor) else None
        self._copy = host_copy(value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def restored(self) -> Any:
        if self._device is None:
            return self._copy
        with torch.no_grad():
            tensor = torch.empty_like(self._copy, device=self._device) if self._tensor is None else self._tensor
            return tensor.copy_(self._copy)
