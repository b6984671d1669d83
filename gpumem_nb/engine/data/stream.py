"""The samples of one rank, step by step: what every stream does, and the one over a dataset that can be indexed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...shared.errors import WorkloadError
from ...shared.knobs.step import why_fixed
from ...shared.settings import Settings
from ...shared.units import DEFAULT_SEED
from ...shared.workload import DataInfo
from .. import cells
from ..random_state import seed_of
from .fetching import Fetcher, Task
from .handed import Collate, Handed, may_give_stored
from .orders import Order, Shuffled
from .sizes import Longest
from .workers import At, Workers

_LOADING = ("num_workers", "pin_memory", "prefetch_factor", "on_bad_sample")  # the knobs of shared/knobs/loading.py


class Stream:
    """An endless stream of samples, cut into steps, of which each rank gets its share.

    A place holds one sample (or one micro-batch, where the data brings micro-batches of its own). One step takes
    ``size × per_rank`` consecutive places.

    Attributes:
        dataset: what the samples come from.
        rank, size: of this rank, and of all.
        seed: of the order of samples, and of the random numbers that they draw.
        position: places consumed so far by all ranks together.
        passes, pass_began: of data that is iterated, the passes that were over and where the one under way began, as
            of the last place consumed.
        length: places of an epoch; ``None`` when that is not known.
        info: how the data was handed over.
        notes: what is to be said of it once.
        draws: whether samples or their collation draw random numbers. Those of each sample begin from seed and place
            then, so that they depend neither on who fetches it nor on what was fetched before.
        unsteady: whether samples follow from when they were read: they or their collation give something else each
            time, with equal random numbers too, or keep what they drew the first time.
        varies: whether samples are of different sizes after they were collated too, as far as was seen.
        foreign: whether its batches may lie in memory that is not the device's alone: the dataset's, which a GPU would
            leave as it is, or a worker's, which the virtual GPU does not count.
        repeats_longest: whether micro-batches are made of the largest sample at the moment.
    """

    length: int | None
    collate: Collate

    def __init__(self, dataset: Any, rank: int, size: int, seed: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.size = size
        self.seed = seed
        self.position = self.passes = self.pass_began = 0
        self.draws = self.unsteady = self.varies = self.foreign = self.repeats_longest = False
        self.info = DataInfo()
        self.notes: tuple[str, ...] = ()
        self._settings = Settings()
        self._skipped: dict[str, None] = {}

    def load_with(self, settings: Settings) -> None:
        """Fetch as these settings say, from the next step on."""
        self._settings = settings

    @property
    def epoch(self) -> float | None:
        """Epochs seen so far; ``None`` where their length is not known."""
        return self.position / self.length if self.length else None

    def check_length(self) -> None:
        """After a cell: refuse data that has become longer or shorter, of which the order of samples knows nothing."""

    def make_ready(self, batch_size: int, count: int, trial: bool = False) -> None:
        """Begin what the next step needs and must not begin within it, such as new processes."""

    def micro_batches(self, batch_size: int, count: int) -> Iterator[Any]:
        """The ``count`` collated micro-batches of this rank's next step. The position stays until :meth:`advance`."""
        raise NotImplementedError

    def advance(self, batch_size: int, count: int) -> None:
        """The step was done: go on behind it."""
        raise NotImplementedError

    def go_to(self, position: int, passes: int, pass_began: int) -> None:
        """Go on at another position, as a training state has it."""
        self.position, self.passes, self.pass_began = position, passes, pass_began

    def close(self) -> None:
        """End what was started."""

    def longest(self) -> Longest | None:
        """Return the largest sample, as far as was looked; ``None`` where samples cannot be looked at one by one."""
        return None

    def large_sample(self, settings: Settings) -> str:
        """Return a sentence about a sample of the next step that is much larger than others; empty without one."""
        return ""

    def handed(self) -> Handed:
        """Return the data as a dry run is given it; the stream stays where it is."""
        raise NotImplementedError

    @contextmanager
    def of_longest(self) -> Iterator[None]:
        """Inside, all micro-batches are made of the largest sample, where one is known; they do not vary."""
        varies, self.varies, self.repeats_longest = self.varies, False, True
        try:
            yield
        finally:
            self.varies, self.repeats_longest = varies, False

    def described(self, pinnable: bool) -> tuple[DataInfo, tuple[str, ...]]:
        """Return how the data was handed over, and what is to be said of it once; ``pinnable``: the device is a GPU."""
        idle = ("pin_memory=True of the DataLoader has no effect on virtual GPUs, which lie in the host's memory",)
        notes = self.notes + idle * bool(self.info.pin_memory and not pinnable)
        return dataclasses.replace(self.info, pinnable=pinnable), notes

    def take_skipped(self) -> tuple[str, ...]:
        """Return a sentence for each sample that steps went on without, since this was last asked."""
        taken, self._skipped = tuple(self._skipped), {}
        return taken

    def _places(self, batch_size: int) -> int:
        """Return how many places make one micro-batch."""
        if not self.info.batched:
            return batch_size
        if self.info.batch_size not in (None, batch_size):
            raise WorkloadError(why_fixed(batch_size, self.info))
        return 1


class ShardedStream(Stream):
    """A map-style dataset.

    Every epoch holds the samples that its order names, and one epoch follows another without a gap: a step that
    reaches the end of an epoch goes on in the next. So each epoch holds each sample exactly once, whatever the batch
    size and however often it changes, and all steps have the same size. Rank r takes the r-th run of ``per_rank``
    places of a step, so splitting a step into other micro-batches moves no sample.

    Attributes:
        order: of the samples.
        handed_on: what torch's loader is given besides (``worker_init_fn`` and the like).
    """

    length: int

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        rank: int,
        size: int,
        seed: int = DEFAULT_SEED,
        order: Order | None = None,
        handed_on: Mapping[str, Any] | None = None,
    ) -> None:
        """A stream at its beginning.

        Args:
            dataset, collate, rank, size, seed: see the attributes.
            order: of the samples; by default each epoch is a fresh permutation of the dataset.
            handed_on: see the attributes.
        """
        super().__init__(dataset, rank, size, seed)
        self.collate = collate
        self.order = order or Shuffled(len(dataset))
        self.length = len(self.order(seed, 0))
        self._held = len(dataset)
        self.handed_on = handed_on or {}
        self._epochs: dict[tuple[int, int], Sequence[Any]] = {}
        self._workers: Workers | None = None
        self._by_itself = False
        self._begun_with: tuple[Any, ...] = ()
        self._done: tuple[int, int] | None = None
        self._longest: tuple[int, Longest] | None = None

    def check_length(self) -> None:
        """After a cell, and as an epoch begins: compare the number of samples with that of before.

        Raises:
            WorkloadError: there are more or fewer.
        """
        if len(self.dataset) != self._held:
            raise WorkloadError(
                f"The data has {len(self.dataset)} samples now and had {self._held} when it was attached, and training "
                "would go on with the order of those. Attach the model again, with the data as it is now."
            )

    def make_ready(self, batch_size: int, count: int, trial: bool = False) -> None:
        """Let the workers that the settings ask for fetch the next step, and those after it.

        The rank itself fetches the first step of another size, and every trial: what all trials take can be compared
        then, and workers stay where they are. A worker has the dataset as it was when the worker began: after
        the user's code has run, new ones begin.
        """
        self._by_itself = trial
        if trial:
            return
        loading = self._settings
        wanted = (*(getattr(loading, knob) for knob in _LOADING), self.seed, self.draws, cells.ran())
        if self._workers and (self._workers.closed or self._begun_with != wanted):
            self.close()
        if not (loading.num_workers or loading.pin_memory) or self._done != (batch_size, count):
            return
        if self._workers is None:
            # Numbers that were not seen to be drawn follow from it, and must not come again.
            seed = seed_of(self.seed, self.rank, self.position)
            self._workers, self._begun_with = Workers(self._fetcher(), loading, self.handed_on, seed), wanted
        at = (self.position, batch_size, count)
        if self._workers.at != at:
            self._workers.go_to(at, self._coming(*at))

    def micro_batches(self, batch_size: int, count: int) -> Iterator[Any]:
        """The ``count`` collated micro-batches of this rank's next step. The position stays until :meth:`advance`."""
        at = (self.position, batch_size, count)
        at_hand = self._workers is not None and self._workers.at == at and not self._by_itself
        by_workers = self._workers if at_hand else None
        self.foreign = may_give_stored(self.collate) or (by_workers is not None and self._settings.num_workers > 0)
        for index in range(count):
            yield self._micro_batch(at, index, by_workers)  # held here no longer

    def _micro_batch(self, at: At, index: int, by_workers: Workers | None) -> Any:
        if by_workers:
            last = index == at[-1] - 1
            batch, bad = by_workers.next((self._behind(*at), *at[1:]) if last else None)
        else:
            task = self._task(*at, index)
            if self.repeats_longest and (longest := self.longest()) and longest.index is not None:
                task = Task(task.place, [longest.index] * len(task.indices))
            batch, bad = self._fetcher().batch(task)
        self._skipped.update(dict.fromkeys(bad))
        return batch

    def advance(self, batch_size: int, count: int) -> None:
        """The step was done: go on behind it."""
        self.position = self._behind(self.position, batch_size, count)
        self._done = (batch_size, count)

    def left_of_epoch(self, batch_size: int, count: int, most: int) -> tuple[list[Any], bool]:
        """Return which samples this rank takes of the rest of this epoch, or of the next one where nothing is left.

        Returns:
            What the order names them by, at most so many, without those of the last step if it reaches into the next
            epoch; and whether the order, if it is a sampler's, has some samples more than once.
        """
        position, share = self.position, self._places(batch_size) * count
        end = (position // self.length + 1) * self.length
        if end - position < self.size * share:
            position, end = end, end + self.length
        taken: list[Any] = []
        while position + self.size * share <= end and len(taken) < most:
            taken += self._indices(position + self.rank * share, share)
            position += self.size * share
        order = self._order(end // self.length - 1)
        return taken, isinstance(order, list) and len(set(map(repr, order))) < len(order)

    def close(self) -> None:
        """End the workers."""
        if self._workers:
            self._workers.close()
            self._workers = None

    def longest(self) -> Longest | None:
        """Return the largest sample; looked for once, and again after cells."""
        if self.info.batched:
            return None
        if self._longest is None or self._longest[0] != cells.ran():
            self._longest = (cells.ran(), Longest(self.dataset, self._order(0)))
        return self._longest[1]

    def large_sample(self, settings: Settings) -> str:
        """Return a sentence about a sample of the next step that is much larger than others; empty without one."""
        longest, share = self.longest(), self._places(settings.batch_size) * settings.accumulation_steps
        return longest.among(self._indices(self.position + self.rank * share, share)) if longest else ""

    def handed(self) -> Handed:
        """Return the data as a dry run is given it; the stream stays where it is."""
        return Handed(self.dataset, self.collate, lambda seed, epoch: self._order(0), self.info)

    def _fetcher(self) -> Fetcher:
        return Fetcher(
            self.dataset, self.collate, self.seed if self.draws else None, self._settings.on_bad_sample == "skip"
        )

    def _behind(self, position: int, batch_size: int, count: int) -> int:
        return position + self.size * self._places(batch_size) * count

    def _coming(self, position: int, batch_size: int, count: int) -> Iterator[Task]:
        """Yield what this rank fetches from ``position`` on, without end."""
        while True:
            for index in range(count):
                yield self._task(position, batch_size, count, index)
            position = self._behind(position, batch_size, count)

    def _task(self, position: int, batch_size: int, count: int, index: int) -> Task:
        places = self._places(batch_size)
        first = position + (self.rank * count + index) * places
        return Task(first, self._indices(first, places))

    def _indices(self, first: int, count: int) -> list[Any]:
        """Return what lies at ``count`` places, which may reach into further epochs."""
        indices: list[Any] = []
        while len(indices) < count:
            epoch, offset = divmod(first + len(indices), self.length)
            part = self._order(epoch)[offset : offset + count - len(indices)]
            indices += part.tolist() if isinstance(part, np.ndarray) else part
        return indices

    def _order(self, epoch: int) -> Sequence[Any]:
        key = (self.seed, epoch)
        if key not in self._epochs:
            self.check_length()
            self._epochs = {known: order for known, order in self._epochs.items() if known == (self.seed, epoch - 1)}
            order = self.order(self.seed, epoch)
            if len(order) != self.length:
                raise WorkloadError(
                    f"Epoch {epoch + 1} of the data has {len(order)} samples, the first one had {self.length}. Let the "
                    "sampler give as many in each."
                )
            self._epochs[key] = order
        return self._epochs[key]
