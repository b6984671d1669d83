"""The whole state of a training run: taken on all ranks at one step boundary, and put back."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory.device import Device
from ...memory.tensors import tensors_in
from ...shared import state_file
from ...shared.errors import InvalidInput, StateFileError
from ...shared.settings import Settings
from ...shared.version import __version__
from ..step import optimizers
from ..step.copies import host_copy
from ..step.random_state import RandomState
from ..step.trainer import Trainer

_LENGTH_BYTES = 8
# What opening a payload raises whose bytes are as they were written, but by something else.
_NOT_A_STATE = (LookupError, TypeError, AttributeError, ValueError, AssertionError, EOFError, pickle.UnpicklingError)


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


def capture(trainer: Trainer, device: Device, options: dict[str, Any] | None) -> Captured | None:
    """Take the state. All ranks call it together; rank 0 gets it, the others get ``None``.

    Raises:
        StateFileError: something in it cannot be stored; raised on all ranks alike.
    """
    with device.exempt():
        problem, own, shared = "", b"", {}
        try:
            own = _to_bytes(_own_part(trainer))
            if hvd.rank() == 0:
                shared = _shared_part(trainer)
        except Exception as error:  # the other ranks wait for this one's part, even if it is an error message
            problem, own = str(error) if isinstance(error, StateFileError) else _unexpected(error), b""
        parts = _gather(problem.encode() if problem else own, failed=bool(problem))
    for part, wrong in parts:
        if wrong:
            raise StateFileError(part.tobytes().decode())
    if hvd.rank() != 0:
        return None
    header = state_file.Header(
        workload=trainer.workload.name,
        options=options,
        settings=dataclasses.asdict(trainer.live.settings),
        steps=trainer.steps,
        position=trainer.stream.position,
        ranks=hvd.size(),
        dataset_len=trainer.stream.length,
        version=__version__,
    )
    return Captured(header, {**shared, "ranks": [torch.from_numpy(part) for part, _ in parts]})


class Checked:
    """A file that fits the loaded workload, ready to be put in its place: from here on nothing can fail.

    Raises:
        StateFileError: the file cannot be used, or is not of this workload; nothing was changed.
    """

    def __init__(self, path: Path, trainer: Trainer, device: Device) -> None:
        self.header, stream = state_file.read(path)
        try:
            with device.exempt():
                self._open(path, stream, trainer)
        except _NOT_A_STATE as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StateFileError(
                f"{path} does not hold a training state as %hvd_save writes it ({why}). Use another file."
            ) from None

    def _open(self, path: Path, stream: IO[bytes], trainer: Trainer) -> None:
        """Read everything that :meth:`apply` will ask for."""
        try:
            self.settings = Settings().replace(**self.header.settings)
        except InvalidInput as error:
            raise StateFileError(f"{path} holds settings that are not known here. {error}") from None
        if self.header.dataset_len != trainer.stream.length:
            raise StateFileError(
                f"{path} was saved with a dataset of {self.header.dataset_len} samples; this one has "
                f"{trainer.stream.length}. Load the workload with the same data."
            )
        payload = _unpacked(stream)
        own = payload["ranks"][hvd.rank() if hvd.rank() < self.header.ranks else 0]
        own = _unpacked(io.BytesIO(own.numpy().tobytes()))
        self._parameters, self._buffers = payload["parameters"], own["buffers"]
        _check_same(path, "parameter", self._parameters, dict(trainer.live.model.named_parameters()))
        _check_same(path, "buffer", self._buffers, dict(trainer.live.model.named_buffers()))
        self._random = _opened(own["random"])
        self._optimizer = self._rebuilt(path, trainer, payload)
        self._own_optimizer_state = self._state_for(path, trainer.live.own_optimizer, payload["own_optimizer"])
        self._scaler = payload["scaler"]
        if missing := trainer.live.scaler.state_dict().keys() - self._scaler.keys():
            raise KeyError(min(missing))

    def apply(self, trainer: Trainer) -> None:
        """Put it in place."""
        with torch.no_grad():
            for name, param in trainer.live.model.named_parameters():
                param.copy_(self._parameters[name])
            for name, buffer in trainer.live.model.named_buffers():
                buffer.copy_(self._buffers[name])
        if trainer.live.own_optimizer and self._own_optimizer_state:
            optimizers.put_state(trainer.live.own_optimizer, *self._own_optimizer_state)
        trainer.live.scaler.load_state_dict(self._scaler)
        trainer.stream.position = self.header.position
        trainer.go_on_from(self.header.steps, self.settings, self._optimizer)
        if hvd.rank() < self.header.ranks:
            self._random.put_back()
        else:  # a rank that was not there then
            torch.manual_seed(1 + hvd.rank())
            random.seed(1 + hvd.rank())
            np.random.seed(1 + hvd.rank())

    def _rebuilt(self, path: Path, trainer: Trainer, payload: dict[str, Any]) -> Optimizer:
        """The optimizer that the file's settings name, complete with its state."""
        if self.settings.optimizer == "own":
            if trainer.live.own_optimizer is None:
                raise StateFileError(
                    f"{path} was saved under the workload's own optimizer ({payload['own_optimizer']['class']}); what "
                    "is loaded here brings none. Load or attach it with its optimizer."
                )
            return trainer.live.own_optimizer
        optimizer = optimizers.build(trainer.live.parameters, self.settings)
        state = self._state_for(path, optimizer, payload["optimizer"])
        assert state is not None
        optimizers.put_state(optimizer, *state)
        return optimizer

    def _state_for(
        self, path: Path, optimizer: Optimizer | None, saved: dict[str, Any] | None
    ) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]] | None:
        """State and groups as ``optimizer`` would hold them, its tensors allocated on the parameters' device."""
        if optimizer is None or saved is None:
            return None
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        there = [len(group["params"]) for group in saved["groups"]]
        if saved["class"] != type(optimizer).__name__ or sizes != there:
            raise StateFileError(
                f"{path} was saved with {saved['class']} over groups of {there} parameters; this is "
                f"{type(optimizer).__name__} over {sizes}. Load or attach the workload with the same optimizer."
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = {params[index]: _placed(values, params[index]) for index, values in saved["state"].items()}
        return state, saved["groups"]


def _placed(values: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """One parameter's state; made anew, because a virtual GPU does not count tensors that come from a file."""

    def place(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == param.shape:
            return torch.empty_like(param, dtype=value.dtype).copy_(value)
        # torch's step counters live on the host; fused implementations move them when they are chosen.
        return value.clone() if name == "step" else torch.empty_like(value, device=param.device).copy_(value)

    return {name: place(name, value) for name, value in values.items()}


def _shared_part(trainer: Trainer) -> dict[str, Any]:
    """What is the same on all ranks."""
    own = trainer.live.own_optimizer
    current = None if trainer.live.optimizer is own else trainer.live.optimizer
    return {
        "parameters": {name: host_copy(param) for name, param in trainer.live.model.named_parameters()},
        "optimizer": _optimizer_part(current),
        "own_optimizer": _optimizer_part(own),
        "scaler": trainer.live.scaler.state_dict(),
    }


def _optimizer_part(optimizer: Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    packed = optimizer.state_dict()
    what = f"The optimizer {type(optimizer).__name__}"
    return {
        "class": type(optimizer).__name__,
        "state": _plain(packed["state"], what),
        "groups": _plain(packed["param_groups"], what),
    }


def _own_part(trainer: Trainer) -> dict[str, Any]:
    """What is this rank's alone."""
    return {
        "buffers": {name: host_copy(buffer) for name, buffer in trainer.live.model.named_buffers()},
        "random": _storable(RandomState.take()),
    }


def _storable(state: RandomState) -> dict[str, Any]:
    """Tensors and plain values alone, which a reader can open without running code."""
    version, words, gauss = state.python
    name, keys, *rest = state.numpy
    return {
        "torch": state.torch,
        "cuda": state.cuda,
        "python": [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }


def _opened(stored: dict[str, Any]) -> RandomState:
    """What :func:`_storable` made storable."""
    version, words, gauss = stored["python"]
    name, keys, *rest = stored["numpy"]
    return RandomState(
        torch=stored["torch"],
        cuda=stored["cuda"],
        python=(version, tuple(words.tolist()), gauss),
        numpy=(name, keys.numpy().astype(np.uint32), *rest),
    )


def _plain(value: Any, what: str) -> Any:
    """``value`` with its tensors copied to the host; only what a reader can open without running code."""
    if isinstance(value, Tensor):
        return host_copy(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, what) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.generic):
        return value.item()
    raise StateFileError(
        f"{what} keeps a {type(value).__name__} in its state, which cannot be stored safely. "
        "Only numbers, text, lists, dicts and tensors can."
    )


def _check_same(path: Path, kind: str, saved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Name the first tensor that differs in name, type or shape."""
    for name in [*saved, *(name for name in here if name not in saved)]:
        in_file, in_model = _describe(saved.get(name)), _describe(here.get(name))
        if in_file != in_model:
            raise StateFileError(
                f"{path} is of another model: its {kind} {name!r} is {in_file}, in the loaded model it is {in_model}. "
                "Load the workload that it was saved from."
            )


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unpacked(stream: IO[bytes]) -> Any:
    """What torch packed, opened without running code."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except RuntimeError as error:  # torch's word for an archive that is none
        raise ValueError(error) from None


def _to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _gather(own: bytes, failed: bool) -> list[tuple[np.ndarray[Any, Any], bool]]:
    """Every rank's bytes, and whether they are an error message; ``hvd.allgather_object`` takes longer."""
    prefix = len(own).to_bytes(_LENGTH_BYTES, "little") + bytes([failed])
    block = torch.from_numpy(np.frombuffer(prefix + own, dtype=np.uint8).copy())
    gathered = hvd.allgather(block, name="gpumem_nb.state").numpy()
    parts = []
    while len(gathered):
        start = _LENGTH_BYTES + 1
        end = start + int.from_bytes(gathered[:_LENGTH_BYTES].tobytes(), "little")
        parts.append((gathered[start:end].copy(), bool(gathered[_LENGTH_BYTES])))
        gathered = gathered[end:]
    return parts


def _unexpected(error: Exception) -> str:
    return (
        f"The training state on rank {hvd.rank()} cannot be copied ({type(error).__name__}: {error}). "
        "Only plain tensors can be stored: look at the model's buffers and the optimizer's state."
    )


def clone_onto_device(model: nn.Module) -> None:
    """Give a model that came from a file memory that the device counts."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
