"""What the operators of a block give in forward: how many bytes, at which cost, and which of it backward asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from ...internals.fake_internals import in_fake_mode
from ...internals.torch_dispatch_internals import LookingMode, arguments, writes, written
from ...internals.torch_internals import address
from ...memory.tensors import storage_of, tensors_in
from ..random_state import RandomState

Operator = tuple[str, int]
"""One of a block's calls of operators: its name, and how often that was called before in the same run of the block."""

_CAST = "aten._to_copy.default"
"""Autocast casts once what is a leaf: of a block's input one cast less when it runs once more, from a leaf."""

_MAKES_ANOTHER = re.compile(r"_like\.|\.new_")
"""Operators that make a tensor like another one; torch does not take them to compute with that."""

_FLOPS_A_BYTE = {4: 20, 8: 10}
"""Operations for which a processor takes as long as for moving a byte, by bytes of a number.

The quotient of what data sheets name as peaks: 19.5 TFLOP/s and 1,555 GB/s of an A100 in fp32, 8.1 and 320 of a T4.
"""
_FLOPS_A_BYTE_16_BIT = 200
"""The same with tensor cores: 312 TFLOP/s and 1,555 GB/s of an A100, 65 and 320 of a T4."""


@dataclass(slots=True)
class Result:
    """What one operator gives, in all runs of the block in one forward.

    Attributes:
        nbytes: that are alive as long as it is kept.
        cost: of computing it again, as many bytes as could be moved meanwhile.
        finished_by: the operators that write it to an end in place, before another one reads it.
        draws: whether one of these takes random numbers.
        can_be_kept: nothing but these changes it, and random numbers come from torch's own generators.
    """

    nbytes: int = 0
    cost: float = 0.0
    finished_by: tuple[Operator, ...] = ()
    draws: bool = False
    can_be_kept: bool = True


Kept = Mapping[Operator, Result]
"""What is kept, by the operators that gave it."""


@dataclass(slots=True)
class Results:
    """What the operators of one block give.

    Attributes:
        by_operator: in the order of their calls, up to the last one whose result backward asks for.
        saved_bytes: of what backward asks for, without weights, what was made of them alone, and what the block gives.
    """

    by_operator: dict[Operator, Result] = field(default_factory=dict)
    saved_bytes: int = 0

    def add(self, other: Results) -> None:
        """Take in another run of the same block."""
        self.saved_bytes += other.saved_bytes
        for operator, result in other.by_operator.items():
            mine = self.by_operator.setdefault(operator, Result(finished_by=result.finished_by))
            mine.nbytes += result.nbytes
            mine.cost += result.cost
            mine.draws |= result.draws
            mine.can_be_kept &= result.can_be_kept and mine.finished_by == result.finished_by


class Counting(LookingMode):
    """Sees the operators of one run of a block, and gives each its number."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        name = _name(func)
        operator = name, self._calls[name]
        self._calls[name] += 1
        return self.call(operator, func, args, kwargs or {})

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator gives."""
        raise NotImplementedError


@dataclass(slots=True)
class _Storage:
    """One that an operator made. The reference keeps its address from being used again."""

    reference: StorageWeakRef
    result: Result
    nbytes: int
    was_read: bool = False
    is_saved: bool = False


class Learning(Counting):
    """Learns what the operators of a block give, while it runs once."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._results: dict[Operator, Result] = {}
        self._until = 0  # so many of these come before the last one that backward asks for
        self._saved_bytes = 0
        self._made: dict[int, _Storage] = {}
        held = [*block.parameters(), *block.buffers()]
        self._held = {address(storage): StorageWeakRef(storage) for storage in _storages(held).values()}
        self._constants = dict(self._held)  # and what is made of these alone, or of nothing

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what it gives."""
        # torch's own operators say whether they take random numbers.
        standing = None if func.namespace == "aten" or in_fake_mode() else RandomState.take()
        given = func(*args, **kwargs)
        if hasattr(func, "_schema"):
            untold = standing is not None and standing.moved_anywhere()
            self._note(operator, func, args, kwargs, given, untold)
        return given

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves this one."""
        for place in _storages(tensor):
            made = self._made.get(place)
            if made and not made.is_saved:
                made.is_saved = True
                self._saved_bytes += made.nbytes
        self._until = len(self._results)

    def returned(self, output: Any) -> Results:
        """Return what was learned, without the block's own output, which whatever follows the block holds anyway."""
        for place in _storages(output):
            if made := self._made.get(place):
                made.result.can_be_kept = False
                self._saved_bytes -= made.nbytes * made.is_saved
        for (name, _), result in self._results.items():
            if _MAKES_ANOTHER.search(name):  # whose changes torch counts anew when it is handed out
                result.can_be_kept &= bool(result.finished_by)
        return Results(dict(islice(self._results.items(), self._until)), self._saved_bytes)

    def _note(self, operator: Operator, func: Any, args: Any, kwargs: Any, given: Any, untold: bool) -> None:
        touched = Touched(func, args, kwargs, given)
        cost = _cost(func, args, kwargs, given, touched)
        draws = draws_numbers(func, args, kwargs)
        own = untold or arguments(func, args, kwargs).get("generator") is not None
        for place in touched.into:
            if made := self._made.get(place):
                made.result.can_be_kept &= touched.in_place and not made.was_read and not own
                made.result.draws |= draws
                made.result.finished_by += (operator,)
                made.result.cost += cost
        for place in touched.read:
            if made := self._made.get(place):
                made.was_read = True
        is_constant = touched.sources.keys() <= self._constants.keys()
        for place, storage in touched.into.items() if not is_constant else ():
            if self._constants.pop(place, None) and place not in self._held:
                self._made[place] = _Storage(StorageWeakRef(storage), Result(can_be_kept=False), storage.nbytes())
        if not touched.new:
            return
        if is_constant:
            self._constants |= {place: StorageWeakRef(storage) for place, storage in touched.new.items()}
            return
        nbytes = sum(storage.nbytes() for storage in touched.new.values())
        result = Result(nbytes, cost, draws=draws, can_be_kept=not (own or touched.into or operator[0] == _CAST))
        self._results[operator] = result
        for place, storage in touched.new.items():
            self._made[place] = _Storage(StorageWeakRef(storage), result, storage.nbytes())


class Touched:
    """The storages that an operator has to do with, by their addresses.

    Attributes:
        sources: those of its arguments.
        into: of these, those that it writes into.
        new: those that it made.
        read: of the sources, those whose content counted; views have none.
        in_place: it gives the one argument that it wrote into, and took no numbers from a generator of the user's.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, given: Any) -> None:
        self.sources, outputs = _storages((args, kwargs)), _storages(given)
        self.into = _storages(written(func, args, kwargs)) if writes(func) else {}
        self.new = {place: storage for place, storage in outputs.items() if place not in self.sources}
        counts = self.new or self.into or not outputs  # it is no view, nor something like it
        self.read = set(self.sources) - set(self.into) if counts else set()
        alone = len(self.into) == 1 and not self.new and bool(args) and given is args[0]
        self.in_place = alone and arguments(func, args, kwargs).get("generator") is None


_name = cache(str)  # of few operators, each called often


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    found = filter(None, map(storage_of, tensors_in(value)))
    return {address(storage): storage for storage in found}


def draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator takes random numbers; attention does where it drops something out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    is_attention = "scaled_dot_product" in str(func)
    return not is_attention or bool(arguments(func, args, kwargs).get("dropout_p", 0.0))


def _cost(func: Any, args: Any, kwargs: Any, given: Any, touched: Touched) -> float:
    """Return how long an operator takes, as many bytes as could be moved meanwhile."""
    results = touched.new or touched.into
    moved = sum(storage.nbytes() for storage in (*touched.sources.values(), *results.values()))
    first = next(tensors_in(given), None)
    formula = flop_registry.get(func.overloadpacket)
    if formula is None and "scaled_dot_product" in str(func):  # that of the CPU, whose further arguments are others
        formula, args, kwargs = flop_registry[torch.ops.aten._scaled_dot_product_efficient_attention], args[:3], {}
    if formula is None or first is None:
        return float(moved)
    balance = _FLOPS_A_BYTE.get(first.element_size(), _FLOPS_A_BYTE_16_BIT)
    return float(moved + formula(*args, **kwargs, out_val=given) / balance)
