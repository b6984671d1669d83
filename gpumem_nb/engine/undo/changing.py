"""Detection of tensors that are written in place: small ones are copied each time, large ones if changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...internals.torch_internals import version
from ..copies import host_copy, refill, same

Key = tuple[int, str]
"""Where a tensor is bound: the id of a mapping, a name in it, and places in what is bound there: ``latest.0``."""

SMALL_BYTES = 2**16
_LAZY = (UninitializedBuffer, UninitializedParameter)
_OFTEN = 2  # times: what was bound anew or changed so often is taken to be so every time


@dataclass(slots=True)
class Before:
    """A tensor and what was in it, in memory of the host perhaps; ``None`` when that was not kept.

    ``unseen``: torch may not have counted changes, because they were made by way of ``data``. ``at`` is where it lay.
    """

    key: Key
    tensor: Tensor
    version: int
    content: Tensor | None
    fresh: bool
    unseen: bool
    at: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.tensor.data_ptr()

    @property
    def was_changed(self) -> bool:
        """Return whether it may have been changed in place since, or lies elsewhere."""
        return self.unseen or version(self.tensor) != self.version or self.tensor.data_ptr() != self.at

    @property
    def was_missed(self) -> bool:
        """Return whether it may have been changed in place since, and cannot be put back."""
        return self.content is None and self.was_changed

    def holds_other_content(self) -> bool:
        """Compare the tensor with what was kept of it; waits for the device."""
        return self.content is not None and not same(self.tensor.detach().to(self.content.device), self.content)

    def was_written(self) -> bool:
        """Return whether it holds something else by now, as far as is known; waits for the device."""
        return self.was_missed or ((self.fresh or self.was_changed) and self.holds_other_content())

    def put_back(self) -> None:
        """Let the tensor hold what it held."""
        if self.content is not None and (self.fresh or self.was_changed):
            refill(self.tensor, self.content, moved=self.tensor.data_ptr() != self.at)


@dataclass(slots=True)
class _Known:
    """The object bound to a name: its content as of ``version``, and how often either changed."""

    tensor: weakref.ref[Tensor]
    version: int
    content: Tensor | None = None
    changed: int = 0
    bound: int = 0


class Changing:
    """Learns which of some tensors are changed in place. Begin anew with another one after each cell.

    A tensor of up to 64 KiB, or one made in inference mode, is copied whenever :meth:`before` is asked. A larger one is
    copied once, into host memory, to be compared after the first time, and again after torch counted a change; one that
    changed so is copied by ``copies`` from then on. One larger than ``largest_bytes`` is not copied before it was seen
    to change.

    Attributes:
        names: the keys are the names of those that were seen to change between :meth:`before` and :meth:`after`.
    """

    def __init__(self, copies: Callable[[list[Tensor]], list[Tensor]], largest_bytes: int | None = None) -> None:
        self._copies = copies
        self._largest_bytes = largest_bytes
        self._known: dict[Key, _Known] = {}
        self.names: dict[str, None] = {}

    def before(self, named: Iterable[tuple[Key, Tensor]]) -> list[Before]:
        """Keep what is in these tensors now. What was known of others is forgotten: they may be gone for good."""
        known, self._known = self._known, {}
        befores = [self._before(key, tensor, known.get(key)) for key, tensor in named if can_be_filled(tensor)]
        copied = [before for before in befores if before.unseen]
        for before, content in zip(copied, self._copies([before.tensor for before in copied]), strict=True):
            before.content = content
        return befores

    def after(self, befores: Iterable[Before], compare: bool) -> None:
        """Learn which of them were changed since; with ``compare`` by their content, whatever torch has counted."""
        for before in befores:
            counted = version(before.tensor) != before.version
            written = (compare or before.fresh) and not counted and before.holds_other_content()
            if counted or written:
                self.names[before.key[1]] = None
                if known := self._known.get(before.key):
                    known.changed = _OFTEN
            if written and not (before.fresh or before.unseen):
                before.content = None  # it was written by way of data, now or in a step before
            before.unseen |= written

    def _before(self, key: Key, tensor: Tensor, known: _Known | None) -> Before:
        now = version(tensor)
        if known is None or known.tensor() is not tensor:
            again = (known.changed, known.bound + 1) if known else ()
            known = _Known(weakref.ref(tensor), now, None, *again)
        elif known.version != now:
            known.version, known.content, known.changed = now, None, known.changed + 1
        self._known[key] = known
        if tensor.nbytes <= SMALL_BYTES or known.changed >= _OFTEN or tensor.is_inference():  # torch counts none
            return Before(key, tensor, now, None, fresh=False, unseen=True)
        fits = self._largest_bytes is None or tensor.nbytes <= self._largest_bytes
        fresh = known.content is None and known.bound < _OFTEN and fits
        if fresh:
            known.content = host_copy(tensor)
        return Before(key, tensor, now, known.content, fresh, unseen=False)


def can_be_filled(tensor: Tensor) -> bool:
    """Return whether a tensor's content can be copied and put back: an ordinary, dense one with its own memory."""
    return (
        _has_memory(type(tensor))
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
        and tensor.numel() > 0
        and all(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    )


@cache
def _has_memory(kind: type[Tensor]) -> bool:
    """Return whether tensors of this type hold their content themselves, and not in tensors inside of them."""
    # Tensors inside of others are worked on by a dispatch of the class's own.
    return kind.__torch_dispatch__ == Tensor.__torch_dispatch__ and not issubclass(kind, _LAZY)
