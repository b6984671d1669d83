"""The state of an optimizer of which every rank holds its share: the knob ``shard_optimizer``.

Between updates such an optimizer looks as before: whole weights in its groups, and a state for each weight of which
this rank has a share, in which rows of that share stand in place of tensors of the weight's shape. For the update
itself it is given the share alone (:meth:`.partition.Partition.updating`).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_, lt
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from ...internals.torch_internals import step_pre_hooks, stepped_by_others
from ...memory.ledger.recorder import Recorder
from ...shared.categories import COMMUNICATION
from ...shared.errors import WorkloadError
from ...shared.settings import Settings
from ..copies import checksum, host_room
from ..link.communicator import here
from . import optimizers
from .buckets import ReductionConfig
from .optimizer_state import Replicas, Whole, hold_as, placed
from .partition import (
    COUNTS,
    Exchange,
    Partition,
    Span,
    by_elements,
    has_gaps,
    in_memory_order,
    in_one_memory,
    laid_as,
    layout,
    of_weights,
)
from .parts import in_groups

BY_ELEMENTS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD, Rprop)
"""torch's optimizers that update each element by its own gradient and state, without a look at any other."""
_OFF = "Use shard_optimizer=off"
_AT_ONCE_BYTES = 2**22  # of states that come together
State = dict[int, dict[str, Any]]
"""The state of weights, by their places in the optimizer's groups."""


def why_not(optimizer: Optimizer) -> str:
    """Return why ranks cannot share the state of this optimizer; empty where they can."""
    name = type(optimizer).__name__
    if type(optimizer) not in BY_ELEMENTS:
        names = ", ".join(one.__name__ for one in BY_ELEMENTS)
        return (
            f"shard_optimizer=on needs an optimizer of torch's that updates each element by itself ({names}), and "
            f"{name} is none of them. {_OFF} with it"
        )
    if step_pre_hooks(optimizer) or stepped_by_others(optimizer):
        what = "step" if stepped_by_others(optimizer) else "hooks before the step"
        return f"shard_optimizer=on would show the {what} of this {name} nothing but a share of the weights. {_OFF}"
    params = in_groups(optimizer)
    odd = next((param for param in params if has_gaps(param)), None)
    if odd is not None:
        return (
            f"shard_optimizer=on needs weights that lie in memory without gaps, and one of shape {tuple(odd.shape)} "
            f"has strides {odd.stride()}. {_OFF}, or let it hold a copy: param.data = param.data.clone()"
        )
    if (double := in_one_memory(params)) is not None:
        return (
            f"shard_optimizer=on needs every weight once, and one of shape {tuple(double.shape)} lies in the memory of "
            f"another or is in the optimizer's groups twice: two ranks would update it. {_OFF}, or let modules that "
            "share a weight hold the same Parameter"
        )
    return ""


class Shards(Replicas):
    """The state of an optimizer of which every rank holds its share.

    Args:
        optimizer: of this rank, built alike on all of them.
        ranks: how many share.
    """

    partition: Partition

    def __init__(self, optimizer: Optimizer, ranks: int) -> None:
        super().__init__(optimizer)
        self._params = in_groups(optimizer)
        self.partition = Partition.of(self._params, ranks, here().rank)
        self._ways: dict[int, _Way] = {}
        self._note(self._params, self.partition)

    def _note(self, params: Sequence[Tensor], partition: Partition) -> None:
        of_params = zip(params, partition.borders, strict=True)
        self._ways |= {id(param): _Way(weakref.ref(param), at, layout(param)) for param, at in of_params}

    def follow_groups(self) -> None:
        """Share what came into the optimizer's groups, too. All ranks do that alike.

        What left them is not forgotten: the optimizer keeps its state, for when it comes again.
        """
        params, now = in_groups(self._optimizer), self.partition
        if len(params) == len(self._params) and all(map(is_, params, self._params)):
            return
        self._ways = {key: way for key, way in self._ways.items() if way.weight() is not None}
        new = [param for param in params if id(param) not in self._ways]
        of_new = Partition.of(new, now.ranks, now.rank)
        of_new.divide(self._optimizer, new)
        self._note(new, of_new)
        self._params = params
        self.partition = Partition(tuple(self._ways[id(param)].borders for param in params), now.rank)

    def compared(self) -> dict[str, Tensor]:
        """Return by what ranks update their shares, and how these lie, each as something that must be alike on all."""
        name, groups, held = type(self._optimizer).__name__, self._optimizer.param_groups, self.partition.borders
        found = {
            f"the option {option} of {name}": _word(group.get(option) for group in groups)
            for option in self._optimizer.defaults
        }
        on_all = (param for param, at in zip(self._params, held, strict=True) if all(map(lt, at, at[1:])))
        states = [self._optimizer.state.get(param, {}) for param in on_all]
        found[f"the number of steps in the state of {name}"] = _word(
            state.get(count) for state in states for count in sorted(COUNTS)
        )
        found[f"what has a share in the state of {name}"] = _word([held])
        found["the order of weights in memory"] = _word([list(map(layout, self._params))])
        return found

    @contextmanager
    def updating(self, gradients: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """Inside, the optimizer has this rank's share; ``gradients`` are as :meth:`.Partition.updating` has them.

        Raises:
            WorkloadError: it cannot be shared any more, for what a cell has done.
        """
        if problem := why_not(self._optimizer) or self._moved():
            raise WorkloadError(problem)
        with self.partition.updating(self._optimizer, gradients):
            yield

    def after_update(self, settings: Settings, gradients: Collection[int] | None = None) -> Exchange:
        """Take the memory in which ranks give each other what they have updated; may fail for want of it."""
        exchange = of_weights(self.partition, self._params, ReductionConfig.under(settings).bucket_bytes, gradients)
        if Recorder.current:
            Recorder.current.claim(COMMUNICATION, exchange.memory)
        return exchange

    def spread(self, exchange: Exchange | None) -> None:
        """Give all ranks what each has updated. All of them call it together.

        The update counts. If the ranks come apart here, each fails in its next vote, and gets the rest when they join
        again (:meth:`Sharing.rejoined`).
        """
        try:
            self.complete(exchange)
        except BaseException:
            here().leave("the all-gather of updated weights")

    def complete(self, exchange: Exchange | None = None) -> None:
        """Give all ranks what each has updated, or without an ``exchange`` of that, all weights of its share.

        Raises:
            Separated: the ranks came apart.
        """
        self.stale = True
        rows = [in_memory_order(param) for param in self._params]
        exchange = exchange or self._exchange({place: row.dtype for place, row in enumerate(rows)})

        def put(rank: int, span: Span, values: Tensor) -> None:
            if rank != self.partition.rank:
                rows[span.place][span.begin : span.end].copy_(values)

        exchange.run(lambda span: rows[span.place][span.begin : span.end], put)
        self.stale = False

    def gather(self) -> Whole | None:
        """Return the whole state on rank 0, in host memory; ``None`` on the others. All ranks call it together.

        Raises:
            WorkloadError: the ranks' shares do not go together; raised on all of them.
        """
        first, told = here().rank == 0, self._told()
        state = self._brought(told, lambda place, _, dtype: host_room(self._params[place], dtype) if first else None)
        if not first:
            return None
        groups = Optimizer.state_dict(self._optimizer)["param_groups"]
        return {"state": state, "groups": groups, "numbers": optimizers.numbers_beside(self._optimizer)}

    def join(self) -> None:
        """Give every rank the whole state. All ranks call it together; afterwards either all have it or none.

        Raises:
            WorkloadError: the ranks' shares do not go together, or one has no room; raised on all of them.
        """
        told, room, failure = self._told(), dict[tuple[int, str], Tensor](), None
        try:
            for place, values in told.items():
                for name, value in values.items():
                    if isinstance(value, torch.dtype):
                        room[place, name] = torch.empty_like(self._params[place], dtype=value)
        except Exception as error:
            failure = error
        if here().any_rank(failure is not None, "room for a whole state"):
            raise failure or WorkloadError("another rank has no room for the optimizer's whole state")
        found = self._brought(told, lambda place, name, _: room[place, name])
        whole = {param: kept for param, kept in self._optimizer.state.items() if id(param) not in self._ways}
        state = whole | {self._params[place]: values for place, values in found.items()}
        optimizers.put_state(self._optimizer, state, self._optimizer.param_groups)
        hold_as(self._optimizer, Replicas(self._optimizer))

    def follow_first(self) -> None:
        """Leave each rank its share, whose place no other could take, with the numbers beside it of the first rank.

        All ranks call it together. Raises ``WorkloadError`` on all of them if their shares do not go together.
        """
        for place, values in self._told().items():
            param = self._params[place]
            if param in self._optimizer.state:
                numbers = {name: value.on(param) for name, value in values.items() if isinstance(value, _Number)}
                self._optimizer.state[param].update(numbers)
        self.stale = False

    def _part(self, values: dict[str, Any], param: Tensor, place: int) -> dict[str, Any] | None:
        _, begin, end = self.partition.mine(place)
        if begin == end:
            return None
        rows = {
            name: laid_as(value, param)[begin:end]
            for name, value in values.items()
            if by_elements(name, value, param.shape)
        }
        made = placed({name: value for name, value in values.items() if name not in rows}, param)
        return made | {name: torch.empty_like(row, device=param.device).copy_(row) for name, row in rows.items()}

    def _moved(self) -> str:
        """Name a weight whose layout has changed since its share of the state was made; empty if there is none."""
        moved = (param for param in self._params if layout(param) != self._ways[id(param)].layout)
        if (param := next(moved, None)) is None:
            return ""
        return (
            f"a weight of shape {tuple(param.shape)} lies otherwise in memory than when ranks began to share the "
            "optimizer's state, which a cell may have changed. Let it lie as before, with "
            "model.to(memory_format=...), on all ranks"
        )

    def _told(self) -> State:
        """Return what the ranks have of each weight: a type where that has a number for each element, else the value.

        Raises:
            WorkloadError: they have what does not go together; raised on all of them.
        """
        own: State = {}
        for place, param in enumerate(self._params):
            _, begin, end = self.partition.mine(place)
            if param in self._optimizer.state:
                own[place] = {
                    name: value.dtype if by_elements(name, value, (end - begin,)) else _Number.of(value)
                    for name, value in self._optimizer.state[param].items()
                }
        borders = zlib.crc32(repr(self.partition.borders).encode())
        mine = cloudpickle.dumps((self._moved(), borders, own))
        facts = [cloudpickle.loads(one) for one in here().of_each(mine, "held shares")]
        if moved := next((words for words, *_ in facts if words), ""):
            raise WorkloadError(moved)
        each = [(at, told) for _, at, told in facts]
        found: State = {}
        for _, told in each:
            found = dict(sorted((told | found).items()))
        holders = [{span.place for span in spans} for spans in self.partition.spans(found)]
        for rank, (at, told) in enumerate(each):
            kinds = ({place: _kinds(of[place]) for place in holders[rank] & of.keys()} for of in (told, found))
            if at != each[0][0] or next(kinds) != next(kinds):
                raise WorkloadError(
                    f"rank {rank} holds another share of the optimizer's state than it should, which a cell may have "
                    "changed there. To go on without any, run optimizer.state.clear() in a %%hvd cell, on all ranks"
                )
        return found

    def _brought(self, told: State, make: Callable[[int, str, torch.dtype], Tensor | None]) -> State:
        """Return the state of all weights, in tensors that are made here; where that gives none, there is none."""
        found: State = {
            place: {
                name: make(place, name, value) if isinstance(value, torch.dtype) else value.on(self._params[place])
                for name, value in values.items()
            }
            for place, values in told.items()
        }
        for name in sorted({name for values in told.values() for name in values}):
            types = {place: values[name] for place, values in told.items() if name in values}
            dtypes = {place: dtype for place, dtype in types.items() if isinstance(dtype, torch.dtype)}
            self._exchange(dtypes).run(partial(self._held, name), partial(_put_into, found, name))
        return found

    def _held(self, name: str, span: Span) -> Tensor:
        before = self.partition.mine(span.place).begin
        row: Tensor = self._optimizer.state[self._params[span.place]][name]
        return row[span.begin - before : span.end - before]

    def _exchange(self, dtypes: Mapping[int, torch.dtype]) -> Exchange:
        """Return what brings something else than a step's weights, by way of the host, where memory is not scarce."""
        return Exchange("states", self.partition, dtypes, _AT_ONCE_BYTES, torch.device("cpu"))


class _Way(NamedTuple):
    """A weight whose state is shared, or was before it left the optimizer's groups: its borders, and how it lies."""

    weight: weakref.ref[Tensor]
    borders: tuple[int, ...]
    layout: tuple[int, ...]


def _word(values: Iterable[Any]) -> Tensor:
    """Return a number that is the same where these are; those of a GPU stay there, so that nothing waits for it."""
    there, beside = list[Tensor](), list[Any]()
    for value in values:
        on_gpu = isinstance(value, Tensor) and value.device.type != "cpu"
        there += [value.reshape(-1)] if on_gpu else []
        beside.append(value.tolist() if isinstance(value, Tensor) and not on_gpu else on_gpu or value)
    word = torch.tensor(zlib.crc32(repr(beside).encode()), device="cpu")
    return word + checksum(torch.cat(there)) if there else word


@dataclass(frozen=True, slots=True)
class _Number:
    """What a weight's state has besides numbers for each element; ``on_host``: a tensor that belongs there."""

    value: Any
    on_host: bool = True

    @classmethod
    def of(cls, value: Any) -> _Number:
        return cls(value.detach().cpu(), value.device.type == "cpu") if isinstance(value, Tensor) else cls(value)

    def on(self, param: Tensor) -> Any:
        """Return it where it belongs; made anew, because a virtual GPU does not count what was unpickled."""
        if not isinstance(self.value, Tensor):
            return self.value
        return torch.empty_like(self.value, device="cpu" if self.on_host else param.device).copy_(self.value)


def _kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, torch.dtype) else None for name, value in values.items()}


def _put_into(found: State, name: str, rank: int, span: Span, values: Tensor) -> None:
    if (whole := found[span.place][name]) is not None:
        in_memory_order(whole)[span.begin : span.end].copy_(values)
