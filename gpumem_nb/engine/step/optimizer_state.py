"""The state of an optimizer over all ranks: who holds which part of it, and how the whole of it comes together.

Joining, saving, resuming, putting aside and updating ask here and know nothing of where parts lie. Every rank holds all
of it, or its share (``shards.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import WeakKeyDictionary

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory.tensors import mapped, tensors_in
from ...shared.errors import StateFileError, WorkloadError, text_of
from ...shared.settings import Settings
from ..copies import Layout, host_copy
from ..link.communicator import here
from . import optimizers
from .parts import Parts, in_groups
from .state_aside import SMALL_BYTES, StateAside

if TYPE_CHECKING:
    from .partition import Exchange, Partition


class Whole(TypedDict):
    """All of an optimizer's state, as files keep it: parameters by their places in the groups, values by name.

    ``numbers``: those that it keeps beside its state, such as a count of updates (:func:`.optimizers.numbers_beside`).
    """

    state: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    numbers: dict[str, Any]


class Replicas:
    """The state of an optimizer that every rank holds all of, alike to the bit.

    Attributes:
        partition: which rank has which elements; ``None``: each has all of them.
        stale: whether this rank lacks what others have updated.

    Args:
        optimizer: of this rank, built alike on all of them.
    """

    partition: Partition | None = None
    stale = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._of = weakref.ref(optimizer)  # which is known by what it is held as, and must not live on for that

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._of()
        assert optimizer is not None
        return optimizer

    @contextmanager
    def updating(self, gradients: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """Inside, the optimizer has what this rank updates, which is all."""
        yield

    def after_update(self, settings: Settings, gradients: Collection[int] | None = None) -> Exchange | None:
        """Take the memory in which ranks give each other what they have updated; none where each updates all."""
        return None

    def spread(self, exchange: Exchange | None) -> None:
        """Give all ranks what each has updated, which they have."""

    def follow_groups(self) -> None:
        """Take note of what came into the optimizer's groups, and of what left them. All ranks do that alike."""

    def compared(self) -> dict[str, Tensor]:
        """Return what must be alike on all ranks for their weights to stay so, by name; here the weights show all."""
        return {}

    def gather(self) -> Whole | None:
        """Return the whole state on rank 0, whose tensors are the optimizer's own; ``None`` on the others."""
        if here().rank != 0:
            return None
        # Not by its state_dict, which may have a form of its own that scatter would not know.
        groups = self._optimizer.param_groups
        places = {id(param): place for place, param in enumerate(in_groups(self._optimizer))}
        return {
            "state": {places[id(param)]: dict(values) for param, values in self._optimizer.state.items()},
            "groups": [group | {"params": [places[id(param)] for param in group["params"]]} for group in groups],
            "numbers": optimizers.numbers_beside(self._optimizer),
        }

    def scatter(self, whole: Whole, aside: StateAside | None = None) -> Callable[[], None]:
        """Make this rank's part of a whole state that all ranks have read; what is returned puts it in place.

        Args:
            whole: the state.
            aside: where it shall wait; ``None``: on the device.

        Raises:
            StateFileError: it is of other groups of parameters.
        """
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        there = [len(group["params"]) for group in whole["groups"]]
        if sizes != there:
            raise StateFileError(f"it is of groups of {there} parameters, and these are {sizes}")
        params = list(in_groups(self._optimizer))
        state = dict[Tensor, dict[str, Any]]()
        for index, values in whole["state"].items():
            param = params[index]
            if (part := self._part(values, param, index)) is not None:
                state[param] = part
                if aside:
                    aside.let_wait(part, param.device)

        def put() -> None:
            hold_as(self._optimizer, self)
            optimizers.put_state(self._optimizer, state, whole["groups"])
            optimizers.put_numbers(self._optimizer, whole["numbers"])

        return put

    def _part(self, values: dict[str, Any], param: Tensor, place: int) -> dict[str, Any] | None:
        """Return what this rank holds of a weight's whole state; ``None`` if that is nothing."""
        return placed(values, param)

    def follow_first(self) -> None:
        """Take over what rank 0 holds. All ranks call it together.

        Raises:
            WorkloadError: the state holds something that cannot be sent; raised on all ranks.
        """
        params, state = list(in_groups(self._optimizer)), self._optimizer.state
        first = here().rank == 0
        skeleton = {
            index: mapped(Tensor, Layout.of, dict(state[param]))
            for index, param in enumerate(params)
            if first and param in state
        }
        told = skeleton, optimizers.numbers_beside(self._optimizer)
        skeleton, numbers = from_first(told, f"The state of the optimizer {type(self._optimizer).__name__}")
        optimizers.put_numbers(self._optimizer, numbers)
        if not first:
            made = {
                params[index]: mapped(Layout, partial(_made, params[index].device), values)
                for index, values in skeleton.items()
            }
            optimizers.put_state(self._optimizer, made, self._optimizer.param_groups)
        here().broadcast(
            {
                f"state.{index}.{number}": tensor
                for index in skeleton
                for number, tensor in enumerate(tensors_in(state[params[index]]))
            }
        )

    def move_to(self, device: torch.device, moved: set[int]) -> None:
        """Bring weights of its own to the device of the model, and the state of all that moved there; ids of weights.

        Adagrad makes its state when it is built, and other optimizers have some if they have trained already.
        """
        for param in in_groups(self._optimizer):
            if param.device != device:
                param.data = param.data.to(device)
                moved.add(id(param))
            if id(param) in moved and param in self._optimizer.state:
                self._optimizer.state[param].update(placed(self._optimizer.state[param], param))

    def keep(self) -> Parked:
        """Move this rank's part to host memory; the optimizer has none until it is put back.

        Raises:
            WorkloadError: some of it is no weight's.
        """
        optimizers.check_state(self._optimizer)
        return Parked(self._optimizer)


_held_as: WeakKeyDictionary[Optimizer, Replicas] = WeakKeyDictionary()


def state_of(optimizer: Optimizer) -> Replicas:
    """Return who holds which part of an optimizer's state."""
    return _held_as.get(optimizer) or Replicas(optimizer)


def hold_as(optimizer: Optimizer, form: Replicas) -> None:
    """Take note that an optimizer's state is held so from now on."""
    _held_as[optimizer] = form


class Parked:
    """One of torch's optimizers, out of use: its state lies in host memory until :meth:`restore` is called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._put_away()

    def _put_away(self) -> None:
        self._state = {
            param: {name: _put_away(value, param.device) for name, value in values.items()}
            for param, values in self.optimizer.state.items()
        }
        self.optimizer.state.clear()

    def restore(self) -> None:
        """Put the state back, in tensors that lie as before."""
        state = {param: {name: back() for name, back in values.items()} for param, values in self._state.items()}
        self.optimizer.state.update(state)

    @contextmanager
    def restored(self) -> Iterator[Optimizer]:
        """Inside, the optimizer has its state; afterwards what it has then is put away."""
        self.restore()
        try:
            yield self.optimizer
        finally:
            self._put_away()


def _put_away(value: Any, device: torch.device) -> Callable[[], Any]:
    if not isinstance(value, Tensor):
        return lambda: value
    layout, content = Layout.of(value), host_copy(value)
    if value.nbytes > SMALL_BYTES:  # which is the device's, wherever it waits now
        layout = replace(layout, on_host=False)
    return lambda: layout.made(device).copy_(content)


def placed(values: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return one parameter's state; made anew, because a virtual GPU does not count tensors that come from a file."""

    def place(name: str, value: Tensor) -> Tensor:
        if name == "step":  # torch's counters live on the host; fused implementations move them when they are chosen
            return value.clone()
        if value.shape == param.shape:
            return torch.empty_like(param, dtype=value.dtype).copy_(value)
        return torch.empty_like(value, device=param.device).copy_(value)

    return {name: mapped(Tensor, partial(place, name), value) for name, value in values.items()}


def _made(device: torch.device, layout: Layout) -> Tensor:
    return layout.made(device)


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
