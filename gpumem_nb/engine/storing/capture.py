"""The whole state of a training run, taken on all ranks at one step boundary.

It is kept in a form that a reader can open without running code: tensors in host memory, numbers, text, lists, dicts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ...memory.device import Device
from ...memory.tensors import tensors_in
from ...shared import state_file
from ...shared.errors import StateFileError, WorkloadError
from ...shared.version import __version__
from ..copies import host_copy
from ..link.communicator import here
from ..random_state import RandomState
from ..step.optimizer_state import Whole, extra_states
from ..step.trainer import Trainer


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


_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Captured:
    """A training run at one moment, in host memory that no device counts.

    ``payload`` holds plain values and tensors only. What all ranks hold alike is in it once, what is each rank's own
    (buffers, random numbers) as one block of bytes a rank.
    """

    header: state_file.Header
    payload: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """About what a file of it takes."""
        return sum(tensor.nbytes + 512 for tensor in tensors_in(self.payload)) + 2**14

    def write(self, path: Path) -> int:
        """Write it to a file; returns its bytes."""
        return state_file.write(path, self.header, self._save)

    def _save(self, stream: IO[bytes]) -> None:
        try:
            torch.save(self.payload, stream)
        except RuntimeError as error:  # torch's writer wraps what its stream raised
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def capture(trainer: Trainer, device: Device, options: dict[str, Any] | None, runs: bytes = b"") -> Captured | None:
    """Take the state. All ranks call it together; rank 0 gets it, the others get ``None``.

    Args:
        trainer: of what.
        device: whose memory does not count what is taken.
        options: those of a ready-made workload.
        runs: the kernel's record, which a rank stores as it is.

    Raises:
        StateFileError: something in it cannot be stored; raised on all ranks alike.
    """
    with device.exempt():
        problem, own, shared = "", b"", {}
        try:
            gathered = _gathered(trainer)  # first, because all ranks have a part in it
            own = to_bytes(_own_part(trainer))
            if here().rank == 0:
                shared = _shared_part(trainer) | {name: _optimizer_part(*pair) for name, pair in gathered.items()}
                if runs:
                    shared["runs"] = torch.frombuffer(bytearray(runs), dtype=torch.uint8)
        except Exception as error:  # the other ranks wait for this one's part, even if it is an error message
            problem, own = str(error) if isinstance(error, StateFileError) else _unexpected(error), b""
        parts = gather(problem.encode() if problem else own, failed=bool(problem))
    for part, wrong in parts:
        if wrong:
            raise StateFileError(part.tobytes().decode())
    if here().rank != 0:
        return None
    header = state_file.Header(
        workload=trainer.workload.name,
        options=options,
        settings=trainer.live.settings.replace(**trainer.live.instead_of).saved(),
        steps=trainer.steps,
        position=trainer.stream.position,
        passes=trainer.stream.passes,
        pass_began=trainer.stream.pass_began,
        ranks=here().size,
        dataset_len=trainer.stream.length,
        version=__version__,
        seed=trainer.stream.seed,
        virtual_limit=device.reading().limit_bytes if device.kind == "virtual" else None,
    )
    return Captured(header, {**shared, "ranks": [torch.from_numpy(part) for part, _ in parts]})


def _shared_part(trainer: Trainer) -> dict[str, Any]:
    """Return what is the same on all ranks."""
    return {
        "parameters": {name: host_copy(param) for name, param in trainer.live.parts.named_parameters()},
        "scaler": trainer.live.scaler.state_dict(),
        "scheduler": _scheduler_part(trainer.live.scheduler),
        "schedule_steps_done": trainer.live.course.done,
        "rates": trainer.live.rates_memory,
        "frozen": [name for name, param in trainer.live.parts.named_parameters() if not param.requires_grad],
        "evaluating": trainer.live.modes.evaluating(),
    }


def _gathered(trainer: Trainer) -> dict[str, tuple[str, Whole | None]]:
    """Return class and whole state, on rank 0, of the optimizer in use and of the workload's own. All ranks call it.

    Raises:
        StateFileError: the ranks hold parts that do not go together; raised on all of them.
    """
    own, agreed = trainer.live.own_optimizer, trainer.live.sharing.agreed
    current = None if trainer.live.optimizer is own else trainer.live.optimizer
    named = (("optimizer", current), ("own_optimizer", own))
    try:
        return {name: (type(one).__name__, agreed(one).gather() if one else None) for name, one in named}
    except WorkloadError as error:
        raise StateFileError(f"The training state cannot be saved: {error}") from None


def _optimizer_part(name: str, whole: Whole | None) -> dict[str, Any] | None:
    return whole and {"class": name, **{part: plain(of, f"The optimizer {name}") for part, of in whole.items()}}


def _scheduler_part(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    name = type(scheduler).__name__
    return {"class": name, "state": plain(scheduler.state_dict(), f"The scheduler {name}")}


def _own_part(trainer: Trainer) -> dict[str, Any]:
    """Return what is this rank's alone."""
    return {
        "extra": {
            name: plain(module.get_extra_state(), f"The module {name or type(module).__name__}")
            for name, module in extra_states(trainer.live.parts).items()
        },
        "buffers": {name: host_copy(buffer) for name, buffer in trainer.live.parts.named_buffers()},
        "random": storable_random(trainer.random.state),
    }


def gather(own: bytes, failed: bool) -> list[tuple[np.ndarray[Any, Any], bool]]:
    """Return every rank's bytes, and whether they are an error message. All ranks call it together."""
    prefix = len(own).to_bytes(_LENGTH_BYTES, "little") + bytes([failed])
    block = torch.from_numpy(np.frombuffer(prefix + own, dtype=np.uint8).copy())
    gathered = here().all_gather(block, "gpumem_nb.state").numpy()
    parts = []
    while len(gathered):
        start = _LENGTH_BYTES + 1
        end = start + int.from_bytes(gathered[:_LENGTH_BYTES].tobytes(), "little")
        parts.append((gathered[start:end].copy(), bool(gathered[_LENGTH_BYTES])))
        gathered = gathered[end:]
    return parts


def _unexpected(error: Exception) -> str:
    return (
        f"The training state on rank {here().rank} cannot be copied ({type(error).__name__}: {error}). "
        "Only plain tensors can be stored: look at the model's buffers and the optimizer's state."
    )
