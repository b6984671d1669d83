"""A training state from a file, checked against what is loaded and then put in its place."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...internals.torch_internals import CHAINED
from ...memory.device import Device
from ...shared import state_file
from ...shared.errors import StateFileError, WorkloadError, text_of
from ...shared.settings import Settings
from ..copies import overwrite
from ..link.communicator import here
from ..random_state import OwnNumbers
from ..step.optimizer_state import Whole, extra_states
from ..step.rates import Course
from ..step.trainer import Trainer
from .capture import from_bytes, gather, opened_random, plain

# What opening a payload raises whose bytes are as they were written, but by something else.
_NOT_A_STATE = (LookupError, TypeError, AttributeError, ValueError, AssertionError, EOFError, pickle.UnpicklingError)


class Checked:
    """A file that fits the loaded workload, ready to be put in its place: only the user's own code can fail from here.

    Raises:
        StateFileError: the file cannot be used, or is not of this workload; nothing was changed.
    """

    def __init__(self, path: Path, trainer: Trainer, device: Device) -> None:
        self.header, stream = state_file.read(path)
        with device.exempt(), _opening(path):
            self._open(path, stream, trainer)

    def _open(self, path: Path, stream: IO[bytes], trainer: Trainer) -> None:
        """Read everything that :meth:`apply` will ask for."""
        self.settings = Settings.from_saved(self.header.settings, path)
        if self.header.dataset_len != trainer.stream.length:
            there, length_here = (
                "an unknown number of samples" if length is None else f"{length} samples"
                for length in (self.header.dataset_len, trainer.stream.length)
            )
            raise StateFileError(
                f"{path} was saved with a dataset of {there}; this one has {length_here}. Load the workload "
                "with the same data."
            )
        payload = from_bytes(stream)
        self.runs = _runs_of(payload)
        rank = here().rank
        own = payload["ranks"][rank if rank < self.header.ranks else 0]
        own = from_bytes(io.BytesIO(own.numpy().tobytes()))
        self._parameters, self._buffers = payload["parameters"], own["buffers"]
        _check_same(path, "parameter", self._parameters, dict(trainer.live.narrowed.under(self.settings)))
        _check_same(path, "buffer", self._buffers, dict(trainer.live.parts.named_buffers()))
        self._random, random = OwnNumbers(self.header.seed, rank), opened_random(own["random"])
        if rank < self.header.ranks:  # others were not there then
            self._random.go_on_from(random)
        self._aside = trainer.live.waits.under(self.settings)  # whose host memory is used until training goes on
        self._optimizer = self._rebuilt(path, trainer, payload)
        own_optimizer, saved = trainer.live.own_optimizer, payload["own_optimizer"]
        self._put_own_state: Callable[[], None] | None = None
        if own_optimizer and saved:
            self._put_own_state = self._state_for(path, trainer, own_optimizer, saved)
        scheduler_state = _scheduler_state(path, trainer.live.scheduler, payload.get("scheduler"))
        self._by_own_code = [
            *_extra_of(path, trainer, own.get("extra", {})),
            *_scheduler_of(trainer.live.scheduler, scheduler_state),
        ]
        self._path = path
        # Earlier versions did not write these.
        self._rates = payload.get("rates", {})
        self._course = Course(self.settings, self.header.ranks, payload.get("schedule_steps_done", 0))
        self._trained_as = payload.get("frozen"), payload.get("evaluating")  # earlier versions did not write them
        self._scaler = payload["scaler"]
        if missing := trainer.live.scaler.state_dict().keys() - self._scaler.keys():
            raise KeyError(min(missing))

    def apply(self, trainer: Trainer, after_restart: bool = False) -> None:
        """Put it in place. All ranks call it together.

        After a restart also which weights are frozen and which modules evaluate, as cells had left it; otherwise that
        is for the code that loads the model to say.

        Raises:
            StateFileError: the user's own code refused its part on a rank; nothing was changed on any of them.
            WorkloadError: weights on a rank cannot be brought to the type that they have in the file.
        """
        self._run_own_code()
        trainer.live.narrowed.follow(self.settings)
        frozen, evaluating = self._trained_as
        if after_restart and frozen is not None and evaluating is not None:
            trainer.live.parts.freeze(frozen)
            trainer.live.modes.go_on_as(evaluating)
        for name, param in trainer.live.parts.named_parameters():
            overwrite(param, self._parameters[name])
        for name, buffer in trainer.live.parts.named_buffers():
            overwrite(buffer, self._buffers[name])
        if self._put_own_state:
            self._put_own_state()
        trainer.live.scaler.load_state_dict(self._scaler)
        trainer.stream.go_to(self.header.position, self.header.passes, self.header.pass_began)
        trainer.stream.seed = self.header.seed
        trainer.go_on_from(self.header.steps, self.settings, self._optimizer, self._course, self._rates)
        trainer.random = self._random
        trainer.live.waits.aside = self._aside or trainer.live.waits.aside

    def _run_own_code(self) -> None:
        """Let modules and scheduler take back their states by their own code, on all ranks or on none."""
        taken, problem = list[tuple[Callable[[Any], object], Any]](), ""
        for one in self._by_own_code:
            try:
                taken.append((one.put, plain(one.get(), one.name)))
                one.put(one.state)
            except Exception as error:  # whatever the user's code raises
                problem = (
                    f"{self._path} cannot be resumed: {one.name} of rank {here().rank} does not take back its state "
                    f"({type(error).__name__}: {text_of(error)})."
                )
                break
        if problems := [said.tobytes().decode() for said, wrong in gather(problem.encode(), bool(problem)) if wrong]:
            for put, before in reversed(taken):
                with suppress(Exception):
                    put(before)
            raise StateFileError(problems[0])

    def _rebuilt(self, path: Path, trainer: Trainer, payload: dict[str, Any]) -> Optimizer:
        """Return the optimizer that the file's settings name, complete with its state."""
        if self.settings.optimizer == "own":
            if trainer.live.own_optimizer is None:
                raise StateFileError(
                    f"{path} was saved under the workload's own optimizer ({payload['own_optimizer']['class']}); what "
                    "is loaded here brings none. Load or attach it with its optimizer."
                )
            return trainer.live.own_optimizer
        optimizer = trainer.live.built(trainer.live.parameters, self.settings)
        self._state_for(path, trainer, optimizer, payload["optimizer"])()
        return optimizer

    def _state_for(
        self, path: Path, trainer: Trainer, optimizer: Optimizer, saved: dict[str, Any]
    ) -> Callable[[], None]:
        """Return a function that puts the saved state into ``optimizer``; its tensors are allocated by now."""
        what = f"{path} was saved with {saved['class']}"
        load = "Load or attach the workload with the same optimizer."
        if saved["class"] != type(optimizer).__name__:
            raise StateFileError(f"{what}, and this is {type(optimizer).__name__}. {load}")
        numbers = saved.get("numbers", {})  # earlier versions did not write them
        try:
            form = trainer.live.sharing.form(optimizer, self.settings)
            whole: Whole = {"state": saved["state"], "groups": saved["groups"], "numbers": numbers}
            return form.scatter(whole, self._aside)
        except StateFileError as error:
            raise StateFileError(f"{what}, but {error}. {load}") from None
        except WorkloadError as error:
            raise StateFileError(f"{path} cannot be resumed: {error}") from None


def _scheduler_state(path: Path, scheduler: LRScheduler | None, saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what this scheduler takes back; ``None`` without one."""
    there, here = saved and saved["class"], scheduler and type(scheduler).__name__
    if there != here:
        raise StateFileError(
            f"{path} was saved with {there or 'no scheduler'}, and this is trained with {here or 'none'}. Load or "
            "attach the workload with the same scheduler."
        )
    if scheduler is None or saved is None:
        return None
    return taken_back(scheduler, saved["state"])


def taken_back(scheduler: LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's stored state as it takes it: a file holds plain dicts, and some schedulers count in a Counter."""
    counters = {name for name, value in vars(scheduler).items() if isinstance(value, Counter)}
    taken = {name: Counter(value) if name in counters else value for name, value in state.items()}
    if CHAINED in state:
        chained = zip(vars(scheduler)[CHAINED], state[CHAINED], strict=True)
        taken[CHAINED] = [taken_back(*pair) for pair in chained]
    return taken


@dataclass(frozen=True, slots=True)
class _OwnState:
    """What takes back a state by code that may be the user's own."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    state: Any


def _scheduler_of(scheduler: LRScheduler | None, state: dict[str, Any] | None) -> list[_OwnState]:
    if scheduler is None or state is None:
        return []
    return [
        _OwnState(f"the scheduler {type(scheduler).__name__}", scheduler.state_dict, scheduler.load_state_dict, state)
    ]


def _extra_of(path: Path, trainer: Trainer, saved: dict[str, Any]) -> list[_OwnState]:
    """Return the modules with an extra state of their own, and what they take back."""
    here = extra_states(trainer.live.parts)
    if missing := saved.keys() ^ here.keys():
        raise StateFileError(
            f"{path} is of another model: the extra state of {min(missing)!r} is only in one of them. Load the "
            "workload that it was saved from."
        )
    return [
        _OwnState(
            f"the module {name or type(here[name]).__name__}",
            here[name].get_extra_state,
            here[name].set_extra_state,
            state,
        )
        for name, state in saved.items()
    ]


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


def runs_in(path: Path, device: Device) -> bytes:
    """Return the kernel's record of runs in a file, whatever it is of; nothing if there is none.

    Raises:
        StateFileError: the file cannot be used.
    """
    _, stream = state_file.read(path)
    with device.exempt(), _opening(path):
        return _runs_of(from_bytes(stream))


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Inside, a file is opened that may be something else."""
    try:
        yield
    except _NOT_A_STATE as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise StateFileError(
            f"{path} does not hold a training state as %hvd_save writes it ({why}). Use another file."
        ) from None


def _runs_of(payload: Mapping[str, Any]) -> bytes:
    """Snapshots and earlier versions wrote none."""
    stored = payload.get("runs")
    return b"" if stored is None else stored.numpy().tobytes()
