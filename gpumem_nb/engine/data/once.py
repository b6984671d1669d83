"""Every sample exactly once over all ranks: for evaluation, where training's endless stream would repeat some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def batches_once(
    dataset: Any, collate: Callable[[list[Any]], Any], rank: int, size: int, batch_size: int
) -> Iterator[tuple[Any, int]]:
    """This rank's share of a map-style dataset, in the dataset's order: samples ``rank``, ``rank + size``, and so on.

    Ranks get as many samples, or one less: one that gets none yields nothing. What fetching raises comes as it is.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` (``__getitems__`` is used where there is one).
        collate: makes a batch of a list of samples.
        rank, size: of this rank, and of all.
        batch_size: samples in a batch; the last one may have less.

    Yields:
        A batch on the host, and how many samples are in it.
    """
    own = range(rank, len(dataset), size)
    for start in range(0, len(own), batch_size):
        indices = list(own[start : start + batch_size])
        yield collate(samples_at(dataset, indices)), len(indices)


def samples_at(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return the samples with these indices, together where the dataset can do that."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]
