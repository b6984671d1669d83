"""Memory that training keeps from step to step: noticed at step boundaries, then looked for and named.

Noticing costs microseconds a step. Only when live bytes have grown for many steps are a few steps watched operator by
operator; what they made and is still alive some steps later is what leaks.
"""

from __future__ import annotations

import gc
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ...shared.messages import Leak, Sample
from ..tensors import tensors_by_storage, tensors_of_this_process
from .births import Birth, Births
from .holders import UNSEEN, Graphs, Holder, Holders, Way, holder_on

# Steps in a block, and how many blocks in a row must be higher than the one before. The lowest live bytes of blocks are
# compared: what comes and goes within one does not count, such as garbage in circles, or a batch of another length that
# is kept until the next. From four steps on blocks may also be equal in between: then a single number that each step
# keeps (4 bytes) shows through the votes (16 bytes) that Horovod's thread lets go of sooner or later.
BLOCKS = {1: 22, 2: 13, 4: 5, 16: 7}
MAY_BE_EQUAL = 4
SLOWEST = 0.4  # of its pace at first: a cache that fills gets slower
QUIET_STEPS = 2  # after a start or a flip: the optimizer's state appears, buffers are made
# Growth in each step: but for a step at whose end garbage went. What lived some steps longer, as gradients may that the
# reduction's thread still holds, makes one step grow by more and a later one by as much less, which is no exception:
# together they have grown by as much as each step does.
STEADY_STEPS, EXCEPTIONS = 38, 2
LATE_STEPS = 3


@dataclass(slots=True)
class _Scale:
    """Blocks of one length."""

    steps: int
    wanted: int
    seen: int = 0
    lowest: int = 0
    before: int = 0
    rises: int = -1
    ties: int = 0
    began_at: int = 0  # live bytes before the first of the rises
    half_at: int = 0  # and after half of those wanted

    def add(self, level: int) -> None:
        self.lowest = level if self.seen == 0 else min(self.lowest, level)
        self.seen += 1
        if self.seen < self.steps:
            return
        self.seen = 0
        if self.rises >= 0 and self.lowest > self.before:
            self.rises += 1
            if self.rises == self.wanted // 2:
                self.half_at = self.lowest
        elif self.lowest == self.before and self.steps >= MAY_BE_EQUAL and self.ties < self.rises:
            self.ties += 1
        else:
            self.rises, self.ties, self.began_at = 0, 0, self.lowest
        self.before = self.lowest

    @property
    def grows(self) -> bool:
        if self.rises < self.wanted:
            return False
        half = self.wanted // 2
        at_first = (self.half_at - self.began_at) / half
        since = (self.before - self.half_at) / (self.rises - half)
        return since >= SLOWEST * at_first

    @property
    def pace(self) -> float:
        return (self.before - self.began_at) / ((self.rises + self.ties) * self.steps)


class Growth:
    """Follows the live bytes of one rank at step boundaries.

    Bytes that appear between chunks, where cells run, are no growth; bytes that go there are.

    Attributes:
        level: by how many bytes steps have grown or shrunk what is live, all together.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self.level = 0
        self._quiet = QUIET_STEPS
        self._scales = [_Scale(steps, wanted) for steps, wanted in BLOCKS.items()]
        self._grown: deque[int] = deque(maxlen=STEADY_STEPS + LATE_STEPS)  # by how much in each of the last steps

    def settle(self) -> None:
        """Something was flipped: the next steps may hold more or less, for good."""
        self._quiet = QUIET_STEPS

    def chunk_begins(self, live: int) -> None:
        """Live bytes before the first step of a chunk."""
        if self._last is not None:
            self.level += min(0, live - self._last)
        self._last = live

    def step_ended(self, live: int) -> None:
        """Live bytes after a step."""
        before, self._last = self._last, live
        if self._quiet or before is None:
            self._quiet = max(0, self._quiet - 1)
            return
        self.level += live - before
        self._grown.append(live - before)
        for scale in self._scales:
            scale.add(self.level)

    @property
    def every(self) -> int:
        """In how many steps live bytes grow for sure, for a long time now; 0 while they do not."""
        return next((scale.steps for scale in self._scales if scale.grows), 0)

    @property
    def in_each_step(self) -> bool:
        """Return whether live bytes grew in each step of late."""
        if len(self._grown) < STEADY_STEPS:
            return False
        grown, usual = list(self._grown), median(self._grown)
        before = len(grown) - STEADY_STEPS
        exceptions = sum(not _grew(grown[: before + index + 1], usual) for index in range(STEADY_STEPS))
        return exceptions <= EXCEPTIONS

    @property
    def bytes_so_far(self) -> int:
        """Return by how much they have grown."""
        return max(scale.before - scale.began_at for scale in self._scales)

    @property
    def bytes_per_step(self) -> float:
        """Return how fast they grow; 0 while they do not."""
        return next((scale.pace for scale in self._scales if scale.grows), 0.0)


def _grew(steps: Sequence[int], usual: float) -> bool:
    """Return whether the last of these steps grew, or fell only by what had lived longer than the step that made it."""
    now = steps[-1]
    together = (sum(steps[-1 - late :]) - (late + 0.5) * usual for late in range(1, LATE_STEPS + 1))
    return now > 0 or (now < 0 and max(together) >= 0)


# Steps from the first that is watched to the search, and at least from the last one: what was made must outlive them,
# because a model may keep its latest results, and a cache must have had its chance to be hit.
SEARCH_AFTER_STEPS, PATIENCE_STEPS = 16, 6
# Of each step: less without a graph are numbers that the user's code keeps, such as detached losses.
SMALLEST_BYTES_PER_STEP = 1024
SEARCHED_TENSORS = 48  # the largest, of all steps watched together
FIRST_REST_STEPS, LONGEST_REST_STEPS = 32, 1024  # after a search, unless growth gets faster
FASTER = 1.25
# Of the growth before a watch, that of the steps since: more than a cache shows whose entries are used again now and
# then, and less than all, because garbage from before may go meanwhile.
STILL_GROWING = 0.75

_FIXES = {
    "hooks": "Register the hook once, outside the training step, or call remove() on its handle.",
    "traceback": "Keep str(error) instead of the exception, or clear it: error.with_traceback(None).",
    "default": "A default argument is made once and shared by all calls: use None, and make it inside the function.",
    "dict": "Delete entries that are no longer used, or bound it.",
    "container": "Clear it once its contents were used, or bound it, for example with collections.deque(maxlen=10).",
    "variable": "Let go of what it refers to once it was used.",
    "unseen": "Look for what the line that made it passes it on to.",
}
_GRAPH_FIX = "It keeps the autograd graph of every step: {} tensor.item() (a number) or tensor.detach() instead."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A storage that outlived its step, the tensor by which Python holds it, and the way to that tensor."""

    birth: Birth
    tensor: Tensor | None
    way: Way | None


class LeakDetector:
    """Watches the steps of one rank; :meth:`take` says what was found.

    Args:
        rank: this one.
        device: of the tensors.
        known: ``model``, ``dataset`` and whatever else has a name that people know.

    Attributes:
        let_go: called before a search, which would find what training itself keeps of the model between steps.
    """

    def __init__(self, rank: int, device: torch.device, known: Mapping[str, object]) -> None:
        self._rank, self._device, self._known = rank, device, known
        self.let_go: Callable[[], None] = lambda: None
        self._growth = Growth()
        self._settings_id = -1
        self._steps = self._step = 0  # seen here, and the last one's number
        self._births: Births | None = None  # while a leak is looked for
        self._watched_steps = 0
        self._ends_after = 0
        self._level_then, self._pace_then = 0, 0.0  # when the watch began
        self._rest_until, self._rest_steps, self._rest_rate = 0, FIRST_REST_STEPS, 0.0
        self._told: set[str] = set()
        self._found: list[Leak] = []

    def chunk_begins(self, live: int) -> None:
        """Live bytes before the first step of a chunk."""
        self._growth.chunk_begins(live)

    def step(self) -> AbstractContextManager[object]:
        """Wraps forward and backward; does nothing but in the few steps that are watched."""
        return self._births if self._births and self._watched_steps < self._ends_after else nullcontext()

    def step_ended(self, sample: Sample, numbers: int) -> None:
        """Take in a step's measurements; at its end the trainer itself held this many losses and loss scales."""
        if sample.settings_id != self._settings_id:
            self._settings_id = sample.settings_id
            self._growth.settle()
        self._steps, self._step = self._steps + 1, sample.step
        self._growth.step_ended(sample.live_bytes - numbers * self._bytes_of_a_number())
        if self._births is not None:
            self._go_on_watching(self._births, done=sample.done)
        elif (every := self._growth.every) and self._is_due():
            self._births = Births(self._device)
            self._watched_steps, self._ends_after = 0, 2 * every + 1  # two of them must leave something
            self._level_then, self._pace_then = self._growth.level, self._growth.bytes_per_step

    def take(self) -> tuple[Leak, ...]:
        """Return what was found since the last time."""
        found, self._found = tuple(self._found), []
        return found

    def _bytes_of_a_number(self) -> int:
        return 512 if self._device.type == "cuda" else 4  # CUDA's caching allocator hands out multiples of 512

    def _is_due(self) -> bool:
        return self._steps >= self._rest_until or self._growth.bytes_per_step > FASTER * self._rest_rate

    def _go_on_watching(self, births: Births, done: bool) -> None:
        if not done:
            births.forget_step()
            return
        births.prune()
        self._watched_steps += 1
        births.step = self._watched_steps
        if self._watched_steps < max(SEARCH_AFTER_STEPS, self._ends_after + PATIENCE_STEPS):
            return
        self._births = None
        self._rest_until, self._rest_rate = self._steps + self._rest_steps, self._growth.bytes_per_step
        self._rest_steps = min(2 * self._rest_steps, LONGEST_REST_STEPS)
        try:
            self._name(births)
        except Exception:  # a leak without a name is not a reason to end training
            _log.exception("A leak could not be named.")

    def _name(self, births: Births) -> None:
        self.let_go()
        gc.collect()  # cycles of garbage are not a leak
        births.prune()
        kept = _held(births.births, Holders(self._known))
        groups: dict[str, list[tuple[_Kept, Holder]]] = defaultdict(list)
        for one, holder in zip(kept, _common_holders(kept), strict=True):
            groups[holder.name].append((one, holder))
        for group in groups.values():
            self._tell([one for one, _ in group], group[0][1])

    def _tell(self, kept: Sequence[_Kept], holder: Holder) -> None:
        steps = {one.birth.step for one in kept}
        rate = sum(one.birth.nbytes for one in kept) / self._ends_after
        graph = any(one.tensor is not None and one.tensor.grad_fn is not None for one in kept)
        worth_it = graph or holder.kind in ("hooks", "traceback") or rate >= SMALLEST_BYTES_PER_STEP
        # A dict whose entries are used again in some steps, or that holds samples, is a cache.
        grows_in_each = len(steps) == self._ends_after and self._growth.in_each_step and self._grows_as_before()
        is_cache = holder.kind == "dict" and (not grows_in_each or self._in_dataset(kept[0]))
        if len(steps) < 2 or not worth_it or is_cache or holder.bounded or holder.name in self._told:
            return
        self._told.add(holder.name)
        largest = max((one.birth for one in kept), key=lambda birth: birth.nbytes)
        self._found.append(
            Leak(
                rank=self._rank,
                step=self._step,
                bytes_per_step=round(rate),
                bytes_so_far=self._growth.bytes_so_far,
                tensor_bytes=largest.nbytes,
                shape=largest.shape,
                dtype=largest.dtype,
                made_at=largest.made_at,
                name=holder.name,
                holder=holder.text,
                fix=_fix(holder, graph),
            )
        )

    def _grows_as_before(self) -> bool:
        grown = self._growth.level - self._level_then
        return grown >= STILL_GROWING * self._pace_then * self._watched_steps

    def _in_dataset(self, kept: _Kept) -> bool:
        return kept.way is not None and any(thing is self._known.get("dataset") for thing in kept.way.objects)


def _fix(holder: Holder, graph: bool) -> str:
    if graph and holder.kind in ("container", "dict", "variable"):
        return _GRAPH_FIX.format("add" if holder.kind == "variable" else "store")
    return _FIXES[holder.kind]


def _held(births: Sequence[Birth], holders: Holders) -> list[_Kept]:
    """By what Python holds the storages: by a tensor of its own, or by one in whose graph they are saved."""
    tensors = tensors_by_storage({birth.address for birth in births})
    holders.ignore(tensors, *tensors.values())
    searched = [tensor for birth in _largest(births) for tensor in tensors[birth.address]]
    ways = {id(tensor): way for tensor, way in zip(searched, holders.ways(searched), strict=True)}
    kept, graphs = [], None
    for birth in births:
        own = tensors[birth.address]
        direct = next((tensor for tensor in own if ways.get(id(tensor))), None)
        if direct is None:
            graphs = graphs or Graphs(tensors_of_this_process())
            root = graphs.root_of_storage(birth.address) or graphs.root_of_ends(own, holders)
            if root is not None or all(id(tensor) in ways for tensor in own):
                kept.append((birth, root))
        else:
            kept.append((birth, direct))
    roots = list({id(tensor): tensor for _, tensor in kept if tensor is not None and not ways.get(id(tensor))}.values())
    ways |= {id(root): way for root, way in zip(roots, holders.ways(roots), strict=True)}
    return [_Kept(birth, tensor, ways.get(id(tensor))) for birth, tensor in kept]


def _largest(births: Sequence[Birth]) -> list[Birth]:
    by_step: dict[int, list[Birth]] = defaultdict(list)
    for birth in sorted(births, key=lambda birth: birth.nbytes, reverse=True):
        by_step[birth.step].append(birth)
    share = SEARCHED_TENSORS // max(1, len(by_step)) or 1
    return [birth for of_step in by_step.values() for birth in of_step[:share]]


def _common_holders(kept: Sequence[_Kept]) -> list[Holder]:
    """For each the innermost object that holds something of another step too: that is what grows."""
    steps: dict[int, set[int]] = defaultdict(set)
    for one in kept:
        for thing in one.way.objects if one.way else ():
            steps[id(thing)].add(one.birth.step)
    holders = []
    for one in kept:
        if one.way is None:
            holders.append(UNSEEN)
            continue
        shared = [index for index, thing in enumerate(one.way.objects) if len(steps[id(thing)]) > 1]
        holders.append(holder_on(one.way, max(shared, default=0)))
    return holders
