"""Selective checkpointing: of what blocks compute, as much is kept as a budget allows, dearest first.

A forward of its own, which is undone, shows what the operators of each block give, how many bytes of it backward asks
for, and how long each would take to compute again. What takes longest for its bytes is kept first: a larger budget
keeps what a smaller one keeps, and more, so that a step's peak falls with the budget.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...internals.torch_dispatch_internals import sharing, writes
from ...internals.torch_internals import address, is_compiled, uncompiled, version
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import mapped, storage_of, tensors_in
from ...shared.errors import WorkloadError
from .. import cells
from ..random_state import RandomState
from .block_state import SOMETHING_ELSE, cannot
from .operators import Counting, Kept, Learning, Operator, Result, Results, Touched, draws_numbers


class Learned(Exception):
    """A forward has shown what operators give; the step is taken from its beginning."""


def chosen(blocks: Sequence[Results], budget: float) -> list[Kept]:
    """Return what to keep of each block, so that all of it has at most this share of the bytes that backward asks for.

    The greedy answer to a knapsack: by what an operator costs for each byte, from the last block to the first, whose
    results are needed for longest. What exact answers to two budgets keep can lie far apart, and then the peak need
    not fall with the budget; they gain little, because each result is a small part of the whole.
    """
    room = budget * sum(block.saved_bytes for block in blocks)
    found: list[dict[Operator, Result]] = [{} for _ in blocks]
    all_of_them = [
        (index, operator, result)
        for index, block in reversed(list(enumerate(blocks)))
        for operator, result in block.by_operator.items()
        if result.can_be_kept
    ]
    for index, operator, result in sorted(all_of_them, key=lambda one: one[2].nbytes / max(1.0, one[2].cost)):
        if result.nbytes <= room:
            room -= result.nbytes
            found[index][operator] = result
    return list(found)


class Run:
    """One run of a block in forward, of which nothing is kept but how it was called."""

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the block runs."""
        return nullcontext()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor that autograd saves is kept anyway."""
        return False

    def returned(self, output: Any) -> None:
        """The block has run, and given this."""

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it runs once more."""
        return nullcontext()

    def let_go(self) -> None:
        """Backward has come to it: from now on the graph keeps what it needs."""


class LearningRun(Run):
    """One of which nothing is kept either, and which shows what its operators give."""

    def __init__(self, block: nn.Module, results: Results) -> None:
        self._learning, self._results = Learning(block), results

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the block runs."""
        return self._learning

    def returned(self, output: Any) -> None:
        """Add what was learned to what other runs of the block have shown."""
        self._results.add(self._learning.returned(output))

    def holds(self, tensor: Tensor) -> bool:
        """Note that a tensor is saved."""
        self._learning.saved(tensor)
        return False


class KeepingRun(Run):
    """One of which the results of some operators are kept.

    Attributes:
        kept: which.
        results: what these gave, and for inputs of which kind.
        ends: those that wrote into one of these results, and which.
        random: where torch's random numbers stood after operators that took some, and will not do so again.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.results: dict[Operator, tuple[list[Any], Any]] = {}
        self.ends: dict[Operator, Operator] = {}
        self.random: dict[Operator, RandomState] = {}
        self._places: dict[int, Operator] = {}

    def keep(self, operator: Operator, given: Any, inputs: list[Any]) -> list[int]:
        """Keep what an operator gave for inputs of this kind; return the storages."""
        self.results[operator] = inputs, mapped(Tensor, _Held, given)
        places = [address(storage) for storage in map(storage_of, tensors_in(given)) if storage is not None]
        self._places |= dict.fromkeys(places, operator)
        if Recorder.current:
            for tensor in tensors_in(given):
                Recorder.current.saved(tensor)
        return places

    def goes_on(self, operator: Operator, place: int, tensor: Tensor) -> None:
        """An operator writes into what is kept, by this tensor of the same storage."""
        of = self.ends[operator] = self._places[place]
        mapped(_Held, lambda held: held.written(place, tensor), self.results[of][1])

    def drop(self, place: int) -> None:
        """Keep no more what lies there, if anything does."""
        if (of := self._places.get(place)) is not None:
            del self.results[of]
            self._places = {one: operator for one, operator in self._places.items() if operator != of}
            self.ends = {end: operator for end, operator in self.ends.items() if operator != of}
            self.random = {one: state for one, state in self.random.items() if one in self.results or one in self.ends}

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor that autograd saves lies in what is kept."""
        storage = storage_of(tensor)
        return storage is not None and address(storage) in self._places

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the block runs."""
        return _Keeping(self)

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it runs once more, and gets what was kept."""
        return _Returning(self)

    def let_go(self) -> None:
        """Backward has come to it: from now on the graph keeps what it needs."""
        self.results, self.ends, self.random = {}, {}, {}


class _Held:
    """A tensor that an operator gave, without its graph, and the version that it came to."""

    __slots__ = ("_counted", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = self._counted = sharing(tensor)
        self.version = version(tensor)

    def written(self, place: int, tensor: Tensor) -> None:
        """An operator writes into a storage, which may be that of this one; torch counts it when that returns."""
        if address(self.tensor.untyped_storage()) == place:
            self._counted, self.version = sharing(tensor), version(tensor) + 1

    def get(self) -> Tensor:
        """Give the tensor, below autograd.

        Raises:
            WorkloadError: it was changed in place meanwhile.
        """
        if version(self._counted) != self.version:
            raise cannot(
                "a result in it was changed in place after the block had run",
                "Use checkpointing=blocks or none, or replace the in-place operation in the model.",
            )
        return self.tensor.detach()  # which counts by itself in a mode: what wrote into it is told to do so again


class _Keeping(Counting):
    """Keeps what is chosen while a block runs, in the state in which other operators leave it in place."""

    def __init__(self, run: KeepingRun) -> None:
        super().__init__()
        self._run = run
        self._unfinished: dict[int, int] = {}  # how many operators will write into a kept storage, before it is read

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Let it run, and keep what it gives or changes."""
        given, run = func(*args, **kwargs), self._run
        if self._unfinished or writes(func):
            self._look(operator, Touched(func, args, kwargs, given), args)
        if result := run.kept.get(operator):
            places = run.keep(operator, given, _kinds((args, kwargs)))
            self._unfinished |= dict.fromkeys(places, len(result.finished_by)) if result.finished_by else {}
        if (operator in run.results or operator in run.ends) and draws_numbers(func, args, kwargs):
            run.random[operator] = RandomState.take(slow=False)
        return given

    def _look(self, operator: Operator, touched: Touched, args: Any) -> None:
        for place in touched.read:
            self._unfinished.pop(place, None)
        for place in touched.into:
            expected = self._unfinished.get(place, 0)
            if expected and touched.in_place:
                self._run.goes_on(operator, place, args[0])
                self._unfinished[place] = expected - 1
            else:  # it takes another way than the forward that was learned from
                self._run.drop(place)


class _Returning(Counting):
    """Gives what was kept in place of computing it, while a block runs once more."""

    def __init__(self, run: KeepingRun) -> None:
        super().__init__()
        self._run = run

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Give what was kept, or let it run."""
        if after := self._run.random.get(operator):
            after.put_back()
        if kept := self._run.results.pop(operator, None):
            inputs, given = kept
            if inputs != _kinds((args, kwargs)):
                raise cannot(SOMETHING_ELSE)
            return mapped(_Held, _Held.get, given)
        if operator in self._run.ends:
            return args[0]  # which is as it was left
        return func(*args, **kwargs)


def _kinds(inputs: Any) -> list[Any]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(inputs)]


class Selection:
    """What the blocks of one model keep under a budget; learned for each precision, and anew after cells.

    Attributes:
        kept: of each block, since a step began under the budget that is followed.
    """

    def __init__(self) -> None:
        self._blocks: list[weakref.ref[nn.Module]] = []
        self._learned: dict[str, list[Results]] = {}
        self._cells = cells.ran()
        self._budget, self._precision = 0.0, ""
        self._learning: list[Results] | None = None
        self.kept: list[Kept] = []

    def take(self, blocks: Sequence[nn.Module]) -> None:
        """These are the blocks from now on, in the order in which forward calls them.

        Raises:
            WorkloadError: their operators cannot be told apart.
        """
        for module in (part for block in blocks for part in block.modules()):
            if is_compiled(module):
                raise WorkloadError(
                    "checkpointing=selective looks at each operator, and torch.compile has joined those of the "
                    f"{type(uncompiled(module)).__name__}. Use checkpointing=blocks or none."
                )
        if (these := list(map(weakref.ref, blocks))) != self._blocks:
            self._blocks, self.kept = these, []
            self._learned.clear()

    def follow(self, budget: float, precision: str) -> None:
        """Keep this share of what backward asks for, under this precision."""
        if (budget, precision) != (self._budget, self._precision):
            self._budget, self._precision, self.kept = budget, precision, []

    def begin(self) -> None:
        """A step begins."""
        if cells.ran() != self._cells:
            self._cells, self.kept = cells.ran(), []
            self._learned.clear()
        self._learning = None if self._precision in self._learned else [Results() for _ in self._blocks]
        if self._learning is None:
            self.kept = self.kept or chosen(self.results, self._budget)

    def run_of(self, index: int, block: nn.Module) -> Run:
        """Return how a block is run."""
        if self._learning is not None:
            return LearningRun(block, self._learning[index])
        return KeepingRun(self.kept[index]) if self.kept[index] else Run()

    @property
    def results(self) -> list[Results]:
        """What the operators of each block give, as far as that was learned."""
        return self._learned.get(self._precision, [])

    def forward_ended(self) -> None:
        """The loss was computed.

        Raises:
            Learned: it is known now what blocks give.
        """
        if self._learning is not None:
            self._learned[self._precision], self._learning = self._learning, None
            raise Learned
