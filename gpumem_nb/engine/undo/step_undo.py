"""A step on one rank, undone: what forward, hooks and the update change is kept before they run and put back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...internals.torch_internals import base_of, forget_scaler, hooks_of_tensor, versions
from ...memory.tensors import tensors_in
from ...shared.errors import WorkloadError
from .. import cells
from ..copies import Layout, Memory, Shelf, changed_since, host_copy, quick_checksum, refill, same
from ..random_state import RandomState
from .changing import SMALL_BYTES, Before, Changing, Key, can_be_filled
from .places import Holding
from .python_state import PythonSnapshot, PythonState, each
from .reachable import Reachable

_LARGEST_BYTES = 2**20  # of a tensor that is neither a buffer nor a weight, to be copied before it was seen to change


class ForwardUndo:
    """Undoes changes of a forward pass or a hook: buffers (such as batch norm's), Python state, random numbers.

    And ``weights``, if they are given. It holds until the next one is made of the same ``state``.
    """

    def __init__(self, state: ForwardState, weights: KeptWeights | None = None) -> None:
        self.weights = weights
        state.forget_after_cells()
        self._state = state
        self._python = state.python.take()
        self._others = state.others_before(self._python)
        self._buffers = state.always_kept()
        self._weights = state.weights
        self._trained = [weight.requires_grad for weight in state.weights]
        hooks = list(map(hooks_of_tensor, state.weights))  # most often none, which takes half the time
        self._hooks = [dict(one) if one else None for one in hooks] if any(hooks) else [None] * len(hooks)
        self._memory = state.memory if weights else Memory()  # an update may well take other memory for weights
        self._memory.hold()
        self._random = RandomState.take()

    def watch_no_more(self) -> None:
        """Forward and backward are over: what comes is the update."""
        self._memory.let_go()
        if self.weights:
            self.weights.watch_no_more()

    def undo(self) -> None:
        """Put everything back, bit for bit; what was not there before is dropped.

        What one part raises stops no other, and is raised when all are done.
        """
        weights = (self.weights.put_back,) if self.weights else ()
        others = (self._state.learn, *(before.put_back for before in self._others), self._tell_of_missed)
        tensors = (self._put_buffers_back, self._put_weights_back, *weights)
        each(chain((self._memory.put_back,), self._python.parts(), others, tensors, (self._random.put_back,)))

    def changed(self) -> str:
        """Return the name of something that is otherwise by now, weights aside; empty if nothing is."""
        names = sorted(map(str, self._python.differing(self._state.python.take())))
        names += (before.key[1] for before in self._others if before.was_written())
        buffers = (buffer for buffer, content in self._buffers if not same(buffer, content))
        return next(iter(names), "a buffer" if next(buffers, None) is not None else "")

    def _tell_of_missed(self) -> None:
        missed = [before for before in self._others if before.was_missed]
        if missed:
            self._state.tell_of(missed, self.weights.looked_after if self.weights else set())

    def _put_weights_back(self) -> None:
        for weight, trained, hooks in zip(self._weights, self._trained, self._hooks, strict=True):
            if weight.requires_grad != trained:
                weight.requires_grad_(trained)
            if (now := hooks_of_tensor(weight)) and now != hooks:
                now.clear()
            if hooks and now is not None:
                now.update(hooks)

    def _put_buffers_back(self) -> None:
        for buffer, content in self._buffers:
            refill(buffer, content)


class ForwardState:
    """The places where the user's code can change something: in modules, their hooks, functions, and what these reach.

    Args:
        parts: the modules whose weights are trained.
        code: the loss, or hooks around an update.
        on_host: copies of tensors on a GPU are fetched, which waits for it; by default they stay there.

    Attributes:
        weights: all that are found in these, trained or not.
        of_parts: those of them that are the modules' own.
        memory: where they and buffers lie.
    """

    def __init__(self, parts: Iterable[nn.Module], *code: Callable[..., Any], on_host: bool = False) -> None:
        self._on_host = on_host
        self._parts = tuple(parts)
        roots = (*self._parts, *code, *(getattr(one, "criterion", one) for one in code))
        self.python = PythonState(lambda: roots)  # not by way of self: a circle would keep the model
        self._forget()

    def _forget(self) -> None:
        self._shelves = Shelf(), Shelf()
        self._changing = Changing(partial(_copies, self._shelves[0], self._on_host), _LARGEST_BYTES)
        self._fresh: list[Before] = []
        self._found: Reachable | None = None
        self._trained: set[int] = set()
        self.weights: list[Tensor] = []
        self.of_parts: list[Tensor] = []
        self.memory = Memory()
        self._other_weights: list[tuple[Key, Tensor]] = []  # frozen, or of an average that a hook keeps, for example
        self._small_weights: list[Tensor] = []  # among these
        self._cells = cells.ran()

    def let_go(self) -> None:
        """Hold nothing until the next step."""
        self.python.let_go()
        self._forget()

    def forget_after_cells(self) -> None:
        """Forget what was learned of a model: a cell has run, which may have changed anything."""
        if cells.ran() != self._cells:
            self.let_go()

    def others_before(self, taken: PythonSnapshot) -> list[Before]:
        """Keep what is in tensors that are neither buffers nor trained, as far as it may have to be put back."""
        self.learn()
        if self._found is not self.python.found:
            self._found = self.python.found
            weights = self.python.weights()
            self.weights = [weight for _, weight in weights]
            self.memory = Memory(filter(can_be_filled, (one for _, one in (*weights, *self.python.buffers()))))
            self.of_parts = [weight for part in self._parts for weight in part.parameters()]
            ours = {id(weight) for weight in self.of_parts if weight.requires_grad}
            self._trained = {id(weight) for _, weight in weights} & ours
            others = [(key, one) for key, one in weights if id(one) not in self._trained and can_be_filled(one)]
            self._small_weights = [one for _, one in others if one.nbytes <= SMALL_BYTES]
            self._other_weights = [(key, one) for key, one in others if one.nbytes > SMALL_BYTES]
        named = chain(taken.tensors, self._other_weights)
        befores = self._changing.before((key, tensor) for key, tensor in named if id(tensor) not in self._trained)
        self._fresh = [before for before in befores if before.fresh]
        return befores

    def learn(self) -> None:
        """Find out which of the tensors that were copied for the first time were written, before they are put back."""
        fresh, self._fresh = self._fresh, []
        self._changing.after(fresh, compare=False)

    def tell_of(self, missed: Iterable[Before], looked_after: set[int]) -> None:
        """Copy these from now on, but for weights that others look after, by their ids, and views of what is trained.

        Raises:
            WorkloadError: there are others.
        """
        weights = (weight for part in self._parts for weight in part.parameters() if weight.requires_grad)
        trained = {weight.untyped_storage().data_ptr() for weight in weights}
        found = [
            before
            for before in missed
            if not (before.tensor.requires_grad or id(before.tensor) in looked_after)
            and before.tensor.untyped_storage().data_ptr() not in trained
        ]
        self._changing.after(found, compare=False)
        if found:
            raise _written_unseen("tensor", found[0].tensor)

    def always_kept(self) -> list[tuple[Tensor, Tensor]]:
        """Keep buffers and small weights that are not trained: each with its content."""
        buffers = [buffer for _, buffer in self.python.buffers() if can_be_filled(buffer)]
        tensors = [*buffers, *self._small_weights]
        return list(zip(tensors, _copies(self._shelves[1], self._on_host, tensors), strict=True))


def _copies(shelf: Shelf, on_host: bool, tensors: list[Tensor]) -> list[Tensor]:
    fetched = iter(shelf.copies([tensor for tensor in tensors if on_host or not tensor.is_cuda]))
    return [next(fetched) if on_host or not one.is_cuda else one.detach().clone() for one in tensors]


class KeptWeights:
    """Weights, copied to host memory; of ``summed`` ones it is only known afterwards whether they were written.

    Of ``watched`` ones it is known where torch counted that as a change. ``compared``: :meth:`written` will be asked.

    Attributes:
        missed: those that were written and not copied, as far as is known after :meth:`put_back`.
    """

    def __init__(
        self,
        copied: Iterable[Tensor],
        summed: Iterable[Tensor] = (),
        watched: Iterable[Tensor] = (),
        compared: bool = False,
    ) -> None:
        self._copied = [(weight, host_copy(weight)) for weight in copied]
        self._summed = [(weight, quick_checksum(weight)) for weight in summed]
        # A GPU's are not fetched again to be compared.
        remote = (weight for weight, _ in self._copied if compared and weight.device.type != "cpu")
        self._compared = [(weight, quick_checksum(weight)) for weight in remote]
        self._watched = list(watched)
        self._versions = versions(self._watched)
        self.missed: list[Tensor] = []

    @classmethod
    def before_forward(cls, trained: Iterable[Tensor], weights: Iterable[Tensor], copy: bool) -> KeptWeights:
        """Keep those of all ``weights`` that a forward pass may write.

        Small ones are copied, and all that is ``trained`` if ``copy`` says so. Some models keep an average of that in
        frozen weights, and bring it up to date in forward: these are copied, unless they have more bytes than what is
        trained, as those below adapters have. What is not copied is summed up.
        """
        ours = {id(weight): weight for weight in trained}
        frozen = [weight for weight in weights if id(weight) not in ours and can_be_filled(weight)]
        room, shapes = sum(weight.nbytes for weight in ours.values()), {weight.shape for weight in ours.values()}
        few = frozen
        if sum(weight.nbytes for weight in frozen) > room:  # an average has the shapes of what it is of
            few = [weight for weight in frozen if weight.shape in shapes]
        if sum(weight.nbytes for weight in few) > room:
            few = []
        own = [weight for weight in ours.values() if copy or weight.nbytes <= SMALL_BYTES]
        small = (weight for weight in frozen if weight.nbytes <= SMALL_BYTES)
        copied = list({id(weight): weight for weight in (*own, *few, *small)}.values())
        known = set(map(id, copied))
        summed = (weight for weight in (*ours.values(), *frozen) if id(weight) not in known)
        return cls(copied, summed, compared=True)

    def written(self) -> list[Tensor]:
        """Those that hold something else by now; waits for the device."""
        remote = {id(weight) for weight, _ in self._compared}
        here = ((weight, content) for weight, content in self._copied if id(weight) not in remote)
        copied = [weight for weight, content in here if not same(weight.detach(), content)]
        return copied + changed_since([*self._compared, *self._summed])

    def watch_no_more(self) -> None:
        """Forward and backward are over: what comes is the update, which a question may take and undo."""
        now = versions(self._watched)
        if now != self._versions:
            known = zip(self._watched, self._versions, now, strict=True)
            self.missed += [weight for weight, before, after in known if after != before]
        self._watched, self._versions = [], []

    @property
    def copied(self) -> set[int]:
        """The ids of those that :meth:`put_back` puts back."""
        return {id(weight) for weight, _ in self._copied}

    @property
    def looked_after(self) -> set[int]:
        """The ids of those of which :meth:`put_back` puts back or tells that they were written."""
        return {id(weight) for weight, _ in (*self._copied, *self._summed)}

    def put_back(self) -> None:
        """Put everything back, bit for bit.

        Raises:
            WorkloadError: a weight that was not copied is another now.
        """
        self.watch_no_more()
        each(partial(refill, weight, content) for weight, content in self._copied)
        self.missed += changed_since(self._summed)
        for weight in self.missed:
            raise _written_unseen("weight", weight)


def _written_unseen(what: str, tensor: Tensor) -> WorkloadError:
    return WorkloadError(
        f"The model's forward wrote a large {what}, of shape {tuple(tensor.shape)}, that was not copied before; from "
        "now on it is. To begin with weights that no undone step has written, load them again."
    )


class WrittenByForward:
    """Learns which weights forward itself writes: found out by their content, in the first step after each cell.

    In later ones by torch's count of changes, for those that are trained; of others a :class:`ForwardState` learns it.
    """

    def __init__(self) -> None:
        self._written: list[Tensor] | None = None
        self._missed: list[Tensor] = []
        self._cells = -1

    def before(self, trained: Iterable[Tensor], weights: Iterable[Tensor], copy: bool) -> KeptWeights:
        """Keep what forward may write; see :meth:`KeptWeights.before_forward`."""
        if cells.ran() != self._cells:
            self._written, self._missed, self._cells = None, [], cells.ran()
        if self._written is None:
            return KeptWeights.before_forward(trained, weights, copy)
        self._written += self._missed
        known = set(map(id, self._written))
        watched = (weight for weight in trained if id(weight) not in known) if known else trained
        kept = KeptWeights(self._written, watched=watched)
        self._missed = kept.missed
        return kept

    @property
    def known(self) -> list[Tensor]:
        """Return those that forward is known to write."""
        return self._written or []

    def after(self, kept: KeptWeights) -> list[Tensor]:
        """Learn what forward and backward have written since, and return what they are known to write."""
        if self._written is None:
            self._written = kept.written()
        return self._written


class _Replaceable(Holding):
    """A tensor by its content: an update that makes a new one in its place need not have room for both."""

    __slots__ = ("_content", "_device", "_layout", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        view = base_of(tensor) is not None  # one made in its place would not change with its base
        self._tensor: Callable[[], Tensor | None] = partial(_itself, tensor) if view else weakref.ref(tensor)
        self._layout, self._device = Layout.of(tensor), tensor.device
        self._content = host_copy(tensor)

    def get(self) -> Tensor:
        """Give the tensor, or one like it if it is no more; all that held it get the same."""
        tensor = self._tensor()
        if tensor is None:
            tensor = self._layout.made(self._device)
            self._tensor = weakref.ref(tensor)
            self.refill()
        return tensor

    def refill(self) -> None:
        """Put the content back, if there is a tensor for it."""
        if (tensor := self._tensor()) is not None:
            refill(tensor, self._content)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class UpdateUndo:
    """Undoes an update: weights, all that the optimizer keeps, and what hooks before it change; kept in host memory."""

    def __init__(self, params: Iterable[Tensor], optimizer: Optimizer, hooks: ForwardUndo | None = None) -> None:
        self._hooks, self._optimizer = hooks, optimizer
        self._weights = KeptWeights(params)
        places = PythonState(lambda: (optimizer,))
        self._kept = places.take()
        held = (*self._kept.tensors, *places.weights(), *places.buffers())
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        tensors = {id(tensor): tensor for _, tensor in held if id(tensor) not in trained}
        state = set(map(id, tensors_in(list(optimizer.state.values()))))  # which must be kept, or the update is refused
        kept = [one for one in tensors.values() if can_be_filled(one) or id(one) in state]
        self._tensors = [(one, host_copy(one)) for one in kept if type(one) is not Tensor]
        replaceable = {id(one): _Replaceable(one) for one in kept if type(one) is Tensor}
        self._replaceable = list(replaceable.values())
        self._kept.hold(lambda value: replaceable.get(id(value), value))
        self._kept.tensors = []

    def undo(self) -> None:
        """Put everything back, bit for bit; state that was not there before is dropped.

        What one part raises stops no other, and is raised when all are done.
        """
        hooks = (self._hooks.undo,) if self._hooks else ()
        replaceable = (one.refill for one in self._replaceable)
        contents = (partial(refill, tensor, content) for tensor, content in self._tensors)
        scaler = partial(forget_scaler, self._optimizer)
        each((*hooks, self._weights.put_back, *self._kept.parts(), *replaceable, *contents, scaler))
