"""Updates a piece of the weights at a time: of weights in bf16, and of a state that waits in host memory.

With ``offload_optimizer=on`` each piece has its state on the device for its update, and the next one's is on its way.

With ``precision=bf16_weights`` updates are computed in fp32 and rounded stochastically. Rounding to nearest loses every
update below half of a weight's last digit, which in bf16 is up to 1/128 of the weight. Rounded up with a probability
that is the part between the two neighbours, weights are right on average (Gupta et al. 2015, arXiv 1502.02551). Random
numbers follow from seed, step and place of a weight alone: all ranks draw the same, a step that is undone draws them
again, and training's own stay where they are.

The optimizer is given fp32 copies of some weights and gradients at a time, which are small beside the model; its state
is in fp32 all the time. In bf16 a mean of squares that shrinks by a thousandth each step, as Adam's does, would stand
still.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from ...internals import bitsandbytes_internals
from ...internals.torch_internals import step_hooks_held_back, step_pre_hooks, stepped_by_others
from ...memory.host_pool import settle
from ...shared.errors import WorkloadError
from .muon import MuonAndAdamW
from .partition import ALIGNED, by_elements, has_gaps, in_memory_order, laid_as, lies_as
from .parts import in_groups
from .shards import BY_ELEMENTS
from .state_aside import Brought, StateAside

_PIECES = 32  # at least, of all weights that go by pieces: one of them has copies at a time
_LEAST_ELEMENTS = 2**16  # of a piece
_COPIES = 8  # of a piece in fp32, more than there are at any moment: weight, gradient, random bits, the optimizer's own
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pieces:
    """An update that is taken piece by piece.

    Attributes:
        narrow: places, in the optimizer's groups, of weights in bf16 that were in fp32.
        seed, step: what random numbers follow from.
        aside: where the state waits; ``None``: it is on the device.
    """

    narrow: frozenset[int]
    seed: int = 0
    step: int = 0
    aside: StateAside | None = None

    @classmethod
    def of(
        cls, narrow: Iterable[Tensor], optimizer: Optimizer, aside: StateAside | None, seed: int = 0, step: int = 0
    ) -> Pieces | None:
        """Return how these weights, as far as the optimizer has them, are updated; ``None``: all at once."""
        if not (ids := set(map(id, narrow))) and aside is None:
            return None
        places = (place for place, param in enumerate(in_groups(optimizer)) if id(param) in ids)
        return cls(frozenset(places), seed, step, aside)

    def update(self, optimizer: Optimizer, step: Step) -> None:
        """Let the optimizer take its ``step``, piece by piece.

        Raises:
            WorkloadError: it cannot be given some weights at a time, or host memory is short.
        """
        if problem := why_not(optimizer, BF16_WEIGHTS if self.narrow else ASIDE):
            raise WorkloadError(problem)
        params = in_groups(optimizer)
        gradients = [param.grad for param in params]
        if self.aside:
            self.aside.put_away(optimizer)
        try:
            for param in params:
                param.grad = None  # what has none is left alone
            with torch.no_grad(), _differences_of_first(optimizer, params, gradients, self.narrow):
                pieces = list(self._pieces(optimizer, params, gradients))
                if not pieces:  # this rank's share may have none that got a gradient; hooks run all the same
                    step()
                for piece, following in zip(pieces, [*pieces[1:], None], strict=False):
                    piece.fetch()
                    if following:
                        following.fetch()  # while this one is updated
                    # Hooks after the update run after the last piece, for all of them.
                    with step_hooks_held_back(optimizer, pre=True) if following else nullcontext():
                        piece.take(step)
        finally:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            if self.aside and params:
                settle(params[0].device)

    def room(self, optimizer: Optimizer) -> int:
        """Return more bytes than the copies of a piece take, and the state of that and the next one."""
        params = in_groups(optimizer)
        sizes = [param.numel() for place, param in enumerate(params) if self._goes(place)]
        piece = self._most(sum(sizes))
        largest = piece if type(optimizer) in BY_ELEMENTS else max(sizes, default=0)
        itemsize = max(torch.float32.itemsize, *(param.itemsize for param in params))
        return _COPIES * itemsize * (piece + largest) * (2 if self.aside else 1)

    def _goes(self, place: int) -> bool:
        return self.aside is not None or place in self.narrow

    def _most(self, elements: int) -> int:
        """Return how many elements are in a piece, of so many."""
        most = max(_LEAST_ELEMENTS, -(-elements // _PIECES))
        return -(-most // ALIGNED) * ALIGNED if self.aside else most

    def _pieces(
        self, optimizer: Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Iterator[_Some | _Slice]:
        """Yield what lets the optimizer take its step of some weights, or of a slice of one."""
        most = self._most(sum(param.numel() for place, param in enumerate(params) if self._goes(place)))
        some, size = list[_Weight](), 0
        for place, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            if gradient is None:
                continue
            seed = f"{self.seed} {self.step} {place}"
            one = _Weight(optimizer, param, gradient, place in self.narrow, seed, self.aside)
            count = param.numel() if self._goes(place) else 0
            if count > most and one.can_be_cut:
                new = param not in optimizer.state
                yield from (_Slice(one, begin, min(begin + most, count), new) for begin in range(0, count, most))
                continue
            if some and size + count > most:
                yield _Some(some)
                some, size = [], 0
            some, size = [*some, one], size + count
        if some:
            yield _Some(some)


def by_pieces(pieces: Pieces | None, optimizer: Optimizer, step: Step) -> Step:
    """Return an optimizer's ``step``, or what takes it piece by piece."""
    return (lambda: pieces.update(optimizer, step)) if pieces else step


def until_state_waits(pieces: Pieces | None, optimizer: Optimizer, step: Step) -> Step:
    """Return a step that is foreseen: one that makes some state which waits from then on is followed by one more.

    That brings all of it to the device, as later ones do, and takes more than the one that makes it.
    """

    def once_or_twice() -> None:
        before = _having_state(optimizer)
        step()
        if _having_state(optimizer) > before:
            step()

    return once_or_twice if pieces and pieces.aside else step


def _having_state(optimizer: Optimizer) -> int:
    return sum(isinstance(kept, dict) and bool(kept) for kept in optimizer.state.values())


BF16_WEIGHTS = "precision=bf16_weights", "Use precision=bf16"
ASIDE = "offload_optimizer=on", "Use offload_optimizer=off"


def why_not(optimizer: Optimizer, knob: tuple[str, str]) -> str:
    """Return why an optimizer cannot be given some weights at a time, as this knob needs it; empty where it can."""
    (wanted, off), name, kind = knob, type(optimizer).__name__, type(optimizer)
    if not (kind in (*BY_ELEMENTS, Adafactor, MuonAndAdamW) or bitsandbytes_internals.is_adamw8bit(optimizer)):
        names = ", ".join(one.__name__ for one in (*BY_ELEMENTS, Adafactor))
        return (
            f"{wanted} needs an optimizer that is known to update each weight by itself (torch's "
            f"{names}, or optimizer=adamw8bit or muon), and {name} is none of them. {off} with it"
        )
    if step_pre_hooks(optimizer) or stepped_by_others(optimizer):
        what = "step" if stepped_by_others(optimizer) else "hooks before the step"
        shown = "copies of some weights" if knob is BF16_WEIGHTS else "some weights at a time"
        return f"{wanted} would show the {what} of this {name} nothing but {shown}. {off}"
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


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """One weight in an update, whose ``gradient`` it does not have meanwhile; ``seed`` is of its random numbers."""

    optimizer: Optimizer
    param: Tensor
    gradient: Tensor
    narrow: bool
    seed: str
    aside: StateAside | None
    brought: dict[str, Brought] = field(default_factory=dict)

    @property
    def can_be_cut(self) -> bool:
        """Return whether slices of it can be updated by themselves."""
        param, kept = self.param, self.optimizer.state.get(self.param, {})
        values = (value for name, value in kept.items() if by_elements(name, value, param.shape))
        by_itself = type(self.optimizer) in BY_ELEMENTS and not (has_gaps(param) or self.gradient.is_sparse)
        return by_itself and all(lies_as(value, param) for value in values)

    def fetch(self) -> None:
        """Bring what waits of its state to the device, unless it is under way."""
        kept = self.optimizer.state.get(self.param, {})
        if self.aside and not self.brought:
            waiting = ((name, value) for name, value in kept.items() if self.aside.waits(value))
            self.brought.update((name, Brought(value, self.param.device)) for name, value in waiting)

    def put_in(self) -> Tensor:
        """Return what the optimizer shall update in its place."""
        state = self.optimizer.state
        for name, one in self.brought.items():
            state[self.param][name] = one.used()
        if not self.narrow:
            self.param.grad = self.gradient
            return self.param
        wide = self.param.detach().float()
        wide.grad = self.gradient.float()
        if self.param in state:
            state[wide] = state[self.param]
        return wide

    def take_out(self, updated: Tensor) -> None:
        """Take back the state that the optimizer holds for it, however far it has come."""
        updated.grad = None
        if self.narrow and (kept := self.optimizer.state.pop(updated, None)) is not None:
            self.optimizer.state[self.param] = kept

    def let_wait(self, done: bool) -> None:
        """Let its state wait again: as it was, unless its update is ``done``."""
        kept = self.optimizer.state.get(self.param, {}) if self.aside else {}
        for name, value in kept.items():
            one = self.brought.pop(name, None)
            if one and (not done or one.take(value)):
                kept[name] = one.waiting
            elif done and self.aside and self.aside.goes(value):
                kept[name] = self.aside.away(value, self.param.device)


@dataclass(frozen=True, slots=True)
class _Some:
    """Weights that are updated together."""

    weights: Sequence[_Weight]

    def fetch(self) -> None:
        """Bring their state to the device."""
        for one in self.weights:
            one.fetch()

    def take(self, step: Step) -> None:
        """Let the optimizer take its step of them."""
        weights, stand_ins, done = self.weights, list[Tensor](), False
        try:
            for one in weights:
                stand_ins.append(one.put_in())
            _stepped(weights[0].optimizer, dict(zip((id(one.param) for one in weights), stand_ins, strict=True)), step)
            done = True
        finally:
            for one, stand_in in zip(weights, stand_ins, strict=False):
                one.take_out(stand_in)
            for one in weights:
                one.let_wait(done)
        for one in weights:
            updated = stand_ins.pop(0)
            if one.narrow:
                round_into(one.param, updated, one.seed)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Elements of a weight, counted as they lie, that are updated by themselves; ``new``: it had no state before."""

    of: _Weight
    begin: int
    end: int
    new: bool
    brought: dict[str, Brought] = field(default_factory=dict)

    def fetch(self) -> None:
        """Bring their state to the device, unless it is under way."""
        aside, param = self.of.aside, self.of.param
        if self.new or self.brought or not aside:
            return
        for name, value in self.of.optimizer.state.get(param, {}).items():
            if aside.waits(value):
                self.brought[name] = Brought(value, param.device, (self.begin, self.end))

    def take(self, step: Step) -> None:
        """Let the optimizer take its step of them."""
        one, param, state = self.of, self.of.param, self.of.optimizer.state
        row = in_memory_order(param)[self.begin : self.end]
        wide, gradient = row, laid_as(one.gradient, param)[self.begin : self.end]
        if one.narrow:
            wide, gradient = row.float(), gradient.float()
        wide.grad = gradient
        kept, given = state.get(param, {}), dict[str, Any]()
        if not self.new:
            given = {name: self._given(name, value) for name, value in kept.items()}
            state[wide] = dict(given)
        try:
            _stepped(one.optimizer, {id(param): wide}, step)
        finally:
            after = state.pop(wide, {})
        for name, value in after.items():
            if not by_elements(name, value, wide.shape):
                if self.end >= param.numel():  # every slice begins with what was there before the first
                    kept[name] = value
            elif value is not given.get(name) or name in self.brought:
                self._keep(kept, name, value)
        self.brought.clear()
        if after:
            state[param] = kept
        wide.grad = None
        if one.narrow:
            round_into(row, wide, f"{one.seed} {self.begin}")

    def _given(self, name: str, value: Any) -> Any:
        if name in self.brought:
            return self.brought[name].used()
        if by_elements(name, value, self.of.param.shape):
            return in_memory_order(value)[self.begin : self.end]
        return value.clone() if isinstance(value, Tensor) else value

    def _keep(self, kept: dict[str, Any], name: str, value: Tensor) -> None:
        aside, param = self.of.aside, self.of.param
        if name not in kept:
            kept[name] = (
                aside.room(param, value.dtype, param.device) if aside else torch.empty_like(param, dtype=value.dtype)
            )
        if aside and aside.waits(kept[name]):
            aside.fill(kept[name], self.begin, value)
        else:
            in_memory_order(kept[name])[self.begin : self.end].copy_(value)


@contextmanager
def _differences_of_first(
    optimizer: Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor | None], narrow: Collection[int]
) -> Iterator[None]:
    """Inside, each piece has what torch's Adafactor takes from the first weight of a group for all that follow it.

    That is the smallest number that counts in the type of that weight, for groups that name none in ``eps``.
    """
    before = [group.get("eps") for group in optimizer.param_groups]
    types = {
        id(param): torch.float32 if place in narrow else param.dtype
        for place, (param, gradient) in enumerate(zip(params, gradients, strict=True))
        if gradient is not None
    }
    for group in optimizer.param_groups if type(optimizer) is Adafactor else ():
        first = next((types[id(one)] for one in group["params"] if id(one) in types), None)
        if first and group["eps"][0] is None:
            group["eps"] = torch.finfo(first).eps, group["eps"][1]
    try:
        yield
    finally:
        for group, eps in zip(optimizer.param_groups, before, strict=True):
            if "eps" in group:
                group["eps"] = eps


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
