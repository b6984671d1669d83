"""Which rank updates which elements of the weights, and how the others get what it has made of them (ZeRO stage 1).

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1: the optimizer's state of a weight is needed where that weight
is updated, and nowhere else. All ranks have the same averaged gradients; each updates its share of the weights and
then gets the shares of the others. Borders follow from sizes alone, so ranks need not agree about them.

Updates by elements do not depend on what is updated beside an element, but for one thing: vector instructions compute
the last few elements of a piece by another way than the others, which may differ in the last bit. So borders lie where
no instruction would reach across them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...internals.torch_internals import address
from ...shared.errors import WorkloadError
from ..link.communicator import here
from .parts import in_groups

ALIGNED = 64
"""Elements: no vector instruction of a CPU, unrolled as torch has it, takes more of the shortest type at once."""
COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""What torch's optimizers keep of a weight as one number, also of a weight that is one number itself."""
_PADDED = 16  # bytes at which each piece of a message begins, so that it can be read as any type


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a tensor without gaps as a row of its elements, in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements do not lie one after the other in some order of its dimensions."""
    if tensor.is_contiguous():
        return False
    nearest = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != nearest:
            return True
        nearest *= size
    return False


def in_one_memory(params: Sequence[Tensor]) -> Tensor | None:
    """Return one of these weights without gaps that has elements of another, or is there twice; ``None``: none has."""
    pieces = sorted(
        (address(one.untyped_storage()), one.storage_offset() * one.element_size(), one.nbytes, place)
        for place, one in enumerate(params)
        if one.numel()
    )
    both = (b[-1] for a, b in pairwise(pieces) if a[0] == b[0] and b[1] < a[1] + a[2])
    place = next(both, None)
    return None if place is None else params[place]


def laid_as(value: Tensor, param: Tensor) -> Tensor:
    """Return a tensor of a weight's shape as a row, in the order in which the weight's elements lie."""
    if not lies_as(value, param):
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
    return in_memory_order(value)


def layout(tensor: Tensor) -> tuple[int, ...]:
    """Return what tells how a tensor's elements lie in memory: strides of what has more than one element."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def lies_as(value: Tensor, param: Tensor) -> bool:
    """Return whether a tensor of a weight's shape lies in memory as the weight does."""
    strides = zip(value.stride(), param.stride(), param.shape, strict=True)
    return all(one == other for one, other, size in strides if size > 1)


def by_elements(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether an entry of a state has a number for each element of that shape; others are the same for all."""
    return isinstance(value, Tensor) and name not in COUNTS and tuple(value.shape) == tuple(shape)


class Span(NamedTuple):
    """Elements of one weight: its place in the optimizer's groups, and from where to where they lie in memory."""

    place: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Whose elements are whose.

    Attributes:
        borders: of each weight, by its place in the groups: where the share of each rank begins, and the last one ends.
        rank: of this one.
    """

    borders: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, params: Sequence[Tensor], ranks: int, rank: int) -> Partition:
        """Give each rank as much of each weight, whatever is frozen now or later; a small one goes to the poorest."""
        held, found = [0] * ranks, []
        for param in params:
            count = param.numel()
            if count < ranks * ALIGNED:
                owner = held.index(min(held))
                borders = tuple(count * (border > owner) for border in range(ranks + 1))
            else:
                borders = (*(round(border * count / ranks / ALIGNED) * ALIGNED for border in range(ranks)), count)
            shares = (end - begin for begin, end in pairwise(borders))
            held = [nbytes + share * param.element_size() for nbytes, share in zip(held, shares, strict=True)]
            found.append(borders)
        return cls(tuple(found), rank)

    @property
    def ranks(self) -> int:
        """Return how many share."""
        return len(self.borders[0]) - 1 if self.borders else 1

    def mine(self, place: int) -> Span:
        """Return this rank's share of a weight, which may be empty."""
        return Span(place, *self.borders[place][self.rank : self.rank + 2])

    def kept(self, params: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
        """Return from where to where this rank has elements of each of these weights, by their ids."""
        return {id(param): self.mine(place)[1:] for place, param in enumerate(params[: len(self.borders)])}

    def spans(self, places: Collection[int]) -> list[list[Span]]:
        """Return what each rank has of these weights."""
        return [
            [Span(place, *pair) for place in places if (pair := self.borders[place][rank : rank + 2])[0] < pair[1]]
            for rank in range(self.ranks)
        ]

    @contextmanager
    def updating(self, optimizer: Optimizer, gradients: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """Inside, an optimizer (or a copy with the same groups) has nothing but this rank's share of its weights.

        ``gradients`` are the rows of its share by places of weights; by default weights have whole ones.

        Raises:
            WorkloadError: a gradient is sparse.
        """
        params = in_groups(optimizer)
        found = {id(param): self._view(param, place, gradients) for place, param in enumerate(params)}
        views = {of: view for of, view in found.items() if view is not None}
        of_view = {id(views[id(param)]): param for param in params if id(param) in views}
        whole, state = [group["params"] for group in optimizer.param_groups], dict(optimizer.state)
        rest = {param: kept for param, kept in state.items() if id(param) not in views}
        optimizer.state.clear()
        optimizer.state.update({views[id(param)]: kept for param, kept in state.items() if id(param) in views})
        for group in optimizer.param_groups:
            group["params"] = [views[id(param)] for param in group["params"] if id(param) in views]
        try:
            yield
        finally:
            for group, before in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = before
            state = rest | {of_view[id(view)]: kept for view, kept in optimizer.state.items()}
            optimizer.state.clear()
            optimizer.state.update(state)

    def _view(self, param: Tensor, place: int, gradients: Mapping[int, Tensor] | None) -> Tensor | None:
        _, begin, end = self.mine(place)
        if begin == end:
            return None
        view, gradient = in_memory_order(param)[begin:end], param.grad
        if gradients and place in gradients:
            view.grad, gradient = gradients[place], None
        if gradient is not None and gradient.is_sparse:
            raise WorkloadError("shard_optimizer=on cannot divide a sparse gradient. Use shard_optimizer=off")
        if gradient is not None:
            view.grad = laid_as(gradient, param)[begin:end]
        return view

    def divide(self, optimizer: Optimizer, params: Sequence[Tensor] | None = None) -> None:
        """Keep this rank's share of a state that is whole; where there is no room for that, the whole stays.

        ``params`` are those of which this says who has what; by default all of the optimizer's groups.
        """
        params = in_groups(optimizer) if params is None else params
        kept = {
            param: {
                name: laid_as(value, param)[begin:end].clone() if by_elements(name, value, param.shape) else value
                for name, value in optimizer.state[param].items()
            }
            for place, param in enumerate(params)
            for _, begin, end in (self.mine(place),)
            if begin < end and param in optimizer.state
        }
        for param in params:
            optimizer.state.pop(param, None)
        optimizer.state.update(kept)

    def widen(self, optimizer: Optimizer, updated: Iterable[Tensor]) -> None:
        """Give a copy of an optimizer, whose numbers do not matter, a whole state in place of this rank's share.

        ``updated`` are those of its weights of which some rank has a state.
        """
        params = in_groups(optimizer)
        place = next((place for place, param in enumerate(params) if param in optimizer.state), None)
        if place is None:
            return
        kept, (_, begin, end) = optimizer.state[params[place]], self.mine(place)
        for param in updated:
            optimizer.state[param] = {
                name: torch.empty_like(param, dtype=value.dtype) if by_elements(name, value, (end - begin,)) else value
                for name, value in kept.items()
            }


class _Round(NamedTuple):
    """Messages of one moment: of each rank its pieces, with the byte at which each begins, and all of its bytes."""

    pieces: list[list[tuple[Span, int]]]
    sizes: list[int]


class Exchange:
    """Brings every rank the elements that the others have; its memory is taken when it is made, and none later.

    Args:
        name: of what is exchanged, the same on all ranks.
        partition: says which rank has what.
        dtypes: the types of what is exchanged, by its place.
        most_bytes: of all ranks together, in one message.
        device: where messages lie.
    """

    def __init__(
        self, name: str, partition: Partition, dtypes: Mapping[int, torch.dtype], most_bytes: int, device: torch.device
    ) -> None:
        self._name, self._dtypes = name, dtypes
        sizes = tuple((place, dtype.itemsize) for place, dtype in dtypes.items())
        self._rounds = _rounds(partition, sizes, most_bytes)
        own = max((max(one.sizes) for one in self._rounds), default=0)  # as much on all ranks
        whole = max((sum(one.sizes) for one in self._rounds), default=0)
        self.memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in (own, whole)]

    def run(self, taken: Callable[[Span], Tensor], put: Callable[[int, Span, Tensor], object]) -> None:
        """Send what this rank has and take in what all have. All ranks call it together.

        Args:
            taken: gives the elements of a span of this rank's.
            put: is given those of each span of every rank, and which rank that is.

        Raises:
            Separated: the ranks came apart.
        """
        link, (wire, room) = here(), self.memory
        # Each round has a name of its own: Horovod agrees once about a name that always has the same shape.
        for number, (pieces, sizes) in enumerate(self._rounds):
            for span, at in pieces[link.rank]:
                self._in(wire, at, span).copy_(taken(span))
            name = f"gpumem_nb.{self._name}.{number}"
            gathered = link.all_gather(wire[: sizes[link.rank]], name, room[: sum(sizes)])
            before = 0
            for rank, (of_rank, size) in enumerate(zip(pieces, sizes, strict=True)):
                for span, at in of_rank:
                    put(rank, span, self._in(gathered, before + at, span))
                before += size

    def _in(self, message: Tensor, at: int, span: Span) -> Tensor:
        dtype = self._dtypes[span.place]
        return message[at : at + (span.end - span.begin) * dtype.itemsize].view(dtype)


def of_weights(
    partition: Partition, params: Sequence[Tensor], most_bytes: int, gradients: Collection[int] | None
) -> Exchange:
    """Return what brings ranks the weights that others have updated: those with a gradient, the same on all ranks.

    ``gradients`` are the places of those of which ranks have shares of gradients, if they have no whole ones.
    """
    there = gradients or ()
    dtypes = {place: param.dtype for place, param in enumerate(params) if param.grad is not None or place in there}
    return Exchange("shares", partition, dtypes, most_bytes, params[0].device)


@lru_cache(16)
def _rounds(partition: Partition, sizes: tuple[tuple[int, int], ...], most_bytes: int) -> list[_Round]:
    """Return the messages in which places are exchanged, each given with the bytes of one element there."""
    itemsizes = dict(sizes)
    most = max(1, most_bytes // partition.ranks)
    of_ranks = [list(_messages(spans, itemsizes, most)) for spans in partition.spans(itemsizes)]
    rounds = []
    for number in range(max(map(len, of_ranks), default=0)):
        sent = [of_rank[number] if number < len(of_rank) else ([], _PADDED) for of_rank in of_ranks]
        rounds.append(_Round([pieces for pieces, _ in sent], [size for _, size in sent]))  # no rank may send nothing
    return rounds


def _messages(
    spans: Iterable[Span], itemsizes: Mapping[int, int], most_bytes: int
) -> Iterator[tuple[list[tuple[Span, int]], int]]:
    """Yield the messages of one rank, each with its bytes."""
    pieces: list[tuple[Span, int]] = []
    size = 0
    for place, begin, last in spans:
        while begin < last:
            end = min(last, begin + max(_PADDED, most_bytes - size) // itemsizes[place])
            pieces.append((Span(place, begin, end), size))
            size += -(-(end - begin) * itemsizes[place] // _PADDED) * _PADDED
            begin = end
            if size >= most_bytes:
                yield pieces, size
                pieces, size = [], 0
    if pieces:
        yield pieces, size
