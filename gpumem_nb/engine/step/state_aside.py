"""``offload_optimizer=on``: the optimizer's state waits in host memory, and comes to the device for its update.

In its place the optimizer holds ordinary tensors of the host, of the same shapes, types and strides: saving, undoing
and comparing read them as any others, and so does a cell. Counts and other small things stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...internals.fake_internals import is_fake, modes_set_aside
from ...memory.host_pool import HostMemory, HostPool, HostUse, copy_in, copy_out, settle
from ...shared.settings import Settings
from ..copies import Layout
from .partition import in_memory_order

SMALL_BYTES = 2**10  # at most, of what stays: counts, and tables that weights share
_META = torch.device("meta")


class StateAside:
    """Brings the state of optimizers to host memory, and back.

    Args:
        pool: the host memory; ``None`` in a dry run, where tensors without memory stand for it.
    """

    def __init__(self, pool: HostPool | None) -> None:
        self.pool = pool

    def put_away(self, optimizer: Optimizer) -> None:
        """Let all of a state wait; what waits already does so on.

        Raises:
            WorkloadError: host memory is short; what waits by then goes on waiting.
        """
        for param, kept in _of_weights(optimizer):
            self.let_wait(kept, param.device)

    def let_wait(self, kept: dict[str, Any], device: torch.device) -> None:
        """Let the state of one weight wait, which that device needs; raises as :meth:`put_away`."""
        going = {name: value for name, value in kept.items() if self.goes(value)}
        for name, value in going.items():
            kept[name] = self.away(value, device)
        if going:
            settle(device)

    def bring(self, optimizer: Optimizer) -> None:
        """Let none of a state wait."""
        for param, kept in _of_weights(optimizer):
            for name, value in kept.items():
                if _is_large(value) and (self.waits(value) or is_fake(value) or value.device != param.device):
                    kept[name] = Brought(value, param.device).used()

    def renew(self, optimizer: Optimizer, waits: bool) -> None:
        """Let all of a state on trial wait, or none; what stays is made anew, as all of a state that comes."""
        self.put_away(optimizer) if waits else self.bring(optimizer)
        for _, kept in _of_weights(optimizer):
            stays = ((name, value) for name, value in kept.items() if isinstance(value, Tensor))
            kept.update({name: value.clone() for name, value in stays if not _is_large(value)})

    def waits(self, value: Any) -> bool:
        """Return whether this is in place of something on the device."""
        if not isinstance(value, Tensor) or is_fake(value):
            return False
        return value.device == _META or (self.pool is not None and _is_large(value) and self.pool.holds(value))

    def waiting(self, optimizer: Optimizer) -> list[int]:
        """Return the bytes of each tensor of a state that waits."""
        values = (value for _, kept in _of_weights(optimizer) for value in kept.values())
        return [value.nbytes for value in values if self.waits(value)]

    def goes(self, value: Any) -> bool:
        """Return whether this is to wait, and does not yet."""
        return _is_large(value) and not self.waits(value)

    def away(self, value: Tensor, device: torch.device) -> Tensor:
        """Return a tensor that waits with the content of another one, which that device needs."""
        waiting = self.room(value, value.dtype, device)
        if waiting.device != _META:
            copy_out(_bytes(value if _is_dense(value) else value.clone()), _bytes(waiting))
        return waiting

    def fill(self, waiting: Tensor, begin: int, row: Tensor) -> None:
        """Let the elements from there on, as they lie, wait with the content of a row."""
        if waiting.device != _META:
            copy_out(_bytes(row), _bytes(waiting)[begin * row.itemsize : (begin + row.numel()) * row.itemsize])

    def room(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return such a tensor without content; raises ``WorkloadError`` if host memory is short."""
        layout = Layout.of(like)
        if self.pool is None or is_fake(like):
            with modes_set_aside():
                return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=_META)
        flat = self.pool.hold(like.numel() * dtype.itemsize, device)
        return flat.view(dtype).as_strided(layout.shape, layout.strides)


class StateWaits:
    """Whether the state of the optimizer in use waits: the knob ``offload_optimizer``.

    Attributes:
        aside: where it waits; ``None``: it is on the device.

    Args:
        host: the host memory of this rank.
        exempt: gives a context in which the device's limit is not enforced.
    """

    def __init__(self, host: HostMemory, exempt: Callable[[], AbstractContextManager[Any]]) -> None:
        self._host, self._exempt = host, exempt
        self.aside: StateAside | None = None

    def wanted(self, settings: Settings) -> bool:
        """Return whether it waits under these settings."""
        return str(settings.offload_optimizer) == "on"

    def under(self, settings: Settings) -> StateAside | None:
        """Return where it would wait under these settings."""
        return (self.aside or StateAside(self._host.pool())) if self.wanted(settings) else None

    def use(self, settings: Settings, state_bytes: int) -> HostUse:
        """Return what waits in a step like the latest one under these settings, with so much of states."""
        pool, aside = self._host.in_use, self.under(settings)
        others = pool.taken_peak_bytes if pool else 0  # states that an update on trial had there are gone
        if aside is None or aside.pool is None:
            return HostUse(others, pool.limit_bytes if pool else 0)
        return HostUse(others + state_bytes, aside.pool.limit_bytes, state_bytes)

    def beside(self, optimizer: Optimizer, own: Optimizer | None) -> list[int]:
        """Return the bytes of what waits of the workload's own optimizer, where another one is in question."""
        return self.aside.waiting(own) if self.aside and own and own is not optimizer else []

    def apply(self, settings: Settings, optimizer: Optimizer, own: Optimizer | None) -> None:
        """Let the state of an optimizer wait, or bring it and that of the workload's ``own`` to the device.

        Raises:
            WorkloadError: host memory is short.
        """
        if not self.wanted(settings):
            return self.end(optimizer, own)
        with self._exempt():
            self.aside = self.under(settings)
            self.put_away(optimizer)

    def end(self, *optimizers: Optimizer | None) -> None:
        """Bring the state of these to the device; that of others goes."""
        if not self.aside:  # the device is asked for nothing
            return
        with self._exempt():
            for one in optimizers:
                self.bring(one)
            self.aside = None

    def put_away(self, optimizer: Optimizer) -> None:
        """Let wait what came into the state since, from a cell, a file or another rank; raises ``WorkloadError``."""
        if self.aside:
            self.aside.put_away(optimizer)

    def bring(self, optimizer: Optimizer | None) -> None:
        """Have all of a state on the device, until it is put away again."""
        if self.aside and optimizer:
            self.aside.bring(optimizer)


class Brought:
    """What waits in host memory, on the device for a piece of an update: all of it, or elements as they lie.

    Args:
        waiting: the tensor that waits.
        device: where it is needed.
        span: from where to where.
    """

    def __init__(self, waiting: Tensor, device: torch.device, span: tuple[int, int] | None = None) -> None:
        self.waiting = waiting
        shape, strides = (tuple(waiting.shape), waiting.stride()) if span is None else ((span[1] - span[0],), (1,))
        self._here = torch.empty_strided(shape, strides, dtype=waiting.dtype, device=device)
        self._copied = None
        if not (waiting.device == _META or is_fake(waiting)):
            begin, end = (at * waiting.itemsize for at in span or (0, waiting.numel()))
            self._copied = copy_in(_bytes(waiting)[begin:end], _bytes(self._here))

    def used(self) -> Tensor:
        """Return it on the device, where what is computed next finds its bytes."""
        if self._copied is not None:
            torch.cuda.current_stream(self._here.device).wait_event(self._copied)
        return self._here

    def take(self, value: Any) -> bool:
        """Let what the update has made of all of it wait in its place; says whether it has that form still."""
        here = self._here
        same = isinstance(value, Tensor) and (value.shape, value.dtype) == (here.shape, here.dtype)
        if not same or value.stride() != here.stride():
            return False
        if self.waiting.device != _META:
            copy_out(_bytes(value), _bytes(self.waiting))
        return True


def _of_weights(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield what an optimizer remembers of each weight; a person may have put something else beside it."""
    for param, kept in optimizer.state.items():
        if isinstance(param, Tensor) and isinstance(kept, dict):
            yield param, kept


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.nbytes > SMALL_BYTES


def _is_dense(value: Tensor) -> bool:
    return value.stride() == Layout.of(value).strides


def _bytes(tensor: Tensor) -> Tensor:
    return in_memory_order(tensor).view(torch.uint8)
