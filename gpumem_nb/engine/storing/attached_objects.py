"""Attached objects in a file: they were made in cells that a restart cannot run again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
from torch.optim import Optimizer

from ...internals.torch_internals import has_step_hooks
from ...memory.device import Device
from ...shared import snapshot_folder
from ...shared.errors import StateFileError
from ...shared.units import format_bytes


def save(objects: dict[str, Any], path: Path, space: int) -> str:
    """Write ``objects`` (by variable name) to a file in the session's own folder.

    All in one pickle, because an optimizer holds the very parameters of its model.

    Returns:
        Empty, or why they cannot be kept: with snapshots more than ``space`` bytes, or not to be pickled.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        if any(isinstance(value, Optimizer) and has_step_hooks(value) for value in objects.values()):
            path.unlink(missing_ok=True)
            return "an optimizer loses its step hooks when it is pickled"
        pickled = cloudpickle.dumps(objects)
        path.unlink(missing_ok=True)  # what was attached before
        if not snapshot_folder.make_room(path.parent, len(pickled), space):
            return (
                f"they take {format_bytes(len(pickled))}, more than is left of the {format_bytes(space)} for snapshots"
            )
        partial.write_bytes(pickled)
        os.replace(partial, path)
    except Exception as error:  # pickling runs the objects' own code
        with suppress(OSError):
            partial.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        return f"{type(error).__name__}: {error}"
    return ""


def load_onto(device: Device, path: Path, model: str) -> dict[str, Any]:
    """Return the same as :func:`load`, the model of this name with memory that the device counts."""
    kept = load(path)
    with device.exempt():
        for tensor in (*kept[model].parameters(), *kept[model].buffers()):
            tensor.data = tensor.data.clone()
    return kept


def load(path: Path) -> dict[str, Any]:
    """Return the objects that :func:`save` wrote. The file lies in a folder that its owner alone can write to.

    Raises:
        StateFileError: they cannot be made again.
    """
    try:
        return cloudpickle.loads(path.read_bytes())  # type: ignore[no-any-return]
    except Exception as error:
        raise StateFileError(
            f"The attached objects could not be brought back ({type(error).__name__}: {error}). "
            "Run their cells again, attach them, and type %hvd_resume."
        ) from None
