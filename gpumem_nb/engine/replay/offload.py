"""``offload_activations=on``: what forward saves waits in host memory until backward asks for it.

Whole storages are copied, so views of one tensor have one copy, with strides as they were. What lies on the device
anyway stays: weights, buffers, the micro-batch, and casts of weights. Everything else goes, however small: then small
steps say what large ones take.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ...internals.torch_internals import (
    address,
    func_transforms_allowed,
    in_backward,
    is_all_zero,
    not_compiled,
    version,
)
from ...memory.host_pool import HostPool, copy_in, copy_out
from ...memory.ledger.recorder import Recorder
from ...shared.errors import WorkloadError

_CASTS_AND_VIEWS = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}


class Offload:
    """Offloading of one model's activations, inside :meth:`on`.

    Args:
        model: whose weights and buffers stay where they are.
        pool: the host memory.
    """

    def __init__(self, model: nn.Module, pool: HostPool) -> None:
        self._model, self._pool = model, pool
        self._staying: dict[int, StorageWeakRef] = {}
        self._away: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Away]]] = {}
        self._last: weakref.ref[_Away] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have tensors that autograd saves put aside inside."""
        self.stays([*self._model.parameters(), *self._model.buffers()])
        pack, unpack = not_compiled(self._pack), not_compiled(_unpack)
        try:
            with func_transforms_allowed(), saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._staying, self._away, self._last = {}, {}, None

    def stays(self, tensors: Iterable[Tensor]) -> None:
        """These live on the device until the step is over, whatever is saved of them."""
        for tensor in filter(_has_storage, tensors):
            storage = tensor.untyped_storage()
            self._staying[address(storage)] = StorageWeakRef(storage)

    def put_aside(self, tensor: Tensor) -> Aside | None:
        """Return what stands for a tensor whose bytes wait in host memory; ``None`` for one that stays.

        Raises:
            WorkloadError: host memory is short.
        """
        if not _has_storage(tensor) or tensor.dim() == 0 or in_backward() or _is_of_a_weight(tensor):
            return None
        storage = tensor.untyped_storage()
        place = address(storage)
        if not storage.nbytes() or ((known := self._staying.get(place)) and not known.expired()):
            return None
        reference, away = self._away.get((place, version(tensor)), (None, None))
        kept = away() if reference and away and not reference.expired() else None
        if kept is None:
            kept = _Away(self._pool, storage, self._last() if self._last else None)
            self._away[place, version(tensor)] = StorageWeakRef(storage), weakref.ref(kept)
            self._last = weakref.ref(kept)
        return Aside(kept, tensor)

    def _pack(self, tensor: Tensor) -> Aside | _Staying:
        return self.put_aside(tensor) or _Staying(tensor)


class _Saved:
    """A saved tensor and the version that it had: torch compares no versions of what hooks were given."""

    def __init__(self, tensor: Tensor) -> None:
        self._counted, self._version = tensor.detach(), version(tensor)
        self._shape = () if tensor.is_nested else tuple(tensor.shape)

    def _check(self) -> None:
        if version(self._counted) != self._version:
            raise WorkloadError(
                f"A tensor of shape {self._shape} that backward needs was changed in place after forward "
                "had used it. Replace the in-place operation in the model or the loss."
            )


class Aside(_Saved):
    """A tensor that is not there; its bytes are, and the count of its changes."""

    def __init__(self, away: _Away, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._counted.data = self._counted.new_empty(0)
        self._version = version(self._counted)
        self._away, self._requires_grad = away, tensor.requires_grad
        self._device = tensor.device
        self._form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def tensor(self) -> Tensor:
        """The tensor, on the device again.

        Raises:
            WorkloadError: it was changed in place meanwhile.
        """
        self._check()
        dtype, *view = self._form
        storage = self._away.back()
        tensor = torch.empty(0, dtype=dtype, device=self._device).set_(storage, *view)
        if Recorder.current:
            Recorder.current.saved(tensor)  # by its shape it may be logits, which its bytes alone do not tell
        return tensor

    def get(self) -> Tensor:
        """Return the same as a leaf, to compute from it again."""
        return self.tensor.requires_grad_(self._requires_grad)


class _Staying(_Saved):
    """A saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        if Recorder.current:
            Recorder.current.saved(tensor)

    @property
    def tensor(self) -> Tensor:
        self._check()
        return self._counted


class _Away:
    """A copy in host memory of the bytes of one storage, kept as long as some saved tensor needs it.

    It ends in the middle of backward, without code in Python, as torch's own weak references have: interrupts that came
    there would be lost.

    Args:
        before: what was put aside before it, which backward asks for after it: that is fetched ahead.
    """

    def __init__(self, pool: HostPool, storage: torch.UntypedStorage, before: _Away | None) -> None:
        self._nbytes, self._device = storage.nbytes(), storage.device
        self._before = weakref.ref(before) if before else None
        self._ahead: tuple[Tensor, Any] | None = None
        self._latest: weakref.ref[torch.UntypedStorage] | None = None
        self._buffer = pool.take(self._nbytes, self._device, self)
        copy_out(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage), self._buffer)

    def back(self) -> torch.UntypedStorage:
        """Return them on the device: the same storage to all who ask for views of it at the same time."""
        storage = self._latest() if self._latest else None
        if storage is None:
            flat, copied = self._ahead or self._fetched()
            self._ahead = None
            if copied is not None:
                torch.cuda.current_stream(self._device).wait_event(copied)
            storage = flat.untyped_storage()
            self._latest = weakref.ref(storage)
            if before := self._before and self._before():
                before.fetch_ahead()
        return storage

    def fetch_ahead(self) -> None:
        """Have them on the device soon: backward is likely to ask next."""
        if self._ahead is None and (self._latest is None or self._latest() is None):
            self._ahead = self._fetched()

    def _fetched(self) -> tuple[Tensor, Any]:
        flat = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        if Recorder.current:
            Recorder.current.saved(flat)
        return flat, copy_in(self._buffer, flat)


def _unpack(saved: Aside | _Staying) -> Tensor:
    return saved.tensor


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is one of torch's own, with bytes of its own that say what is in it."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    otherwise = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or is_all_zero(tensor)
    return plain and not otherwise


def _is_of_a_weight(tensor: Tensor) -> bool:
    """Return whether it is a cast or a view of a weight, which is there anyway, or for one micro-batch of any size."""
    node = tensor.grad_fn
    while node and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")
