"""The device of one rank, as the trainer sees it: something with readings and a memory limit."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from ..shared.allocator_settings import AllocatorSettings
from ..shared.errors import InvalidInput, nearest
from ..shared.messages import DeviceUse, Reading

if TYPE_CHECKING:
    import torch

    from .ledger.events import EventLog

_opened: Device | None = None
_MUCH_BYTES = 2**20  # of old garbage, to be looked for


class Listened(Protocol):
    """The interface of a device for a recorder.

    Attributes:
        kind: ``virtual`` or ``cuda``; decides how numbers are labelled.
    """

    kind: Literal["virtual", "cuda"]

    def reading(self) -> Reading:
        """Return the memory at this moment, in bytes."""
        ...

    def reset_peak(self) -> None:
        """Let the peaks count from here."""
        ...

    def event_log(self) -> EventLog:
        """Return a new log of allocations and releases; one at a time may run."""
        ...


class Device(Listened, Protocol):
    """The device of a rank; a limit that is passed raises ``torch.OutOfMemoryError`` on the thread that opened it.

    Attributes:
        name: what people call it.
        torch_device: where models and batches go.
        driver: the version of NVIDIA's; empty where there is none, or it cannot be read.
        note: one sentence on what its readings lack, or empty.
        allocator: how its caching allocator is set.
    """

    name: str
    torch_device: torch.device
    driver: str
    note: str
    allocator: AllocatorSettings

    def use(self) -> DeviceUse | None:
        """Return NVML's readings of the whole device; takes milliseconds: never within a step. ``None``: virtual."""
        ...

    def room(self) -> int | None:
        """Bytes that this process may still take from the device; ``None`` when that is not known."""
        ...

    def releasable(self) -> int:
        """Bytes of cached segments that hold no tensor; the allocator gives them back before it runs out of memory."""
        ...

    @property
    def allowed_bytes(self) -> int:
        """Return the bytes this process may reserve, with garbage collected above a share of it; 0: not told."""
        ...

    def set_limit(self, limit: int | None) -> None:
        """Move the limit, in bytes; ``None`` for none but the device's own."""
        ...

    def empty_cache(self) -> None:
        """Give back what the caching allocator holds and no tensor uses."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is among the device's live bytes."""
        ...

    def exempt(self) -> AbstractContextManager[None]:
        """Inside, the limit is not enforced: room for what a rescue must allocate. May be entered again inside.

        Cached segments that are then beyond the limit go back to the device at the end of the outermost one.
        """
        ...

    def communicates_on(self, threads: Collection[int]) -> None:
        """These threads of the process, by the system's numbers, are Horovod's."""
        ...


@contextmanager
def leaving_no_cache(device: Device) -> Iterator[None]:
    """Give back what the allocator's cache has grown by inside: it is not what training needs."""
    reserved = device.reading().reserved_bytes
    try:
        yield
    finally:
        if device.reading().reserved_bytes > reserved:
            device.empty_cache()


class Garbage:
    """What hangs together in circles and is held by nothing, activations on the device among it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ran, self._live_bytes = -1, 0  # when all of it was taken away: pieces of the user's code until then

    @contextmanager
    def taken_away(self, ran: int) -> Iterator[None]:
        """Take it away before and, if it was made inside, afterwards: new one would be old then, and stay.

        What has been there for long is looked through only before, which takes a tenth of a second and more: if there
        are more live bytes, or if pieces of the user's code, of which so many ``ran``, may have let go of something.
        """
        gc.collect(1)
        whole = ran != self._ran or self._device.reading().live_bytes > self._live_bytes + _MUCH_BYTES
        if whole:
            gc.collect()
        is_frozen = gc.get_freeze_count() > 0  # by the user's own code, and stays so
        if not is_frozen:
            gc.freeze()
        try:
            yield
        finally:
            gc.collect()
            if not is_frozen:
                gc.unfreeze()
            live_bytes = self._device.reading().live_bytes
            self._ran, self._live_bytes = ran, live_bytes if whole else min(live_bytes, self._live_bytes)


def open_device(kind: str, local_rank: int, memory_limit: int | None) -> Device:
    """Return the device of this rank; call it once, on the thread that will train, before any model is made.

    Args:
        kind: ``cuda`` for the GPU with index ``local_rank``, ``virtual`` for CPU tensors accounted as if on a GPU.
        local_rank: this rank's number on its host.
        memory_limit: in bytes; ``None`` for the whole GPU, or 2 GiB of a virtual one.

    Raises:
        InvalidInput: an unknown kind, or a limit the device cannot keep.
        SetupError: ``cuda`` without a usable GPU, or ``virtual`` where its allocator cannot be built.
    """
    global _opened
    if kind == "cuda":
        from .cuda import CudaDevice

        _opened = CudaDevice(local_rank, memory_limit)
    elif kind == "virtual":
        from .virtual_gpu.gpu import VirtualGPU

        _opened = VirtualGPU(local_rank, memory_limit)
    else:
        raise InvalidInput(f"There is no device kind {kind!r}: {nearest(kind, ('virtual', 'cuda'))}.")
    return _opened


def opened() -> Device:
    """Return the device of this process; outside of ranks the current GPU, or a virtual one without a limit."""
    if _opened is not None:
        return _opened
    import torch

    cuda = torch.cuda.is_available()
    device = open_device("cuda" if cuda else "virtual", torch.cuda.current_device() if cuda else 0, None)
    if device.kind == "virtual":
        device.set_limit(None)
    return device
