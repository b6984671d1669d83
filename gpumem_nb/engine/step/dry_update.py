"""The allocations of an optimizer's update: from a dry run on fake tensors, which changes nothing and copies nothing.

The optimizer is copied without the memory of its tensors, whatever implementation it computes with and whether it has
its state already, and the copy's own ``step`` runs. So what is seen is what its code does, list by list and temporary
by temporary. Of numbers that lie in tensors, such as a count of steps, the copy has the values; any other value that
the user's own optimizer asks for is not there, and such an update cannot be foreseen.
"""

from __future__ import annotations

import copy
import statistics
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from ...internals.fake_internals import (
    copied_as_fake,
    fake_constant,
    fake_mode,
    foreach_as_for_real_tensors,
    has_constant,
    is_fake,
    modes_set_aside,
)
from ...internals.torch_dispatch_internals import TorchDispatchMode
from ...internals.torch_internals import step_hooks_held_back, stepped_by_others
from ...memory.device import Device
from ...memory.ledger.events import Foreseen, UpdateLog
from ...memory.tensors import tensors_in
from ..random_state import set_aside
from ..undo.python_state import PythonState
from . import optimizers
from .buckets import ReductionConfig
from .live_model import LiveModel
from .optimizer_state import state_of
from .partition import Partition, of_weights
from .parts import in_groups
from .pieces import Pieces, by_pieces, until_state_waits
from .state_aside import StateAside
from .step_clock import StepClock

_CPU, _DEVICE = torch.device("cpu"), torch.ops.prim.device.default
SCRATCH_COPIES = 6  # of the weights: themselves, gradients, state, and what is under way
_SCRATCH_UPDATES, _SCRATCH_S = 3, 0.5  # after one that makes the state; none is begun after so long
_TORCHS = ("aten", "prim", "prims", "profiler")
_ITEM = torch.ops.aten._local_scalar_dense.default
_NEW = torch.ops.aten.lift_fresh.default  # of ``torch.tensor``
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


_BY_ANOTHER_WAY = "it changes what is trained, or itself, by way of a variable or a function of its own"


class CannotBeForeseen(Exception):
    """This optimizer's update needs the values of tensors, or something else that a copy of it does not have."""


class AskedUpdate(NamedTuple):
    """An update that is asked about.

    Attributes:
        optimizer: whose it is; nothing of it is changed.
        implementation: how torch shall compute it, as :func:`.optimizers.set_implementation` names it.
        scaler: of the loss in fp16, which has scaled it in this step.
        clip_norm: of the gradients, ``None`` for none.
        sent_bytes: how many bytes of weights ranks give each other at once, where they share the state.
        held, wanted: how ranks share the optimizer's state, and how they would; ``None``: each has all of it.
        pieces: by which it goes; ``None``: it is whole.
        aside: where the state waits now; ``None``: it is on the device.
        rows: this rank's share of gradients by places of weights, where it has no whole ones.
        norms: those of the whole ones then.
    """

    optimizer: Optimizer
    implementation: str = "default"
    scaler: GradScaler | None = None
    clip_norm: float | None = None
    sent_bytes: int = 0
    held: Partition | None = None
    wanted: Partition | None = None
    rows: Mapping[int, Tensor] | None = None
    norms: Sequence[Tensor] = ()
    pieces: Pieces | None = None
    aside: StateAside | None = None

    @classmethod
    def of(cls, live: LiveModel) -> AskedUpdate:
        """Return the update under the settings that are tried."""
        settings = live.settings
        scaler, optimizer = live.scaler if settings.precision == "fp16" else None, live.optimizer_in_question()
        held, sent_bytes = state_of(optimizer).partition, ReductionConfig.under(settings).bucket_bytes
        wanted, params = live.sharing.partition(optimizer, settings), in_groups(optimizer)
        shared = (sent_bytes, held, wanted, *live.shares.of(params), live.pieces(optimizer), live.waits.aside)
        return cls(optimizer, settings.optimizer_impl, scaler, settings.clip_norm, *shared)

    def with_gradients(self, stand_in: Callable[[Tensor], Tensor]) -> AskedUpdate:
        """Return the same with other tensors in place of this rank's share of gradients."""
        if self.rows is None:
            return self
        rows = {place: stand_in(row) for place, row in self.rows.items()}
        return self._replace(rows=rows, norms=[stand_in(norm) for norm in self.norms])

    def bring_state(self, copied: Optimizer) -> None:
        """Let a copy of the optimizer, whose numbers do not matter, hold its state where and as it would be held."""
        wanted = self.pieces.aside if self.pieces else None
        if (aside := self.aside or wanted) and not (self.aside and wanted):
            aside.renew(copied, waits=wanted is not None)
        if self.held == self.wanted:
            return
        if self.held:
            self.held.widen(copied, (param for param in in_groups(copied) if param.grad is not None))
        if self.wanted:
            self.wanted.divide(copied)

    def take(self, copied: Optimizer, scaler: GradScaler | None, step: Callable[[], Any]) -> None:
        """Take this update with a copy of the optimizer, and the memory for what ranks would then give each other."""

        def updating(rows: Mapping[int, Tensor] | None) -> AbstractContextManager[None]:
            return self.wanted.updating(copied, rows) if self.wanted else nullcontext()

        step = until_state_waits(self.pieces, copied, by_pieces(self.pieces, copied, step))
        optimizers.update_share(copied, scaler, self.clip_norm, step, updating, self.rows, self.norms)
        if self.wanted:
            of_weights(self.wanted, in_groups(copied), self.sent_bytes, self.rows)

    def waiting_bytes(self, copied: Optimizer) -> int:
        """Return how much of the state of a copy that has taken this update waits in host memory."""
        aside = self.pieces.aside if self.pieces else None
        return sum(aside.waiting(copied)) if aside else 0


def foresee(update: AskedUpdate, device: torch.device, allocation: Callable[[Tensor], int]) -> Foreseen:
    """Return what an update would allocate, from the gradients that are there.

    Args:
        update: the next one.
        device: where the weights are.
        allocation: gives the number of the allocation in which a real tensor lies, 0 for none.

    Raises:
        CannotBeForeseen: its code does not run on fake tensors.
    """
    optimizer, scaler = update.optimizer, update.scaler
    if stepped_by_others(optimizer):
        raise CannotBeForeseen(f"the step of this {type(optimizer).__name__} was replaced by another function")
    makes_some = (group["momentum"] or group["maximize"] for group in optimizer.param_groups)
    in_place = type(optimizer) is SGD and not any(makes_some)
    if not in_place and any(param.grad is not None and param.grad.is_sparse for param in in_groups(optimizer)):
        raise CannotBeForeseen("how much it makes of sparse gradients depends on the samples")
    log = UpdateLog(device, allocation)
    try:
        with modes_set_aside(), foreach_as_for_real_tensors(), ExitStack() as stack:
            was_changed = stack.enter_context(_leaving_no_trace(optimizer))
            mode = fake_mode()
            dry = _Copies(lambda tensor: _fake(mode, log, tensor), copied_as_fake(mode))
            fake, dry_scaler = dry.of_optimizer(optimizer), dry.of_scaler(scaler) if scaler else None
            asked = update.with_gradients(lambda tensor: _fake(mode, log, tensor))
            dry.let_go()
            stack.enter_context(mode)
            stack.enter_context(_Watching(log, mode, device, optimizers.is_torchs(optimizer)))
            optimizers.set_implementation(fake, update.implementation)
            stack.enter_context(step_hooks_held_back(fake, pre=True))
            update.bring_state(fake)
            asked.take(fake, dry_scaler, lambda: type(fake).step(fake))
            if was_changed():
                raise CannotBeForeseen(_BY_ANOTHER_WAY)
            owned = kept_by(fake, lambda param: dry.real.get(id(param)))
            return replace(log.foreseen(owned), waiting_bytes=asked.waiting_bytes(fake))
    except CannotBeForeseen:
        raise
    except Exception as error:
        raise CannotBeForeseen(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that an update may replace: weights, gradients and state, also of an optimizer inside."""
    found = [tensor for one in optimizers.with_inner(optimizer) for tensor in _inside(one)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def kept_by(optimizer: Optimizer, real: Callable[[Any], Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that an optimizer keeps beside weights, each with a real weight that it is kept for."""
    weights = {id(param): weight for param in in_groups(optimizer) if (weight := real(param)) is not None}
    first = next(iter(weights.values()))
    found = {id(value): (value, first) for one in optimizers.with_inner(optimizer) for value in _inside(one)}
    for param, kept in optimizer.state.items():
        found |= {id(value): (value, weights.get(id(param), first)) for value in tensors_in(kept)}
    return [pair for key, pair in found.items() if key not in weights]


def _inside(optimizer: Optimizer) -> Iterator[Tensor]:
    return tensors_in(list(vars(optimizer).values()))


def timed_on_scratch(update: AskedUpdate, device: Device) -> float | None:
    """Return the seconds of an update, timed on a copy whose tensors are zeros; ``None`` without the room.

    Args:
        update: of one of torch's own optimizers, or one that was foreseen.
        device: where the weights are.
    """
    update = update._replace(rows=None)  # which takes about as long of whole gradients
    optimizer, scaler = update.optimizer, update.scaler
    here = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    room = device.room()
    if room is not None and room < SCRATCH_COPIES * sum(param.nbytes for param in here):
        return None
    copies, clock = _Copies(_zeros, nullcontext()), StepClock(device.torch_device)
    took_s: list[float] = []
    try:
        scratch = copies.of_optimizer(optimizer)
        for group in scratch.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param) if param.requires_grad else None
        dry_scaler = copies.of_scaler(scaler) if scaler else None
        optimizers.set_implementation(scratch, update.implementation)
        update.bring_state(scratch)
        with step_hooks_held_back(scratch, pre=True), _leaving_no_trace(optimizer):
            while len(took_s) <= _SCRATCH_UPDATES and sum(took_s) < _SCRATCH_S:
                clock.begin()
                update.take(scratch, dry_scaler, lambda: type(scratch).step(scratch))
                took_s.append(clock.until_now()[0])
                if dry_scaler:
                    dry_scaler = copies.of_scaler(scaler) if scaler else None
    except Exception:  # the user's own may want values, or more memory than there is
        return None
    return statistics.median(took_s[1:] or took_s)


@contextmanager
def _leaving_no_trace(optimizer: Optimizer) -> Iterator[Callable[[], bool]]:
    """Inside, a copy is updated: what its code counts, keeps or draws goes on as if it had not been.

    Gives a function that says whether the optimizer itself was changed, as by a closure, which a copy shares.
    """
    roots = (type(optimizer) if optimizers.is_torchs(optimizer) else optimizer,)
    places = PythonState(lambda: roots)
    with set_aside():
        taken = places.take()
        try:
            yield lambda: bool(taken.differing(places.take()))
        finally:
            taken.put_back()


def _zeros(tensor: Tensor) -> Tensor:
    if tensor.numel() == 1 and not tensor.requires_grad:
        return tensor.detach().clone()
    return torch.zeros_like(tensor, requires_grad=tensor.requires_grad)


class _Copies:
    """Copies of optimizers with other tensors; one that several hold stays one.

    Args:
        stand_in: gives the tensor in place of another one.
        copied: a context in which ``copy.deepcopy`` does so too.
    """

    def __init__(self, stand_in: Callable[[Tensor], Tensor], copied: AbstractContextManager[Any]) -> None:
        self._stand_in, self._as_copied = stand_in, copied
        self._memo: dict[int, Any] = {}
        self.real: dict[int, Tensor] = {}  # the weights, by the ids of those that stand for them

    def of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the same with other tensors, without what is called before and after its updates."""
        weights = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for tensor in _inside(optimizer):
            if id(tensor) in self._memo:
                continue
            other = self._memo[id(tensor)] = self._stand_in(tensor)
            if id(tensor) in weights:
                self.real[id(other)] = tensor
                if tensor.grad is not None:
                    other.grad = self._stand_in(tensor.grad)
        # Not by deepcopy, for which every optimizer drops the attributes that torch's do not have.
        new: Optimizer = type(optimizer).__new__(type(optimizer))
        self._memo[id(optimizer)] = new
        for inner in optimizers.with_inner(optimizer)[1:]:
            if id(inner) not in self._memo:
                self.of_optimizer(inner)
        with self._as_copied:
            for name, value in vars(optimizer).items():
                if name.startswith("_optimizer_") and name.endswith("_hooks"):
                    vars(new)[name] = OrderedDict()
                elif name != "step":  # of a scheduler, which would count it
                    vars(new)[name] = copy.deepcopy(value, self._memo)
        return new

    def of_scaler(self, scaler: GradScaler) -> GradScaler:
        """Return the same with other tensors, before it has unscaled anything."""
        new: GradScaler = type(scaler).__new__(type(scaler))
        vars(new).update(vars(scaler))
        for name, value in vars(scaler).items():
            if isinstance(value, Tensor):
                vars(new)[name] = self._stand_in(value)
            elif isinstance(value, defaultdict):
                vars(new)[name] = defaultdict(value.default_factory)
        return new

    def let_go(self) -> None:
        """Hold no tensor: what an update replaces is then gone."""
        self._memo.clear()


def _fake(mode: Any, log: UpdateLog, tensor: Tensor) -> Tensor:
    single = tensor.numel() == 1 and not tensor.requires_grad and tensor.layout is torch.strided
    fake: Tensor = fake_constant(mode, tensor) if single else mode.from_tensor(tensor, static_shapes=True)
    log.stands_for(fake, tensor)
    return fake


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
        if func.namespace not in _TORCHS:
            raise CannotBeForeseen(f"{func.name()} is no operator of torch's, so what it takes inside is not known")
        if self._cpu and func in _PRODUCTS and args[0].itemsize == 2:
            raise CannotBeForeseen("what the CPU's products of 16-bit matrices take inside is not known")
        if not (self._torchs or func is _NEW or all(map(is_fake, tensors_in([args, kwargs])))):
            raise CannotBeForeseen(_BY_ANOTHER_WAY)
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
    """Return whether an operator gave one number of nothing but plain values, in the memory of the host."""
    single = isinstance(result, Tensor) and result.numel() == 1 and result.device.type == "cpu"
    return single and not has_constant(result) and next(tensors_in(args), None) is None
