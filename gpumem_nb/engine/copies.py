"""Tensors put aside and compared: copies in host memory, layouts to make tensors in, and checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Bytes = np.ndarray[Any, Any]

_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 divided by the golden ratio: far from any small multiple
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # of the generator splitmix64
_SMALL_PIECE, _LARGE_PIECE = 1 << 13, 1 << 20  # words that are mixed at once, on the host and on a GPU


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor into memory of NumPy's, in the order in which its elements lie.

    The virtual GPU rightly does not count such memory: on a GPU it would be the host's.
    """
    return host_room(tensor, tensor.dtype).copy_(tensor.detach())


def host_room(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return such memory for what has a tensor's shape, and another type."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")  # which NumPy's memory cannot be viewed as
    host = torch.from_numpy(np.empty(tensor.numel() * dtype.itemsize, dtype=np.uint8))
    return host.view(dtype).as_strided(tensor.shape, _strides(tensor))


def refill(tensor: Tensor, content: Tensor, moved: bool = False) -> None:
    """Let a tensor hold ``content``, whatever shape, type or layout it has by now; autograd learns nothing of it.

    Of one that was ``moved`` the memory may be that of another.
    """
    if _alike(tensor, content) and not moved:
        overwrite(tensor.data, content)
    else:
        tensor.data = content.to(tensor.device, copy=True)


def overwrite(tensor: Tensor, content: Tensor) -> None:
    """Write ``content`` into a tensor of the same shape, also into an expanded one, whose elements share memory."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor, content = tensor.narrow(dim, 0, 1), content.narrow(dim, 0, 1)
        tensor.copy_(content)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one device hold equal numbers, or the same bits, as NaN has; waits for it."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with suppress(NotImplementedError):  # for types with which hardly anything is computed
        if torch.equal(one, other):
            return True
    return not one.numel() or torch.equal(_bits(one.detach()), _bits(other.detach()))


class Shelf:
    """Room in host memory for the copies of tensors of the same shapes, types and layouts, again and again."""

    def __init__(self) -> None:
        self._room: list[Tensor] = []

    def copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy these tensors; the copies hold until this is called again."""
        if len(tensors) != len(self._room):
            self._room = list(map(host_copy, tensors))
            return self._room
        for place, (tensor, room) in enumerate(zip(tensors, self._room, strict=True)):
            if not _alike(tensor, room):
                self._room[place] = host_copy(tensor)
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._room, tensors)  # a call for each takes fifteen times as long
        return self._room


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor in memory, so that one like it can be made elsewhere.

    Strides count: fused kernels go through weights and moments in the order of memory, whatever their indices are.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Describe a tensor; of one with gaps, as a copy without them would lie."""
        return cls(tuple(tensor.shape), _strides(tensor), tensor.dtype, tensor.device.type == "cpu")

    def made(self, device: torch.device) -> Tensor:
        """Make a tensor without content, on ``device`` unless it belongs to the host."""
        where = torch.device("cpu") if self.on_host else device
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=where)


class Memory:
    """Where the elements of some tensors lie, so that those whose ``data`` is replaced get it back.

    Asking where takes little; layouts, which take twenty times as long, are asked for when something has moved.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._at: list[int] = []
        self._layouts: list[tuple[Any, ...]] = []
        self._held: list[torch.UntypedStorage | None] = []
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._moving = set[int]()  # by their places: to hold their memory would take as much once more

    def hold(self) -> None:
        """Note where they lie now, and let that memory live until :meth:`let_go`."""
        at, self._moved = list(map(Tensor.data_ptr, self._tensors)), []
        if at != self._at:
            self._at = at
            self._layouts = [(one.dtype, one.storage_offset(), one.shape, one.stride()) for one in self._tensors]
        self._held = list(map(Tensor.untyped_storage, self._tensors))
        for place in self._moving:
            self._held[place] = None

    def let_go(self, moving: bool = True) -> None:
        """Hold only the memory of those that lie elsewhere by now; if they are ``moving``, for the last time."""
        held, self._held = self._held, []
        now = list(map(Tensor.data_ptr, self._tensors)) if held else self._at
        for place in [] if now == self._at else range(len(now)):
            if now[place] != self._at[place] and (storage := held[place]) is not None:
                dtype, *where = self._layouts[place]
                data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)
                self._moved.append((self._tensors[place], data))
                self._moving |= {place} if moving else set()

    def put_back(self) -> None:
        """Let each lie where it did."""
        self.let_go(moving=False)
        for tensor, data in self._moved:
            tensor.data = data
        self._moved = []


def checksum(tensor: Tensor) -> Tensor:
    """Sum up all bits of a tensor, each word mixed with its place; one 64-bit number on the tensor's device.

    A value that moves changes the sum, as does one that changes. A tensor that does not lie in the order of its
    indices is copied for it; otherwise next to nothing is allocated.
    """
    found = quick_checksum(tensor)
    return found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")


def quick_checksum(tensor: Tensor) -> int | Tensor:
    """Sum up all bits as :func:`checksum` does: of a tensor on the host a plain number, for which torch allocates
    nothing, elsewhere a number on its device, without waiting for it.
    """
    device, total = tensor.device, zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    flat = tensor.detach()
    if flat.is_sparse or not flat.numel():
        return total if device.type == "cpu" else torch.tensor(total, device=device)
    flat = _bits(flat)
    whole = flat.numel() // 8 * 8
    if device.type == "cpu":
        return _sum_on_host(flat[:whole].numpy(), flat[whole:].numpy(), total)
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    weights, found = _weights(_LARGE_PIECE, device), torch.tensor(total, device=device)
    for piece in (*aligned.view(torch.int64).split(_LARGE_PIECE), flat[whole:]):
        mixed = piece * weights[: len(piece)]
        found = found * _ODD + mixed.bitwise_xor_(mixed >> 32).sum()
    return found


def changed_since(summed: Iterable[tuple[Tensor, int | Tensor]]) -> list[Tensor]:
    """Return those tensors whose :func:`quick_checksum` is another now; waits for a GPU once, not for each of them."""
    tensors, told = list[Tensor](), list[bool | Tensor]()
    for tensor, before in summed:
        tensors.append(tensor)
        told.append(quick_checksum(tensor) != before)
    on_device = [one for one in told if isinstance(one, Tensor)]
    heard = iter(torch.stack([one.to(on_device[0].device) for one in on_device]).tolist() if on_device else ())
    changed = [next(heard) if isinstance(one, Tensor) else one for one in told]
    return [tensor for tensor, differs in zip(tensors, changed, strict=True) if differs]


def _bits(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return parts.contiguous().view(-1).view(torch.uint8)


def _sum_on_host(whole: Bytes, rest: Bytes, total: int) -> int:
    weights, mixed, shifted = _workplace()
    words = whole.view(np.int64)
    for piece in (*(words[at : at + _SMALL_PIECE] for at in range(0, len(words), _SMALL_PIECE)), rest):
        here, there = mixed[: len(piece)], shifted[: len(piece)]
        np.multiply(piece, weights[: len(piece)], out=here)
        np.right_shift(here, 32, out=there)
        total = total * _ODD + int(np.bitwise_xor(here, there, out=here).sum())
    return (total + 2**63) % 2**64 - 2**63


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that have nothing to do with each other."""
    places = torch.arange(1, count + 1, device=device) * _ODD
    return places.bitwise_xor_(places >> 30).mul_(_MIX).bitwise_or_(1)


@cache
def _workplace() -> tuple[Bytes, Bytes, Bytes]:
    """Return the weights of words on the host, and room for a piece, twice."""
    weights = _weights(_SMALL_PIECE, torch.device("cpu")).numpy().copy()
    return weights, np.empty_like(weights), np.empty_like(weights)


def _alike(tensor: Tensor, copied: Tensor) -> bool:
    """Return whether a copy of a tensor would be of the same shape, type and layout as that one."""
    if (tensor.shape, tensor.dtype) != (copied.shape, copied.dtype):
        return False
    return tensor.stride() == copied.stride() or _strides(tensor) == copied.stride()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
