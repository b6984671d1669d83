"""Which tensors somebody changes in place: learnt, so that only those are copied before it happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...internals.torch_internals import version
from ..copies import host_copy

Key = tuple[int, str]
"""Where a tensor is bound: the id of a mapping and a name in it."""

_OFTEN = 2  # times: what was bound anew or changed so often is taken to be so every time


@dataclass(slots=True)
class Before:
    """A tensor and what was in it, in memory of the host perhaps; ``None`` when that was not kept.

    ``unseen``: torch may not have counted changes, because they were made by way of ``data``.
    """

    key: Key
    tensor: Tensor
    version: int
    content: Tensor | None
    fresh: bool
    unseen: bool

    @property
    def was_changed(self) -> bool:
        """Whether it may have been changed in place since."""
        return self.unseen or version(self.tensor) != self.version

    def put_back(self) -> None:
        """Let the tensor hold what it held, by way of ``data``: autograd learns nothing of it."""
        if self.content is not None:
            self.tensor.data.copy_(self.content)


@dataclass(slots=True)
class _Known:
    """What is bound to a name: its content as of ``version``, and how often it was changed and the name bound anew.

    ``seen``: whether it was changed between :meth:`Changing.before` and :meth:`Changing.after`, and not by others.
    """

    tensor: weakref.ref[Tensor]
    version: int
    content: Tensor | None = None
    changed: int = 0
    bound: int = 0
    seen: bool = False


class Changing:
    """Learns which of some tensors are changed in place.

    A tensor is copied once, into host memory, and once more after it changed. One that changes again is copied by
    ``copy`` from then on, whenever :meth:`before` is asked. One larger than ``largest_bytes`` is not copied before it
    was seen to change.
    """

    def __init__(self, copy: Callable[[Tensor], Tensor], largest_bytes: int | None = None) -> None:
        self._copy = copy
        self._largest_bytes = largest_bytes
        self._known: dict[Key, _Known] = {}

    def before(self, named: Iterable[tuple[Key, Tensor]]) -> list[Before]:
        """What is in these tensors now."""
        return [self._before(key, tensor) for key, tensor in named if can_be_filled(tensor)]

    def after(self, befores: Iterable[Before]) -> None:
        """Learn which of them were changed since."""
        for before in befores:
            if before.fresh and before.content is not None:
                before.unseen = not torch.equal(before.tensor.detach().cpu(), before.content)
            known = self._known[before.key]
            known.seen |= version(before.tensor) != before.version or (before.fresh and before.unseen)
            if before.was_changed:
                known.changed = _OFTEN

    @property
    def names(self) -> list[str]:
        """Of those that were seen to change between :meth:`before` and :meth:`after`."""
        return [name for (_, name), known in self._known.items() if known.seen]

    def _before(self, key: Key, tensor: Tensor) -> Before:
        now = version(tensor)
        known = self._known.get(key)
        if known is None or known.tensor() is not tensor:
            again = (known.changed, known.bound + 1, known.seen) if known else ()
            known = _Known(weakref.ref(tensor), now, None, *again)
            self._known[key] = known
        elif known.version != now:
            known.version, known.content, known.changed = now, None, known.changed + 1
        if known.changed >= _OFTEN:
            return Before(key, tensor, now, self._copy(tensor), fresh=False, unseen=True)
        fits = self._largest_bytes is None or tensor.nbytes <= self._largest_bytes
        fresh = known.content is None and known.bound < _OFTEN and fits
        if fresh:
            known.content = host_copy(tensor)
        return Before(key, tensor, now, known.content, fresh, unseen=False)


def can_be_filled(tensor: Tensor) -> bool:
    """Whether a tensor has content that can be copied and put back: an ordinary, dense one with memory of its own."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and all(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    )
