"""Values in a form that a reader can open without running code: tensors in host memory, numbers, text, lists, dicts."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ...shared.errors import StateFileError
from ..copies import host_copy
from ..random_state import RandomState


def plain(value: Any, what: str) -> Any:
    """``value`` with its tensors copied to the host.

    Args:
        value: an optimizer's state, for example.
        what: whose, for the error message.

    Raises:
        StateFileError: something in it is none of these.
    """
    if isinstance(value, Tensor):
        return host_copy(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {plain(key, what): plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item, what) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.generic):
        return value.item()
    raise StateFileError(
        f"{what} keeps a {type(value).__name__} in its state, which cannot be stored safely. "
        "Only numbers, text, lists, dicts and tensors can."
    )


def storable_random(state: RandomState) -> dict[str, Any]:
    """Return the state of random numbers, in this form."""
    version, words, gauss = state.python
    name, keys, *rest = state.numpy
    return {
        "torch": state.torch,
        "cuda": state.cuda,
        "python": [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }


def opened_random(stored: dict[str, Any]) -> RandomState:
    """Return what :func:`storable_random` made storable."""
    version, words, gauss = stored["python"]
    name, keys, *rest = stored["numpy"]
    return RandomState(
        torch=stored["torch"],
        cuda=stored["cuda"],
        python=(version, tuple(words.tolist()), gauss),
        numpy=(name, keys.numpy().astype(np.uint32), *rest),
    )


def to_bytes(value: Any) -> bytes:
    """``value`` packed by torch."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def from_bytes(stream: IO[bytes]) -> Any:
    """Return what torch packed, opened without running code; raises ``ValueError`` if it is something else."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except RuntimeError as error:  # torch's word for an archive that is none
        raise ValueError(error) from None
