"""The stream over data that can be iterated only, and the choice of a stream for any data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shared.errors import WorkloadError, text_of
from ...shared.units import DEFAULT_SEED
from ..copies import host_copy
from ..random_state import RandomState, begin_at, set_aside
from .fetching import collated, no_fault_of_a_sample
from .handed import Collate, Handed, check_repeatable, collated_copies, handed_over, takes_nothing_out
from .stream import ShardedStream, Stream

_FEW_SAMPLES, _FEW_BATCHES = 16, 2


class _Kept(NamedTuple):
    """The content of one place, and the pass that it was read in: its number and the place where it began."""

    item: Any
    number: int
    began: int


class IterableStream(Stream):
    """An iterable of samples, or of micro-batches, passed through again and again.

    Every rank iterates over everything and keeps its share, places ``rank``, ``rank + size`` and so on of the stream:
    that costs each rank the reading of all samples, and is exact without a word between ranks. One pass follows
    another without a gap: a step that reaches the end of one goes on in the next. So each pass gives each sample once,
    no rank waits for another, and all steps have the same size. How long a pass is need not be known.

    What is random in a pass begins from seed and pass, on every rank alike, apart from the model's random numbers.
    To go back to a place, a rank reads the pass again from its beginning.
    """

    length = None

    def __init__(self, data: Any, collate: Collate, rank: int, size: int, seed: int) -> None:
        """A stream at its beginning.

        Raises:
            WorkloadError: it can be iterated over only once.
        """
        super().__init__(data, rank, size, seed)
        check_repeatable(data)
        self.collate = collate
        self._kept: deque[_Kept] = deque()  # of this rank, from position on: an undone step takes them again
        self._iterator: Iterator[Any] | None = None
        self._random: RandomState | None = None  # of the iterator
        self._pass = 0
        self._pass_start = 0
        self._read = 0  # places that the iterator is behind

    def go_to(self, position: int, passes: int, pass_began: int) -> None:
        """Go on at another position, which lies in or behind the pass that began at ``pass_began``."""
        super().go_to(position, passes, pass_began)
        self._kept.clear()
        self._iterator, self._pass, self._pass_start = None, passes, pass_began

    def first_items(self, count: int) -> list[Any]:
        """Return what the first pass begins with; the stream stays where it is."""
        with set_aside():
            iterator = self._begun(0)
            return [item for _, item in zip(range(count), iterator, strict=False)]

    def handed(self) -> Handed:
        """Return the data as a dry run is given it, by some items that the next steps will take."""
        count = _FEW_BATCHES if self.info.batched else _FEW_SAMPLES
        self._read_ahead(count)
        items = [self._kept[place].item for place in range(count)]
        return Handed(items, self.collate, None, self.info)

    def micro_batches(self, batch_size: int, count: int) -> Iterator[Any]:
        """The ``count`` collated micro-batches of this rank's next step. The position stays until :meth:`advance`."""
        places = self._places(batch_size)
        self.foreign = self.info.batched
        # An undone step takes what is kept again.
        collate = self.collate if takes_nothing_out(self.collate) else partial(collated_copies, self.collate)
        for start in range(0, places * count, places):
            self._read_ahead(start + places)
            items = [self._kept[index].item for index in range(start, start + places)]
            yield self._collated(collate, items, self.position + start * self.size + self.rank)

    def _collated(self, collate: Collate, items: list[Any], place: int) -> Any:
        if not self.draws:
            return collated(collate, items)
        with set_aside():
            begin_at(self.seed, place, "batch")
            return collated(collate, items)

    def advance(self, batch_size: int, count: int) -> None:
        """The step was done: go on behind it."""
        places = self._places(batch_size) * count
        last = [self._kept.popleft() for _ in range(places)][-1]
        self.passes, self.pass_began = last.number, last.began
        self.position += self.size * places

    def _read_ahead(self, own: int) -> None:
        """Read until this rank has what lies at its next ``own`` places."""
        if len(self._kept) >= own:
            return
        with self._own_random():
            try:
                while len(self._kept) < own:
                    place = self.position + len(self._kept) * self.size + self.rank
                    item = self._item(place)
                    self._kept.append(_Kept(_on_the_host(item), self._pass, self._pass_start))
            except BaseException:  # which ends most iterators
                self._iterator = None
                raise

    def _item(self, place: int) -> Any:
        while True:
            if self._iterator is None:
                self._read = self._pass_start
                self._iterator = self._begun(self._pass)
            try:
                for item in self._iterator:
                    self._read += 1
                    if self._read > place:
                        return item
            except Exception as error:
                if no_fault_of_a_sample(error):
                    raise
                which = f"item {self._read - self._pass_start} of pass {self._pass + 1} over the data"
                raise WorkloadError(f"{which} failed: {type(error).__name__}: {text_of(error)}.") from error
            if self._read == self._pass_start:
                raise WorkloadError(
                    f"Pass {self._pass + 1} over the data gave nothing. Let each iteration over it begin anew."
                )
            self._pass, self._pass_start, self._iterator = self._pass + 1, self._read, None

    def _begun(self, number: int) -> Iterator[Any]:
        begin_at(self.seed, number, "pass")
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        return iter(self.dataset)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Inside, random numbers are those of the iterator."""
        models = RandomState.take()
        if self._random:
            self._random.put_back()
        try:
            yield
        finally:
            self._random = RandomState.take()
            models.put_back()


def _on_the_host(item: Any) -> Any:
    """Return the same in memory that no device counts: a GPU would not hold what waits for its step."""
    if isinstance(item, Tensor):
        return host_copy(item) if item.layout is torch.strided and item.device.type == "cpu" else item
    if type(item) is dict:
        return {key: _on_the_host(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(map(_on_the_host, item))
    return item


def stream_of(data: Any, rank: int, size: int, seed: int = DEFAULT_SEED) -> Stream:
    """Return one rank's share of the data that was handed over, from its beginning on.

    Raises:
        WorkloadError: it cannot be shared out among the ranks.
    """
    handed = handed_over(data)
    stream: Stream
    if handed.order is None:
        stream = IterableStream(handed.dataset, handed.collate, rank, size, seed)
    else:
        stream = ShardedStream(handed.dataset, handed.collate, rank, size, seed, handed.order, handed.handed_on)
    stream.info, stream.notes = handed.info, handed.notes
    return stream
