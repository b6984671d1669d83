"""What an optimizer's update would allocate: from a dry run on fake tensors, which changes nothing and copies nothing.

The optimizer is copied without the memory of its tensors, whatever implementation it computes with and whether it has
its state already, and the copy's own ``step`` runs. So what is seen is what its code does, list by list and temporary
by temporary. Of numbers that lie in tensors, such as a count of steps, the copy has the values; any other value that
an optimizer of somebody's own asks for is not there, and such an update cannot be foreseen.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ...internals.fake_internals import copied_as_fake, fake_constant, fake_mode, has_constant, modes_set_aside
from ...internals.torch_internals import (
    TorchDispatchMode,
    step_hooks_held_back,
    stepped_by_others,
)
from ...memory.ledger.foreseen import Foreseen, UpdateLog
from ...memory.tensors import tensors_in
from . import optimizers

_CPU, _DEVICE = torch.device("cpu"), torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default


class CannotBeForeseen(Exception):
    """This optimizer's update needs the values of tensors, or something else that a copy of it does not have."""


def foresee(
    optimizer: Optimizer,
    implementation: str,
    scaler: GradScaler | None,
    clip_norm: float | None,
    device: torch.device,
    allocation: Callable[[Tensor], int],
) -> Foreseen:
    """What the next update would allocate, from the gradients that are there.

    Args:
        optimizer: whose update it is; nothing of it is changed.
        implementation: how torch shall compute it, as :func:`.optimizers.set_implementation` names it.
        scaler: of the loss in fp16, which has scaled it in this step.
        clip_norm: of the gradients, ``None`` for none.
        device: where the weights are.
        allocation: gives the number of the allocation in which a real tensor lies, 0 for none.

    Raises:
        CannotBeForeseen: its code does not run on fake tensors.
    """
    if stepped_by_others(optimizer):
        raise CannotBeForeseen(f"the step of this {type(optimizer).__name__} was replaced by another function")
    log = UpdateLog(device, allocation)
    try:
        with modes_set_aside(), ExitStack() as stack:
            mode = fake_mode()
            dry = _Copies(mode, log)
            fake, dry_scaler = dry.of_optimizer(optimizer), dry.of_scaler(scaler) if scaler else None
            dry.let_go()
            stack.enter_context(mode)
            stack.enter_context(_Watching(log, mode, device, optimizers.is_torchs(optimizer)))
            optimizers.set_implementation(fake, implementation)
            stack.enter_context(step_hooks_held_back(fake, pre=True))
            optimizers.update(fake, dry_scaler, clip_norm, lambda: type(fake).step(fake))
            owned = [
                (value, dry.real[id(param)])
                for param, values in fake.state.items()
                for value in tensors_in(values)
                if id(param) in dry.real
            ]
            return log.foreseen(owned)
    except Exception as error:
        raise CannotBeForeseen(str(error).partition("\n")[0]) from None


class _Copies:
    """Copies of optimizers whose tensors have no memory; a tensor that several hold stays one."""

    def __init__(self, mode: Any, log: UpdateLog) -> None:
        self._mode, self._log = mode, log
        self._memo: dict[int, Any] = {}
        self.real: dict[int, Tensor] = {}  # the weights, by the ids of those that stand for them

    def of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same with fake tensors, without what is called before and after its updates."""
        weights = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for tensor in tensors_in(list(vars(optimizer).values())):
            if id(tensor) in self._memo:
                continue
            fake = self._memo[id(tensor)] = self._stands_for(tensor)
            if id(tensor) in weights:
                self.real[id(fake)] = tensor
                if tensor.grad is not None:
                    fake.grad = self._stands_for(tensor.grad)
        return self._copied(optimizer)

    def of_scaler(self, scaler: GradScaler) -> GradScaler:
        """The same with fake tensors, before it has unscaled anything."""
        new = type(scaler).__new__(type(scaler))
        vars(new).update(vars(scaler))
        for name, value in vars(scaler).items():
            if isinstance(value, Tensor):
                vars(new)[name] = self._stands_for(value)
            elif isinstance(value, defaultdict):
                vars(new)[name] = defaultdict(value.default_factory)
        return new

    def let_go(self) -> None:
        """Hold no fake tensor: what an update replaces is then gone."""
        self._memo.clear()

    def _copied(self, optimizer: Optimizer) -> Optimizer:
        # Not by deepcopy, for which every optimizer drops the attributes that torch's do not have.
        new = self._memo[id(optimizer)] = type(optimizer).__new__(type(optimizer))
        for inner in (value for value in vars(optimizer).values() if isinstance(value, Optimizer)):
            if id(inner) not in self._memo:
                self.of_optimizer(inner)
        with copied_as_fake(self._mode):
            for name, value in vars(optimizer).items():
                if name.startswith("_optimizer_") and name.endswith("_hooks"):
                    vars(new)[name] = OrderedDict()
                elif name != "step":  # of a scheduler, which would count it
                    vars(new)[name] = copy.deepcopy(value, self._memo)
        return new

    def _stands_for(self, tensor: Tensor) -> Tensor:
        single = tensor.numel() == 1 and not tensor.requires_grad and tensor.layout is torch.strided
        fake = fake_constant(self._mode, tensor) if single else self._mode.from_tensor(tensor, static_shapes=True)
        self._log.stands_for(fake, tensor)
        found: Tensor = fake
        return found


class _Watching(TorchDispatchMode):
    """Shows every operator to a log. Numbers that are made in the update keep their values as long as these are known.

    torch's own optimizers compute with the others and decide nothing by them, so any value will do.
    """

    def __init__(self, log: UpdateLog, mode: Any, device: torch.device, torchs: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._mode, self._cpu, self._torchs = log, mode, device.type == "cpu", torchs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and self._cpu:
            return _CPU
        kwargs = kwargs or {}
        if func is _ITEM and self._torchs and not has_constant(args[0]):
            return 1.0 if args[0].is_floating_point() else 1
        with self._log.operator(func, args):
            result = func(*args, **kwargs)
            if _is_made(result, args):
                result = self._made(func, args, kwargs, result)
            self._log.see(func, args, kwargs, result)
        return result

    def _made(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        with modes_set_aside():
            found: Tensor = fake_constant(self._mode, func(*args, **kwargs))
        return found


def _is_made(result: Any, args: Any) -> bool:
    """Whether an operator gave one number of nothing but plain values, in the memory of the host."""
    single = isinstance(result, Tensor) and result.numel() == 1 and result.device.type == "cpu"
    return single and not has_constant(result) and next(tensors_in(args), None) is None
