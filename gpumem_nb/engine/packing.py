"""Objects, pickled: a rank's answer for a process that has no GPU and may lack the rank's modules, and what is kept."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import torch
from cloudpickle import Pickler
from torch import Tensor, nn

from ..internals.fake_internals import in_fake_mode
from ..internals.torch_internals import address
from ..memory.tensors import storage_of
from ..shared.answers import Answer, Apart

_AS_THEY_LIE = ("cpu", "meta")
_SMALL_BYTES = 2**16
_DEVIATION = 0.02  # of numbers in place of weights: small ones, as most models begin with


def returned(value: Any, apart: Apart | None) -> Answer:
    """Return the answer of a request that gave ``value``. Raises whatever pickle does for what cannot be pickled."""
    return Answer(packed(value), describe(value), apart)


def packed(value: Any) -> bytes:
    """Return a pickle of ``value`` in which tensors on a device, however deep they lie, are copies on the CPU."""
    with io.BytesIO() as file:
        _OnCpu(file).dump(value)
        return file.getvalue()


def emptied(value: Any) -> bytes:
    """Return a pickle of ``value`` in which large tensors have shape and type alone, however deep they lie.

    Unpickled under a fake mode, no tensor in it takes memory; elsewhere large ones hold small random numbers. All lie
    on the CPU, and devices in it name the CPU. Tensors that share memory have each their own then.

    Raises whatever pickle does for what cannot be pickled.
    """
    with io.BytesIO() as file:
        _Emptied(file).dump(value)
        return file.getvalue()


class TooLarge(Exception):
    """A pickle that would take more bytes than it may."""


def at_most(space: int) -> Any:
    """Return a module for ``torch.save`` to pickle with, which raises :class:`TooLarge` beyond so many bytes.

    It does so before it has copied them: what a dataset holds may be most of the memory that there is.
    """
    left, seen = space, set[int]()

    def take(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise TooLarge

    class Counted:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> Any:
            take(memoryview(data).nbytes)
            return self._file.write(data)

    class Limited(Pickler):  # type: ignore[misc]
        def __init__(self, file: Any, protocol: int | None = None) -> None:
            super().__init__(Counted(file), protocol)

        def reducer_override(self, obj: Any) -> Any:
            storage = storage_of(obj) if isinstance(obj, Tensor) else None
            if storage is not None and address(storage) not in seen:  # which torch writes behind the pickle
                seen.add(address(storage))
                take(storage.nbytes())
            return super().reducer_override(obj)

    return SimpleNamespace(__name__=__name__, Pickler=Limited)


def describe(value: Any) -> str:
    """Return what kind of thing it is, in words: ``a list``, ``a torch.Tensor``."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


class _OnCpu(Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # A parameter is pickled as a tensor with a wrapper, so its tensor comes here by itself.
        if isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter) and obj.device.type not in _AS_THEY_LIE:
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        return super().reducer_override(obj)


class _Emptied(_OnCpu):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided and not obj.is_quantized:
            small = obj.nbytes <= _SMALL_BYTES
            content = obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if small else b""
            return _filled, (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad, content)
        if isinstance(obj, torch.device) and obj.type not in _AS_THEY_LIE:
            return torch.device, ("cpu",)
        return super().reducer_override(obj)


def _filled(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, content: bytes
) -> Tensor:
    """Return a tensor on the CPU, without memory under a fake mode."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    if in_fake_mode():
        pass
    elif content:
        tensor.copy_(torch.frombuffer(bytearray(content), dtype=dtype).view(shape))
    elif dtype.is_floating_point:
        tensor.normal_(std=_DEVIATION)
    else:
        tensor.zero_()
    return tensor.requires_grad_(requires_grad)
