"""What the updates of questions allocate. Of torch's own optimizers, one that is like an earlier one needs no dry run.

A dry run takes up to a millisecond for each weight and operator, and the small steps of a question have updates alike.
So have those of questions before and after a cell, unless it has changed what an update is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer, RAdam

from ...internals.torch_internals import step_hooks_held_back, stepped_by_others
from ...memory.device import Device
from ...memory.ledger.events import Foreseen
from ...memory.ledger.recorder import Recorder
from ...shared.errors import WorkloadError
from ..undo.step_undo import UpdateUndo
from . import optimizers
from .dry_update import AskedUpdate, CannotBeForeseen, foresee, held_by, kept_by
from .live_model import LiveModel
from .parts import in_groups

MOST_KNOWN = 8
_USED = ("torch.optim.optimizer", "torch.nn.utils.clip_grad", "torch.amp.grad_scaler")  # modules, by all of torch's own


class _Known(NamedTuple):
    """A foreseen update, with places among those that the optimizer holds instead of allocations and weights."""

    rows: tuple[tuple[int, int, int], ...]
    owned: tuple[tuple[int, int, int], ...]
    waiting_bytes: int


class KnownUpdates:
    """Foresees updates as :func:`.dry_update.foresee` does, and remembers the latest ones."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def in_question(self, live: LiveModel, recorder: Recorder, device: Device) -> tuple[Foreseen, str]:
        """Return what the update of a step that is recorded would allocate, under the settings that are tried.

        Returns:
            That, and why it had to be taken and undone; empty where a dry run would do.

        Raises:
            WorkloadError: neither can be done, because ranks would share the optimizer's state in another way.
        """
        update = AskedUpdate.of(live)
        optimizer = update.optimizer
        known = optimizer is live.optimizer or live.state_would_leave  # else held for what is not in use
        recorder.claim_model(live.parts.parameters(), live.optimizer.state if known else {})
        number_of = recorder.pause([*held_by(optimizer), *(update.rows or {}).values(), *update.norms])
        try:
            found, why_taken = self.foresee(update, device.torch_device, number_of), ""
        except CannotBeForeseen as error:
            if update.held != update.wanted:
                raise WorkloadError(f"what shard_optimizer changes here cannot be predicted: {error}") from None
            why_taken, scaler_state = str(error), live.scaler.state_dict()
            undo = UpdateUndo(live.parts.parameters(), optimizer)
            try:
                optimizers.set_implementation(optimizer, update.implementation)
                with step_hooks_held_back(optimizer, pre=True):
                    found = _taken(update, device)
            finally:
                undo.undo()
                live.replace_scaler(scaler_state)
        # What the workload's own keeps beside another optimizer does not leave with the state of that.
        return found.of_new() if live.state_would_leave else found, why_taken

    def foresee(self, update: AskedUpdate, device: torch.device, allocation: Callable[[Tensor], int]) -> Foreseen:
        """Return what the next update would allocate. Arguments and errors are those of :func:`.dry_update.foresee`."""
        optimizer = update.optimizer
        held, weights = [*held_by(optimizer), *(update.rows or {}).values()], list(in_groups(optimizer))
        sparse = any(tensor.layout is not torch.strided for tensor in held)  # of which samples say how much they hold
        if sparse or stepped_by_others(optimizer) or not optimizers.is_torchs(optimizer):
            return foresee(update, device, allocation)
        lying = list(map(allocation, held))
        numbers = list(dict.fromkeys([0, *lying]))
        places = {number: place for place, number in enumerate(numbers)}
        pieces = update.pieces and (update.pieces.narrow, update.pieces.aside is None)
        shares = update.held, update.wanted, update.sent_bytes, update.rows and tuple(update.rows), pieces
        how = update.implementation, update.scaler is None, update.clip_norm is None, shares
        key = (
            (type(optimizer), *how, device, *_code(optimizer)),
            (*_options(optimizer), *_state(optimizer)),
            tuple(zip(map(_look, held), map(places.get, lying), strict=True)),
        )
        if key not in self._known:
            found = foresee(update, device, lambda tensor: places.get(allocation(tensor), 0))
            at = {id(weight): place for place, weight in enumerate(weights)}
            owned = tuple((number, nbytes, at[id(weight)]) for number, nbytes, weight in found.owned)
            self._known[key] = _Known(found.rows, owned, found.waiting_bytes)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        known = self._known[key]

        def real(number: int) -> int:
            return numbers[number] if number < len(numbers) else number

        return Foreseen(
            tuple((real(number), nbytes, call) for number, nbytes, call in known.rows),
            tuple((real(number), nbytes, weights[place]) for number, nbytes, place in known.owned),
            known.waiting_bytes,
        )


def _taken(update: AskedUpdate, device: Device) -> Foreseen:
    """Return what a real update allocates, for one that cannot be foreseen."""
    optimizer, scaler = update.optimizer, update.scaler
    log = device.event_log()
    log.begin([])
    with log.watching():
        if update.held == update.wanted:
            update.bring_state(optimizer)
        update.take(optimizer, scaler, optimizers.scaled_step(scaler, optimizer))
    optimizers.check_dense(optimizer)
    state = kept_by(optimizer, lambda param: param)
    owned = tuple((log.allocation(value), value.untyped_storage().nbytes(), param) for value, param in state)
    events = log.end()
    rows = zip(events.allocation.tolist(), events.bytes.tolist(), events.call.tolist(), strict=True)
    return Foreseen(tuple(rows), tuple(one for one in owned if one[0]), update.waiting_bytes(optimizer))


def _code(optimizer: Optimizer) -> Iterator[Any]:
    """Yield what computes an update, which a cell may have replaced: functions, and what torch does everywhere."""
    kind = type(optimizer)
    yield torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    for holder in (*(sys.modules[name] for name in (kind.__module__, *_USED)), *kind.__mro__):
        for value in vars(holder).values():
            if isinstance(value, FunctionType):
                yield value, value.__code__


def _options(optimizer: Optimizer) -> Iterator[Hashable]:
    """Yield what decides how an update is computed: all options but the rate, and which weights have gradients."""
    yield repr(sorted((name, value) for name, value in optimizer.defaults.items() if name != "lr"))
    for group in optimizer.param_groups:
        yield repr(sorted((name, value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")))
        yield tuple((param.requires_grad, param.grad is not None) for param in group["params"])


def _state(optimizer: Optimizer) -> Iterator[Hashable]:
    """Yield whose the state is, and its names, with numbers by whose value an update may be computed in another way."""
    counts_decide = isinstance(optimizer, RAdam)  # which corrects its variance from the sixth step on
    places = {id(weight): place for place, weight in enumerate(in_groups(optimizer))}
    for weight, values in optimizer.state.items():
        yield places.get(id(weight))
        # A person may keep something of their own there, which is no weight's.
        for name, value in values.items() if isinstance(values, dict) else ():
            yield name
            if not isinstance(value, Tensor):
                yield repr(value)
            elif not value.dim():
                yield value.item() if name != "step" or counts_decide else 0.0


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad
