"""Gradient reduction: Horovod all-reduces in buckets, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import horovod.torch as hvd
import torch
from torch import Tensor

from ...memory.ledger.recorder import Recorder
from ...shared.categories import COMMUNICATION
from ..together.interrupts import postponed

# A bucket is one Horovod group: negotiated once instead of once a tensor. Large enough to keep the number of
# negotiations small, small enough that the first ones travel while backward still runs.
BUCKET_BYTES = 4 * 2**20


class _Bucket:
    """Gradients that travel together: same type, neighbours in the order in which backward produces them."""

    def __init__(self, index: int) -> None:
        self.name = f"gpumem_nb.bucket.{index}"
        self.params: list[Tensor] = []
        self.bytes = 0
        self.missing = 0
        self.handle: int | None = None
        self.wire: list[Tensor] = []


class GradientReduction:
    """Averages the gradients of a model over all ranks, and tells every rank what any rank voted for.

    The votes travel in the last bucket, so agreement costs no round trip of its own. A rank that failed sends zeros for
    the gradients it lacks: nobody waits, and everybody learns that the step must be discarded.

    Attributes:
        latest: the parameter whose gradient was computed last, which tells how far backward got.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._buckets = _into_buckets([param for param in params if param.requires_grad])
        self._armed = False
        self.latest: Tensor | None = None
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: self._gradient_ready(param, bucket))
            for bucket in self._buckets
            for param in bucket.params
        ]

    def arm(self) -> None:
        """From now on gradients are final: send each bucket as soon as it is full."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)
        self._armed = True

    def finish(self, votes: Sequence[bool | Tensor]) -> list[bool]:
        """Send what was not sent, wait for all of it, and return for each vote whether any rank gave it.

        A vote may be a tensor on the device, which nobody waits for before the reduction is done.

        Afterwards every ``grad`` is the average over all ranks, the same bits on each.
        """
        self._armed = False
        last = self._buckets[-1]
        dtype, device = _wire_dtype(last.params[0]), last.params[0].device
        # torch.as_tensor would copy a bool from the host, and wait for the device.
        ballot = torch.stack(
            [
                vote.to(device, dtype) if isinstance(vote, Tensor) else torch.full((), vote, dtype=dtype, device=device)
                for vote in votes
            ]
        )
        for bucket in self._buckets:
            if bucket.handle is None:
                self._send(bucket, ballot if bucket is last else None)
        for bucket in self._buckets:
            self._receive(bucket)
        return [share > 0 for share in ballot.tolist()]

    def forget(self) -> None:
        """Let go of what was sent: Horovod was shut down, and nothing will come back."""
        self._armed = False
        for bucket in self._buckets:
            bucket.handle = None
            bucket.wire = []

    def remove(self) -> None:
        """Take the hooks off the parameters again."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_ready(self, param: Tensor, bucket: _Bucket) -> None:
        self.latest = param
        if not self._armed:
            return
        bucket.missing -= 1
        if bucket.missing == 0 and bucket is not self._buckets[-1]:
            with postponed():  # what Horovod has begun must be known: it would be sent a second time
                self._send(bucket, None)

    def _send(self, bucket: _Bucket, ballot: Tensor | None) -> None:
        for param in bucket.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        bucket.wire = [_to_wire(param.grad) for param in bucket.params if param.grad is not None]
        if ballot is not None:
            bucket.wire.append(ballot)
        if Recorder.current:
            gradients = {id(param.grad) for param in bucket.params}
            Recorder.current.claim(COMMUNICATION, (wire for wire in bucket.wire if id(wire) not in gradients))
        bucket.handle = hvd.grouped_allreduce_async_(bucket.wire, name=bucket.name, op=hvd.Average)

    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.handle is not None
        handle, bucket.handle = bucket.handle, None
        hvd.synchronize(handle)
        for param, wire in zip(bucket.params, bucket.wire, strict=False):
            if wire is param.grad:
                continue
            if param.grad is None or param.grad.is_sparse:
                param.grad = wire
            else:
                param.grad.copy_(wire)  # in place: nothing may be allocated, and so fail, on one rank alone
        bucket.wire = []


def _wire_dtype(tensor: Tensor) -> torch.dtype:
    # Horovod 0.28 has no all-reduce for bfloat16 (horovod#4047).
    return torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype


def _to_wire(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to(_wire_dtype(dense)).contiguous()


def _into_buckets(params: list[Tensor]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    for param in reversed(params):
        bucket = buckets[-1] if buckets else None
        if bucket is None or bucket.bytes >= BUCKET_BYTES or bucket.params[0].dtype != param.dtype:
            bucket = _Bucket(len(buckets))
            buckets.append(bucket)
        bucket.params.append(param)
        bucket.bytes += param.nbytes
    return buckets
