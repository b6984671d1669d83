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

from ...internals.torch_dispatch_internals import sharing
from ...internals.torch_internals import address, is_compiled, uncompiled, version
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import mapped, storage_of, tensors_in
from ...shared.errors import WorkloadError
from .. import cells
from ..random_state import RandomState
from .block_state import SOMETHING_ELSE, cannot
from .operators import Counting, Kept, Learning, Operator, Result, Results, draws_numbers


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

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it runs once more."""
        return nullcontext()

    def let_go(self) -> None:
        """Backward has come to it: from now on the graph keeps what it needs."""


class LearningRun(Run):
    """One of which nothing is kept either, and which shows what its operators give."""

    def __init__(self, block: nn.Module) -> None:
        self.learning = Learning(block)

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the block runs."""
        return self.learning

    def holds(self, tensor: Tensor) -> bool:
        """Note that a tensor is saved."""
        self.learning.saved(tensor)
        return False


class KeepingRun(Run):
    """One of which the results of some operators are kept."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.results: dict[Operator, tuple[list[Any], Any]] = {}
        self.random: dict[Operator, RandomState] = {}  # after operators that take numbers, and will not do so again
        self._places: set[int] = set()

    def keep(self, operator: Operator, given: Any, inputs: list[Any]) -> None:
        """Keep what an operator gave for inputs of this kind."""
        self.results[operator] = inputs, mapped(Tensor, _Held, given)
        for tensor in tensors_in(given):
            if (storage := storage_of(tensor)) is not None:
                self._places.add(address(storage))
            if Recorder.current:
                Recorder.current.saved(tensor)

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
        self.results, self.random = {}, {}


class _Held:
    """A tensor that an operator gave, without its graph, and the version that it came to."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = sharing(tensor), version(tensor)

    def written(self, tensor: Tensor) -> None:
        """An operator writes into this tensor, which may lie in the same storage; torch counts that when it returns."""
        if address(self.tensor.untyped_storage()) == address(tensor.untyped_storage()):
            self.version = version(self.tensor) + 1

    def get(self) -> Tensor:
        """Give the tensor, below autograd.

        Raises:
            WorkloadError: it was changed in place meanwhile.
        """
        if version(self.tensor) != self.version:
            raise cannot(
                "a result in it was changed in place after the block had run",
                "Use checkpointing=blocks or none, or replace the in-place operation in the model.",
            )
        return self.tensor.detach()  # which counts by itself in a mode: what wrote into it is told to do so again


class _Keeping(Counting):
    """Keeps what is chosen while a block runs."""

    def __init__(self, into: KeepingRun) -> None:
        super().__init__()
        self._into = into
        self._ends = {end: operator for operator, result in into.kept.items() for end in result.finished_by}

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Let it run, and keep what it gives or changes."""
        given = func(*args, **kwargs)
        if operator in self._into.kept:
            self._into.keep(operator, given, _kinds((args, kwargs)))
        elif (of := self._ends.get(operator)) in self._into.results:
            mapped(_Held, lambda held: held.written(args[0]), self._into.results[of][1])
        else:
            return given
        if draws_numbers(func, args, kwargs):
            self._into.random[operator] = RandomState.take(slow=False)
        return given


class _Returning(Counting):
    """Gives what was kept in place of computing it, while a block runs once more."""

    def __init__(self, run: KeepingRun) -> None:
        super().__init__()
        self._results, self._random = run.results, run.random
        held = (result for operator, result in run.kept.items() if operator in self._results)
        self._ends = {end for result in held for end in result.finished_by}

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Give what was kept, or let it run."""
        if operator in self._random:
            self._random[operator].put_back()
        if operator in self._results:
            inputs, given = self._results.pop(operator)
            if inputs != _kinds((args, kwargs)):
                raise cannot(SOMETHING_ELSE)
            return mapped(_Held, _Held.get, given)
        if operator in self._ends:
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
            self.kept = self.kept or chosen(self._learned[self._precision], self._budget)

    def run_of(self, index: int, block: nn.Module) -> Run:
        """Return how a block is run."""
        if self._learning is not None:
            return LearningRun(block)
        return KeepingRun(self.kept[index]) if self.kept[index] else Run()

    def ran(self, index: int, run: Run, output: Any) -> None:
        """A block has run, and given this."""
        if self._learning is not None and isinstance(run, LearningRun):
            self._learning[index].add(run.learning.returned(output))

    def forward_ended(self) -> None:
        """The loss was computed.

        Raises:
            Learned: it is known now what blocks give.
        """
        if self._learning is not None:
            self._learned[self._precision], self._learning = self._learning, None
            raise Learned
