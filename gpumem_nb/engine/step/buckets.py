"""Gradients in buckets: which of them travel together, as which type, and back into the gradient."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...shared.knobs.step import has_narrow_weights
from ...shared.settings import Settings
from ..link.communicator import Transfer

# Both are added up in fp32, for 4 bytes a weight meanwhile: Horovod 0.28 has no all-reduce for bfloat16 (horovod#4047),
# and it adds up before it divides, which passes the largest fp16 number, 65,504, with gradients that do not.
_CARRIED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_COMPRESSED_AS = {torch.float32: torch.float16, torch.float64: torch.float16}


def carried_dtype(dtype: torch.dtype, compressed: bool) -> torch.dtype:
    """Return the type in which gradients of this type are added up; a complex number is two real ones.

    ``compressed``: in fp16, as ``hvd.Compression.fp16`` has it; what is of 16 bit already goes as it would without.
    """
    if compressed and dtype in _COMPRESSED_AS:
        return _COMPRESSED_AS[dtype]
    return _CARRIED_AS.get(dtype, dtype.to_real() if dtype.is_complex else dtype)


def carried_shapes(param: Tensor, sparse: bool) -> list[tuple[int, ...]]:
    """Return the shapes of what :func:`outgoing` gives for one weight."""
    shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
    return [shape, shape[:1]] if sparse else [shape]


def outgoing(param: Tensor, sparse: bool, compressed: bool) -> list[Tensor]:
    """Return what a rank sends for one weight: its gradient, or zeros where it has none.

    A ``sparse`` gradient travels as a whole table, with a column that says which rows it has.
    """
    grad, dtype = param.grad, carried_dtype(param.dtype, compressed)
    if sparse:
        return _table(param, grad, dtype)
    if grad is None:
        grad = torch.zeros_like(param, memory_format=torch.contiguous_format)
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    return [grad.to(dtype).contiguous()]


def arrived(param: Tensor, wires: list[Tensor]) -> None:
    """Let what came back be the gradient; in place where there is one, so that little can fail on one rank alone."""
    grad, wire = param.grad, wires[0]
    if len(wires) > 1:
        if grad is None or grad.is_sparse:
            rows = wires[1].nonzero().squeeze(1)
            param.grad = torch.sparse_coo_tensor(
                rows[None], wire[rows].to(param.dtype), param.shape, is_coalesced=True, check_invariants=False
            )
            return
        wire = wire.to(grad.dtype)
    if param.is_complex():
        wire = torch.view_as_complex(wire)
    if grad is None or grad.is_sparse:
        grad = wire.to(param.dtype).view_as(param)
        if grad.stride() != param.stride():  # autograd's own would lie as the weight does, and fused kernels rely on it
            grad = torch.empty_like(param).copy_(grad)
        param.grad = grad
    elif grad is not wire and grad.data_ptr() != wire.data_ptr():
        grad.copy_(wire)


def rounding(param: Tensor, wires: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the 2-norms of a gradient and of what it lost on its way out; on the device, without waiting for it."""
    grad, none = param.grad, torch.zeros((), dtype=torch.float32, device=param.device)
    if grad is None:
        return none, none
    if grad.is_sparse:
        grad = grad.to_dense()
    norm = torch.linalg.vector_norm(grad).float()
    if grad.dtype not in _COMPRESSED_AS:
        return norm, none
    return norm, torch.linalg.vector_norm(wires[0].to(grad.dtype).sub_(grad)).float()


def _table(param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    touched = torch.zeros(param.shape[0], dtype=dtype, device=param.device)
    if grad is None:
        return [torch.zeros_like(param, dtype=dtype), touched]
    if not grad.is_sparse:
        return [grad.to(dtype).contiguous(), touched.fill_(1)]
    grad = grad.coalesce()
    touched[grad.indices()[0]] = 1
    return [grad.to_dense().to(dtype).contiguous(), touched]


@dataclass(frozen=True, slots=True)
class ReductionConfig:
    """The settings of a reduction of gradients.

    A bucket is one Horovod group: negotiated once instead of once a tensor. ``bucket_bytes`` large enough keep the
    number of negotiations small, small enough they let the first ones travel while backward still runs.
    ``compressed``: in 16 bit. ``reduction`` is what they become, by the knob's names. ``narrow``: weights lie in bf16.
    ``shared``: each rank keeps its share of what they become.
    """

    bucket_bytes: int
    compressed: bool
    reduction: str
    narrow: bool = False
    shared: bool = False

    @classmethod
    def under(cls, settings: Settings) -> ReductionConfig:
        """Return the configuration that these settings ask for."""
        bucket_bytes, narrow = round(settings.bucket_mib * 2**20), has_narrow_weights(settings)
        how = settings.compression != "none", settings.reduction, narrow, settings.shard_gradients == "on"
        return cls(bucket_bytes, *how)

    @property
    def averaged(self) -> bool:
        """Return whether they become their average."""
        return self.reduction == "average"


@dataclass(frozen=True, slots=True)
class Reduced:
    """What all ranks learned from one reduction, the same on each.

    ``sums`` are those of the ballot's numbers. ``missed``: a weight outside of the buckets has a gradient, so the step
    must be taken again after ``GradientReduction.regroup``. ``partial`` are the weights for which only some ranks had a
    gradient. ``square`` is the mean of all ranks' squared norms before it, of a step that is measured.
    ``error``, this rank's own, is what kept it from sending its gradients, or from taking back what came.
    """

    sums: list[int]
    missed: bool
    partial: tuple[Tensor, ...]
    square: float
    error: BaseException | None


class Bucket:
    """Gradients that travel together: same type and device, neighbours among these as backward makes them.

    Attributes:
        dtype: of its weights when they were sorted, on all ranks alike; a cell may have changed it on one of them.
    """

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.index, self.dtype = index, dtype
        self.name = f"gpumem_nb.bucket.{index}"
        self.params: list[Tensor] = []
        self.bytes = 0
        self.ready: set[int] = set()
        self.left_as: list[tuple[int, int] | None] = []  # the marks of gradients that left while backward still ran
        self.transfer: Transfer | None = None
        self.sent_s, self.sent_bytes = 0.0, 0
        self.sent: Any = None  # on GPUs an event of the stream that made the gradients
        self.wires: list[list[Tensor]] = []
        self.square: Tensor | None = None
        self.travelled = False  # in the step under way: it has arrived, and must not be sent again
        self.places: dict[int, Tensor] = {}  # of weights without a gradient here, for what comes in another type


def into_buckets(params: Sequence[Tensor], most_bytes: int) -> list[Bucket]:
    """Sort weights into buckets of at least so many bytes, the last weights first, as backward reaches them."""
    buckets: list[Bucket] = []
    latest: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for param in reversed(params):
        kind = param.dtype, param.device
        bucket = latest.get(kind)
        if bucket is None or bucket.bytes >= most_bytes:
            bucket = latest[kind] = Bucket(len(buckets), param.dtype)
            buckets.append(bucket)
        bucket.params.append(param)
        bucket.bytes += param.nbytes
    return buckets


def unsent(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return those that have not left in this step."""
    return [bucket for bucket in buckets if bucket.transfer is None and not bucket.travelled]


COPIES_AT_ONCE = 2  # buckets whose copies are wider than their gradients: one is under way while the next is copied


def widened(bucket: Bucket, compressed: bool) -> bool:
    """Return whether what is sent takes more memory than the gradients themselves, which have 16 bits then.

    All of it at once would be twice the gradients again, so such buckets leave one after another, after backward.
    """
    dtype = bucket.dtype
    return carried_dtype(dtype, compressed).itemsize > dtype.itemsize


def in_turn(buckets: Iterable[Bucket], compressed: bool) -> Iterator[tuple[Bucket, Bucket | None]]:
    """Give buckets to send, each with the one whose copies must be gone before it is copied, if there is one."""
    under_way: deque[Bucket] = deque()
    for bucket in buckets:
        yield bucket, under_way.popleft() if len(under_way) == COPIES_AT_ONCE else None
        under_way += [bucket] if widened(bucket, compressed) else []


def copies_back(bucket: Bucket) -> None:
    """Let go of copies that have arrived, before it is known whether the step counts: if not, no gradient does."""
    for index, (param, wires) in enumerate(zip(bucket.params, bucket.wires, strict=True)):
        place = bucket.places.get(id(param)) if param.grad is None else param.grad
        if place is not None and not place.is_sparse and len(wires) == 1:
            place.copy_(wires[0])
            bucket.wires[index] = []


def stand_ins(
    buckets: Sequence[Bucket], sparse: Collection[int], compressed: bool, on_host: bool = False
) -> Iterator[list[Tensor]]:
    """Give for each bucket tensors of the right shapes to send, all in the same memory, as large as the largest one.

    Args:
        buckets: to be sent one after the other.
        sparse: ids of weights with sparse gradients.
        compressed: whether what is sent is in 16 bit.
        on_host: take them from the memory of the host, whatever device the weights are on.
    """
    host = torch.device("cpu")
    specs = {
        bucket.index: [
            (shape, carried_dtype(param.dtype, compressed), host if on_host else param.device)
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
        yield [
            room[device][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for shape, dtype, device in specs[bucket.index]
        ]


def share_lost(rounded: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return the share that compression took of gradients, by 2-norms: of theirs and of what was lost, per bucket."""
    norms, lost = (torch.stack([one.to(device) for one in some]).square().sum() for some in zip(*rounded, strict=True))
    return (lost / norms.clamp(min=torch.finfo(norms.dtype).tiny)).sqrt()
