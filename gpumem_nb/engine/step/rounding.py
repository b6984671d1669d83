"""Updates of weights in bf16, computed in fp32 and rounded stochastically: ``precision=bf16_weights``.

Rounding to nearest loses every update below half of a weight's last digit, which in bf16 is up to 1/128 of the weight.
Rounded up with a probability that is the part between the two neighbours, weights are right on average (Gupta et al.
2015, arXiv 1502.02551). Random numbers follow from seed, step and place of a weight alone: all ranks draw the same, a
step that is undone draws them again, and training's own stay where they are.

The optimizer is given fp32 copies of some weights and gradients at a time, which are small beside the model; its state
is in fp32 all the time. In bf16 a mean of squares that shrinks by a thousandth each step, as Adam's does, would stand
still.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from ...internals import bitsandbytes_internals
from ...internals.torch_internals import step_hooks_held_back, step_pre_hooks, stepped_by_others
from ...shared.errors import WorkloadError
from .muon import MuonAndAdamW
from .partition import by_elements, has_gaps, in_memory_order, laid_as, lies_as
from .parts import in_groups
from .shards import BY_ELEMENTS

_PIECES = 32  # at least, of all weights in bf16: one of them has copies at a time
_LEAST_ELEMENTS = 2**16  # of a piece
_COPIES = 8  # of a piece in fp32, more than there are at any moment: weight, gradient, random bits, the optimizer's own
_OFF = "Use precision=bf16"
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Rounding:
    """The update of weights in bf16.

    Attributes:
        places: of these weights in the optimizer's groups.
        seed, step: what random numbers follow from.
    """

    places: frozenset[int]
    seed: int = 0
    step: int = 0

    @classmethod
    def of(cls, narrow: Iterable[Tensor], optimizer: Optimizer, seed: int = 0, step: int = 0) -> Rounding:
        """Return that of these weights, as far as the optimizer has them."""
        ids = set(map(id, narrow))
        places = (place for place, param in enumerate(in_groups(optimizer)) if id(param) in ids)
        return cls(frozenset(places), seed, step)

    def update(self, optimizer: Optimizer, step: Step) -> None:
        """Let the optimizer take its ``step``, piece by piece.

        Raises:
            WorkloadError: it cannot be given some weights at a time.
        """
        if problem := why_not(optimizer):
            raise WorkloadError(problem)
        params = in_groups(optimizer)
        gradients = [param.grad for param in params]
        try:
            for param in params:
                param.grad = None  # what has none is left alone
            with torch.no_grad():
                pieces = list(self._pieces(optimizer, params, gradients))
                for piece in pieces:
                    # Hooks after the update run after the last piece, for all of them.
                    with nullcontext() if piece is pieces[-1] else step_hooks_held_back(optimizer, pre=True):
                        piece(step)
        finally:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient

    def room(self, optimizer: Optimizer) -> int:
        """Return more bytes than the copies of a piece take."""
        params = in_groups(optimizer)
        sizes = [params[place].numel() for place in self.places]
        piece = _piece(sum(sizes))
        largest = piece if type(optimizer) in BY_ELEMENTS else max(sizes, default=0)
        return _COPIES * torch.float32.itemsize * (piece + largest)

    def _pieces(
        self, optimizer: Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Iterator[Callable[[Step], None]]:
        """Yield functions that let the optimizer take its step of some weights, or of a slice of one."""
        most = _piece(sum(params[place].numel() for place in self.places))
        some, size = list[_Weight](), 0
        for place, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            if gradient is None:
                continue
            narrow = place in self.places
            one = _Weight(optimizer, param, gradient, narrow, f"{self.seed} {self.step} {place}")
            count = narrow * param.numel()
            if count > most and one.can_be_cut:
                new = param not in optimizer.state
                yield from (partial(one.take_slice, begin, begin + most, new) for begin in range(0, count, most))
                continue
            if some and size + count > most:
                yield partial(_take, some)
                some, size = [], 0
            some, size = [*some, one], size + count
        if some:
            yield partial(_take, some)


def rounded(rounding: Rounding | None, optimizer: Optimizer, step: Step) -> Step:
    """Return an optimizer's ``step``, or what takes it piece by piece where weights lie in bf16."""
    return partial(rounding.update, optimizer, step) if rounding else step


def why_not(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot be given copies of some weights at a time; empty where it can."""
    name, kind = type(optimizer).__name__, type(optimizer)
    if not (kind in (*BY_ELEMENTS, Adafactor, MuonAndAdamW) or bitsandbytes_internals.is_adamw8bit(optimizer)):
        names = ", ".join(one.__name__ for one in (*BY_ELEMENTS, Adafactor))
        return (
            "precision=bf16_weights needs an optimizer that is known to update each weight by itself (torch's "
            f"{names}, or optimizer=adamw8bit or muon), and {name} is none of them. {_OFF} with it"
        )
    if step_pre_hooks(optimizer) or stepped_by_others(optimizer):
        what = "step" if stepped_by_others(optimizer) else "hooks before the step"
        return f"precision=bf16_weights would show the {what} of this {name} nothing but copies of some weights. {_OFF}"
    return ""


def round_into(weight: Tensor, wide: Tensor, seed: str) -> None:
    """Write fp32 numbers into a weight in bf16, each rounded up or down at random; ``wide`` is used for that.

    The last 16 bits of a number say how far it is from its lower neighbour. A random number below 2**16 is added to
    them, and what they come to is cut off; numbers that bf16 has stay what they are.
    """
    generator = torch.Generator(wide.device).manual_seed(zlib.crc32(seed.encode()))
    drawn = torch.empty(-(-wide.numel() // 4), dtype=torch.int64, device=wide.device)
    drawn.random_(-(2**63), None, generator=generator)
    random = drawn.view(torch.uint16)[: wide.numel()].view(wide.shape).to(torch.int32)
    lost = wide.isnan()
    wide.view(torch.int32).add_(random).bitwise_and_(-(2**16))
    weight.copy_(wide)
    weight.masked_fill_(lost, float("nan"))  # adding may have carried into the sign


def _piece(elements: int) -> int:
    """Return how many elements have copies at a time, of so many that are narrow."""
    return max(_LEAST_ELEMENTS, -(-elements // _PIECES))


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """One weight in an update, whose ``gradient`` it does not have meanwhile; ``seed`` is of its random numbers."""

    optimizer: Optimizer
    param: Tensor
    gradient: Tensor
    narrow: bool
    seed: str

    @property
    def can_be_cut(self) -> bool:
        """Return whether slices of it can be updated by themselves."""
        param, kept = self.param, self.optimizer.state.get(self.param, {})
        values = (value for name, value in kept.items() if by_elements(name, value, param.shape))
        by_itself = type(self.optimizer) in BY_ELEMENTS and not has_gaps(param)
        return by_itself and all(lies_as(value, param) for value in values)

    def put_in(self) -> Tensor:
        """Return what the optimizer shall update in its place."""
        if not self.narrow:
            self.param.grad = self.gradient
            return self.param
        wide, state = self.param.detach().float(), self.optimizer.state
        wide.grad = self.gradient.float()
        if self.param in state:
            state[wide] = state[self.param]
        return wide

    def take_out(self, updated: Tensor) -> None:
        """Take back the state that the optimizer holds for it, however far it has come."""
        updated.grad = None
        if self.narrow and (kept := self.optimizer.state.pop(updated, None)) is not None:
            self.optimizer.state[self.param] = kept

    def take_slice(self, begin: int, end: int, new: bool, step: Step) -> None:
        """Let the optimizer take its step of these elements, counted as they lie; ``new``: it had no state before."""
        param, state = self.param, self.optimizer.state
        row = in_memory_order(param)[begin:end]
        wide = row.float()
        wide.grad = laid_as(self.gradient, param)[begin:end].float()
        kept, given = state.get(param, {}), dict[str, Any]()
        if not new:
            given = {name: _slice(name, value, param, begin, end) for name, value in kept.items()}
            state[wide] = dict(given)
        try:
            _stepped(self.optimizer, {id(param): wide}, step)
        finally:
            after = state.pop(wide, {})
        for name, value in after.items():
            if not by_elements(name, value, wide.shape):
                if end >= param.numel():  # every slice begins with what was there before the first
                    kept[name] = value
            elif value is not given.get(name):
                if name not in kept:
                    kept[name] = torch.empty_like(param, dtype=value.dtype)
                in_memory_order(kept[name])[begin:end].copy_(value)
        if after:
            state[param] = kept
        wide.grad = None
        round_into(row, wide, f"{self.seed} {begin}")


def _slice(name: str, value: Any, param: Tensor, begin: int, end: int) -> Any:
    if by_elements(name, value, param.shape):
        return in_memory_order(value)[begin:end]
    return value.clone() if isinstance(value, Tensor) else value


def _take(weights: Sequence[_Weight], step: Step) -> None:
    """Let an optimizer take its step of these weights together."""
    stand_ins = list[Tensor]()
    try:
        for one in weights:
            stand_ins.append(one.put_in())
        _stepped(weights[0].optimizer, dict(zip((id(one.param) for one in weights), stand_ins, strict=True)), step)
    finally:
        for one, stand_in in zip(weights, stand_ins, strict=False):
            one.take_out(stand_in)
    for one in weights:
        updated = stand_ins.pop(0)
        if one.narrow:
            round_into(one.param, updated, one.seed)


def _stepped(optimizer: Optimizer, stand_ins: Mapping[int, Tensor], step: Step) -> None:
    """Take a step with other tensors in place of weights, which keep their places in the groups."""
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [stand_ins.get(id(one), one) for one in group["params"]]
    try:
        step()
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
