"""The state of an optimizer of which every rank holds its share: the knob ``shard_optimizer``.

Between updates such an optimizer looks as before: whole weights in its groups, and a state for each weight of which
this rank has a share, in which rows of that share stand in place of tensors of the weight's shape. For the update
itself it is given the share alone (:meth:`.partition.Partition.updating`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from ...internals.torch_internals import step_pre_hooks, stepped_by_others
from ...memory.ledger.recorder import Recorder
from ...shared.categories import COMMUNICATION
from ...shared.errors import WorkloadError
from ...shared.settings import Settings
from ..copies import host_room
from ..link.communicator import here
from . import optimizers
from .buckets import ReductionConfig
from .optimizer_state import Replicas, Whole, hold_as, placed, state_of
from .partition import Exchange, Partition, Span, by_elements, has_gaps, in_memory_order, laid_as, layout, of_weights
from .parts import in_groups

BY_ELEMENTS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD, Rprop)
"""torch's optimizers that update each element by its own gradient and state, without a look at any other."""
_AT_ONCE_BYTES = 2**22  # of states that come together
_OFF = "Use shard_optimizer=off"
State = dict[int, dict[str, Any]]
"""The state of weights, by their places in the optimizer's groups."""


class Sharing:
    """Brings the state of optimizers to the form that settings ask for, on so many ranks.

    Sharing needs no word of other ranks: each keeps its part. For the whole they come together, before anything of the
    settings is applied, because that may fail on one of them. All of them know when: from the settings that they were
    given last, or that they came apart since.
    """

    def __init__(self, ranks: int, exempt: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """``exempt`` gives a context in which the device's limit is not enforced."""
        self._ranks, self._exempt = ranks, exempt
        self._may_be_shared = False

    def wanted(self, settings: Settings) -> bool:
        """Return whether ranks share the state under these settings. One by itself has all of it."""
        return settings.shard_optimizer == "on" and self._ranks > 1

    def form(self, optimizer: Optimizer, settings: Settings) -> Replicas:
        """Return how an optimizer's state would be held under these settings."""
        shares = self.wanted(settings) and not why_not(optimizer)
        return Shards(optimizer, self._ranks) if shares else Replicas(optimizer)

    def apply(self, optimizer: Optimizer, settings: Settings, tried: bool) -> None:
        """Keep this rank's share of the state, if these settings ask for it and are not just ``tried``.

        Raises:
            WorkloadError: ranks cannot share it.
        """
        if not self.wanted(settings):
            return
        if problem := why_not(optimizer):
            raise WorkloadError(problem)
        if not tried:
            with self._exempt():
                self._share(optimizer)

    def joins(self, settings: Settings) -> bool:
        """Return whether all ranks must :meth:`join` before these settings are applied; the same on all of them."""
        self._may_be_shared |= self.wanted(settings)
        return self._may_be_shared and not self.wanted(settings)

    def join(self, held: Iterable[Optimizer]) -> None:
        """Give every rank the whole state of these optimizers, whichever ranks share it. All ranks call it together.

        Raises:
            WorkloadError: some rank cannot; raised on all of them.
        """
        for optimizer in dict.fromkeys(held):
            if here().any_rank(state_of(optimizer).partition is not None, "shares"):
                self._share(optimizer)  # also on a rank on which a flip had failed
                form = state_of(optimizer)
                assert isinstance(form, Shards)
                form.join()
        self._may_be_shared = False

    def gather_s(self, params: Sequence[Tensor], settings: Settings) -> float:
        """Return how many seconds ranks take to give each other these weights; all of them do it, and keep theirs."""
        trained = [param for param in params if param.requires_grad]
        if not (trained and self.wanted(settings)):
            return 0.0
        partition, took_s = Partition.of(trained, self._ranks, here().rank), 0.0
        dtypes = {place: param.dtype for place, param in enumerate(trained)}
        most_bytes = ReductionConfig.under(settings).bucket_bytes
        rows = [in_memory_order(param) for param in trained]
        with self._exempt():
            exchange = Exchange("weights on trial", partition, dtypes, most_bytes, trained[0].device)
            for _ in range(2):  # in the first one they agree on what is sent
                began_s = time.perf_counter()
                exchange.run(lambda span: rows[span.place][span.begin : span.end], lambda *_: None)
                took_s = time.perf_counter() - began_s
        return took_s

    def rejoined(self, optimizer: Optimizer) -> None:
        """Give all ranks what each has updated, if they came apart in that. All of them come here."""
        self._may_be_shared = self._ranks > 1
        form = state_of(optimizer)
        if here().any_rank(form.stale, "updated weights"):
            assert isinstance(form, Shards)
            with self._exempt():
                form.complete()

    def _share(self, optimizer: Optimizer) -> None:
        form = state_of(optimizer)
        if form.partition is None:
            form = Shards(optimizer, self._ranks)
            form.partition.divide(optimizer)
            hold_as(optimizer, form)
        form.follow_groups()


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
    odd = next((param for param in in_groups(optimizer) if has_gaps(param)), None)
    if odd is not None:
        return (
            f"shard_optimizer=on needs weights that lie in memory without gaps, and one of shape {tuple(odd.shape)} "
            f"has strides {odd.stride()}. {_OFF}, or let it hold a copy: param.data = param.data.clone()"
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
        self._layouts = {id(param): layout(param) for param in self._params}

    def follow_groups(self) -> None:
        """Share what came into the optimizer's groups, too, and let go of what left them. All ranks do that alike."""
        params, now = in_groups(self._optimizer), self.partition
        borders = {id(param): one for param, one in zip(self._params, now.borders, strict=True)}
        new = [param for param in params if id(param) not in borders]
        of_new = Partition.of(new, now.ranks, now.rank).borders
        borders |= {id(param): one for param, one in zip(new, of_new, strict=True)}
        self._params, self.partition = params, Partition(tuple(borders[id(param)] for param in params), now.rank)
        self._layouts = {id(param): self._layouts.get(id(param), layout(param)) for param in params}

    def update(self, step: Callable[[], Any]) -> None:
        """Let the optimizer take its ``step`` of this rank's share.

        Raises:
            WorkloadError: it cannot be shared any more, for what a cell has done.
        """
        if problem := why_not(self._optimizer) or self._moved():
            raise WorkloadError(problem)
        with self.partition.updating(self._optimizer):
            step()

    def after_update(self, settings: Settings) -> Exchange:
        """Take the memory in which ranks give each other what they have updated; may fail for want of it."""
        exchange = of_weights(self.partition, self._params, ReductionConfig.under(settings).bucket_bytes)
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
        state = {self._params[place]: values for place, values in found.items()}
        optimizers.put_state(self._optimizer, state, self._optimizer.param_groups)
        hold_as(self._optimizer, Replicas(self._optimizer))

    def follow_first(self) -> None:
        """Leave each rank its share: no other rank has one that could take its place."""

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
        """Return that a weight lies otherwise than when its share of the state was made; empty if none does."""
        moved = (param for param in self._params if layout(param) != self._layouts[id(param)])
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
