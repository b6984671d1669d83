"""Values of any kind that rank 0 sends to the others."""

from __future__ import annotations

from typing import Any

import cloudpickle
from torch import nn

from ...shared.errors import WorkloadError, text_of
from ..link.communicator import here
from .parts import Parts


def from_first(value: Any, what: str) -> Any:
    """Return rank 0's value, or what a function gives there. All ranks call it together.

    Raises:
        WorkloadError: it cannot be pickled; raised on all ranks.
    """
    content = b""
    if here().rank == 0:
        try:
            content = b"+" + cloudpickle.dumps(value() if callable(value) else value)
        except Exception as error:  # pickling runs the objects' own code
            content = b"-" + f"{type(error).__name__}: {text_of(error)}".encode()
    content = here().from_first(content, "object")
    if content[:1] == b"-":
        raise WorkloadError(
            f"{what} cannot be sent to the other ranks ({content[1:].decode()}). Keep plain values and tensors in it."
        )
    return cloudpickle.loads(content[1:])


def extra_states(parts: Parts) -> dict[str, nn.Module]:
    """Return the modules that have something in their state dict besides tensors, by name."""
    return {
        before + name: module
        for before, part in parts.named.items()
        for name, module in part.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
