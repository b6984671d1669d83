"""Measures the effect of any code on memory: for your own training loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..internals.torch_internals import address
from ..shared.categories import CATEGORIES
from ..shared.errors import InvalidInput
from ..shared.messages import Ledger
from ..shared.units import format_bytes
from .device import opened
from .leaks.births import Birth, Births
from .leaks.holders import Graphs, Holders, holder_on
from .ledger.recorder import Recorder
from .tensors import storage_of, tensors_by_storage, tensors_of_this_process

MOST_LEFT = 10  # tensors that are named, the largest ones


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor that outlived the code that made it: where it was made, and what holds it (both may be empty)."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made_at: str
    holder: str

    def __str__(self) -> str:
        made = f", made at {self.made_at}" if self.made_at else ""
        held = f", held by {self.holder}" if self.holder else ""
        return f"{format_bytes(self.nbytes)}: {self.dtype} {list(self.shape)}{made}{held}"


class Tracked:
    """The effect of some code on this rank's memory; filled when it has ended.

    Attributes:
        ledger: where the bytes were at the peak and at the end; ``None`` while the code runs.
        before, after: live bytes.
        left: the largest tensors that were made inside and are still alive, weights and optimizer state aside.
    """

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.before = self.after = 0
        self.left: tuple[Left, ...] = ()

    @property
    def peak(self) -> int | None:
        """Highest live bytes; ``None`` while the code runs."""
        return self.ledger.peak_bytes if self.ledger else None

    def __str__(self) -> str:
        if self.ledger is None:
            return "not ended yet"
        ledger, kind = self.ledger, " (virtual)" if self.ledger.virtual else ""
        where = f", in {ledger.module}" if ledger.module else ""
        above = format_bytes(ledger.peak_bytes - self.before)
        lines = [f"live peak {format_bytes(ledger.peak_bytes)}{kind}, {above} above the start{where}"]
        lines += [
            f"  {category:<17} {format_bytes(size):>10} {size / ledger.peak_bytes:>5.0%}"
            for category in CATEGORIES
            if (size := ledger.at_peak.get(category))
        ]
        change = self.after - self.before
        lines += [f"left behind: {format_bytes(change)}" if change > 0 else f"left behind: nothing ({change:+,} B)"]
        return "\n".join([*lines, *(f"  {left}" for left in self.left)])

    __repr__ = __str__


@contextmanager
def track() -> Iterator[Tracked]:
    """Report the memory of the code inside: ``with track() as report: ...``, then ``print(report)``.

    Peak and categories as in a training step, as far as they can be told: parameters and their gradients are those of
    all modules that exist, optimizer states those of all optimizers. Watching every operator takes time: twice or three
    times that of a small model.

    Raises:
        InvalidInput: a training step or another ``track`` is being recorded around it.
    """
    if Recorder.current is not None:
        raise InvalidInput("track() cannot be used inside another one, nor in a step that is being recorded.")
    device, tracked = opened(), Tracked()
    gc.collect()
    recorder, births = Recorder(device, *_modules()), Births(device.torch_device)
    tracked.before = device.reading().live_bytes
    with recorder.watching(), _optimizers_seen(recorder):
        recorder.mark("")
        try:
            with births:
                yield tracked
        finally:  # what ran out of memory is of interest most of all
            gc.collect()  # circles of garbage are not left behind
            lasting = _claim_all(recorder)
            tracked.ledger = recorder.end().ledger()
            tracked.after = device.reading().live_bytes
            births.prune()
            tracked.left = tuple(_left([birth for birth in births.births if birth.address not in lasting]))


@contextmanager
def _optimizers_seen(recorder: Recorder) -> Iterator[None]:
    """Gradients are mostly gone at the end, so they are claimed when an optimizer uses them."""

    def claim(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        recorder.claim_model(params, optimizer.state)

    handles = register_optimizer_step_pre_hook(claim), register_optimizer_step_post_hook(claim)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules() -> list[nn.Module]:
    """Return all modules that no other module holds."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _claim_all(recorder: Recorder) -> set[int]:
    """Claim weights, gradients and optimizer state; returns the storages of weights and state."""
    state: dict[Any, dict[str, Any]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):
            state |= thing.state
    params = [param for module in _modules() for param in module.parameters()]
    recorder.claim_model(params, state)
    values = [value for of_param in state.values() for value in of_param.values() if isinstance(value, Tensor)]
    return {address(storage) for tensor in [*params, *values] if (storage := storage_of(tensor)) is not None}


def _left(births: list[Birth]) -> Iterator[Left]:
    largest = sorted(births, key=lambda birth: birth.nbytes, reverse=True)[:MOST_LEFT]
    found, holders, graphs = tensors_by_storage({birth.address for birth in largest}), Holders({}), None
    tensors = {place: of_place[0] for place, of_place in found.items() if of_place}
    ways = dict(zip(tensors, holders.ways(list(tensors.values())), strict=True))
    for birth in largest:
        way, saved = ways.get(birth.address), ""
        if way is None:
            graphs = graphs or Graphs(tensors_of_this_process())
            root = graphs.root_of_storage(birth.address) or graphs.root_of_ends(found[birth.address], holders)
            way = holders.ways([root])[0] if root is not None else None
            saved = ", whose graph saved it for backward"
        holder = holder_on(way, len(way.objects) - 1).text + saved if way else ""
        yield Left(birth.nbytes, birth.shape, birth.dtype.removeprefix("torch."), birth.made_at, holder)
