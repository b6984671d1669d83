"""From what people hand over as data to a rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...shared.units import DEFAULT_SEED
from .handed import Handed, handed_over
from .iterables import IterableStream
from .stream import ShardedStream, Stream


@dataclass(frozen=True, slots=True)
class Source(Handed):
    """Data, ready to be streamed."""

    def stream(self, rank: int, size: int, seed: int = DEFAULT_SEED) -> Stream:
        """This rank's share of it, from its beginning on."""
        stream: Stream
        if self.order is None:
            stream = IterableStream(self.dataset, self.collate, rank, size, seed)
        else:
            stream = ShardedStream(self.dataset, self.collate, rank, size, seed, self.order, self.handed_on)
        stream.info, stream.notes = self.info, self.notes
        return stream


def source_of(data: Any) -> Source:
    """Return the source of the data that was handed over.

    Raises:
        WorkloadError: it cannot be shared out among the ranks.
    """
    handed = handed_over(data)
    return Source(*(getattr(handed, field.name) for field in fields(handed)))
