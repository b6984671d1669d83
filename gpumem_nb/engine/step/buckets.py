"""Gradients in buckets: which of them travel together, and how."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...shared.settings import Settings
from ..link.communicator import Transfer
from .wire import carried_dtype, carried_shapes


@dataclass(frozen=True, slots=True)
class ReductionConfig:
    """The settings of a reduction of gradients.

    A bucket is one Horovod group: negotiated once instead of once a tensor. ``bucket_bytes`` large enough keep the
    number of negotiations small, small enough they let the first ones travel while backward still runs.
    ``compressed``: in 16 bit. ``reduction`` is what they become, by the knob's names.
    """

    bucket_bytes: int
    compressed: bool
    reduction: str

    @classmethod
    def under(cls, settings: Settings) -> ReductionConfig:
        """As these settings have it."""
        return cls(round(settings.bucket_mib * 2**20), settings.compression != "none", settings.reduction)

    @property
    def averaged(self) -> bool:
        """Return whether they become their average."""
        return self.reduction == "average"


class Bucket:
    """Gradients that travel together: same type and device, neighbours in the order in which backward makes them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"gpumem_nb.bucket.{index}"
        self.params: list[Tensor] = []
        self.bytes = 0
        self.ready: set[int] = set()
        self.transfer: Transfer | None = None
        self.sent_s, self.sent_bytes = 0.0, 0
        self.wires: list[list[Tensor]] = []
        self.square: Tensor | None = None
        self.places: dict[int, Tensor] = {}  # of weights without a gradient here, for what comes in another type


def into_buckets(params: Sequence[Tensor], most_bytes: int) -> list[Bucket]:
    """Sort weights into buckets of at least so many bytes, the last weights first, as backward reaches them."""
    buckets: list[Bucket] = []
    for param in reversed(params):
        bucket = buckets[-1] if buckets else None
        alike = bucket and (bucket.params[0].dtype, bucket.params[0].device) == (param.dtype, param.device)
        if bucket is None or bucket.bytes >= most_bytes or not alike:
            bucket = Bucket(len(buckets))
            buckets.append(bucket)
        bucket.params.append(param)
        bucket.bytes += param.nbytes
    return buckets


def stand_ins(
    buckets: Sequence[Bucket], sparse: Collection[int], compressed: bool
) -> Iterator[tuple[Bucket, list[Tensor]]]:
    """Give for each bucket tensors of the right shapes to send, all in the same memory, as large as the largest one.

    Args:
        buckets: to be sent one after the other.
        sparse: ids of weights with sparse gradients.
        compressed: whether what is sent is in 16 bit.
    """
    specs = {
        bucket.index: [
            (shape, carried_dtype(param.dtype, compressed), param.device)
            for param in bucket.params
            for shape in carried_shapes(param, id(param) in sparse)
        ]
        for bucket in buckets
    }
    most: dict[torch.device, int] = {}
    for shape, dtype, device in (one for of_bucket in specs.values() for one in of_bucket):
        most[device] = max(most.get(device, 0), math.prod(shape) * dtype.itemsize)
    room = {device: torch.empty(nbytes, dtype=torch.uint8, device=device) for device, nbytes in most.items()}
    for bucket in buckets:
        yield (
            bucket,
            [
                room[device][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for shape, dtype, device in specs[bucket.index]
            ],
        )
