"""The state that a block of a model saw when it was called, so that it can run again from there without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...internals.torch_internals import batch_norms, buffers_by_name, unversioned, version
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.errors import WorkloadError
from .. import cells
from ..copies import changed_since, quick_checksum, refill
from ..random_state import RandomState
from ..undo.changing import Before, Changing, Key, can_be_filled
from ..undo.places import Holding, elements_of, given
from ..undo.python_state import PythonSnapshot, PythonState
from ..undo.reachable import PLAIN

OTHERWISE = "Use checkpointing=none, or make the block depend on nothing but its inputs."
SOMETHING_ELSE = "run a second time it did something else than the first time"
_OWN_WEIGHTS = "it changes its own weights in forward"
OTHER_BLOCKS = "Use checkpointing=none, or name other blocks in Workload(blocks=...)."


def cannot(why: str, otherwise: str = OTHERWISE) -> WorkloadError:
    """Return the refusal, to be raised."""
    return WorkloadError(f"checkpointing cannot recompute a block: {why}. {otherwise}")


class Draws:
    """Knows whether numbers of Python and NumPy are drawn while a model's forward runs.

    To ask where they stand takes a tenth of a millisecond, too much for each block. So each call asks in the first
    pass only; when nothing was drawn in it, later ones ask at their begin and before their first replay.

    Attributes:
        recorded: each call has to ask.
    """

    def __init__(self) -> None:
        self.recorded = True
        self._settled = False
        self._began: tuple[Any, Any] | None = None
        self._cells = cells.ran()

    @property
    def seen(self) -> bool:
        """Return whether some were drawn when blocks ran last, as far as was looked."""
        return self._settled and self.recorded

    def block_begins(self) -> None:
        """A block is called: the first of a pass, perhaps."""
        if cells.ran() != self._cells:
            self._cells, self.recorded, self._settled = cells.ran(), True, False
        if self._began is None and not (self._settled and self.recorded):
            self._began = _slow_state()

    def replay_begins(self) -> None:
        """A block will run once more: the first of a pass, perhaps.

        Raises:
            WorkloadError: numbers were drawn in this pass, and calls did not ask.
        """
        if self._began is None:
            return
        began, self._began = self._began, None
        drawn = not _same(began, _slow_state())
        if not self._settled:
            self._settled, self.recorded = True, drawn
        elif drawn:
            self.recorded = True
            raise cannot(
                "for the first time it drew random numbers of Python or NumPy. Train on, and they are recorded"
            )

    def forget(self) -> None:
        """The pass was given up."""
        self._began = None


def _slow_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return bool(one[0] == other[0] and all(map(np.array_equal, one[1], other[1])))


@dataclass(frozen=True, slots=True)
class SavedTensor(Holding):
    """A tensor and the version it had. Its graph would hold what belongs to it in a cycle that is not collected."""

    tensor: Tensor
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """Hold a tensor, which the ledger counts as saved."""
        if Recorder.current:
            Recorder.current.saved(tensor)
        return cls(tensor.detach(), version(tensor), tensor.requires_grad)

    def get(self) -> Tensor:
        """Give the tensor, a leaf now.

        Raises:
            WorkloadError: it was changed in place meanwhile.
        """
        if version(self.tensor) != self.version:
            raise cannot(
                "its input was changed in place after the block used it",
                "Use checkpointing=none, or replace the in-place operation in the model.",
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _SavedTuple(Holding):
    """A tuple with such tensors in it."""

    kind: Any
    items: list[Any]

    def get(self) -> Any:
        return self.kind(map(given, self.items))


def without_graph(value: Any) -> Any:
    """Return what to hold of a value: itself, unless it is a tensor of a graph, or a tuple of such tensors."""
    if isinstance(value, Tensor):
        return SavedTensor.of(value) if value.grad_fn is not None else value
    if isinstance(value, tuple) and any(isinstance(one, Tensor) and one.grad_fn is not None for one in value):
        return _SavedTuple(getattr(value, "_make", type(value)), list(map(without_graph, value)))
    return value


_FIRST_CALLS, _EACH_CALLS = 4, 64  # that are compared: a loss may call a block several times, each in another way
_ELEMENTS = 64  # of each result
_TOLERANCE = 1e-2  # of the largest element: some of CUDA's operators add up in any order


def is_compared(calls: int) -> bool:
    """Return whether the replay of a block that was called so often before is to be compared."""
    return calls < _FIRST_CALLS or calls % _EACH_CALLS == 0


class Fingerprint:
    """Samples of a block's output, and how many tensors autograd had saved by then."""

    def __init__(self, output: Any, saved: int) -> None:
        self._samples = [_sample(tensor) for tensor in tensors_in(output)]
        self._saved = saved

    def is_of(self, output: Any, saved: int) -> bool:
        """Return whether a block that was run once more did the same."""
        samples = [_sample(tensor) for tensor in tensors_in(output)]
        return saved == self._saved and len(samples) == len(self._samples) and all(map(_alike, self._samples, samples))


def _sample(tensor: Tensor) -> Tensor:
    """Some elements from all over a tensor, as 64-bit numbers."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.float64)
    indices = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _ELEMENTS), device=tensor.device)
    places = torch.unravel_index(indices, tensor.shape) if tensor.dim() else ()
    sample = tensor.detach()[places]
    return sample.abs().double() if sample.is_complex() else sample.double().abs()


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    largest = one.nan_to_num().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)


class BlockState:
    """The state that one block may read and change beside its inputs; kept for as long as it is checkpointed."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.calls = 0
        self.counted: set[str] = set()  # names of attributes that it changes when it runs
        self.python = PythonState(lambda: [block])
        self._begin()

    def forget_after_cells(self) -> None:
        """Forget what was learned of the block: a cell has run, which may have changed anything."""
        if cells.ran() != self._cells:
            self.calls = 0
            names = self.changing.names  # an export may ask for them before the next step
            self.python.let_go()
            self._begin()
            self.changing.names = names

    def _begin(self) -> None:
        self._cells = cells.ran()
        self.changing = Changing(_saved_clones)
        # Batch norm writes its statistics unseen by autograd, and the block itself may read them.
        norms = [buffers_by_name(norm) for norm in batch_norms(self.block)]
        held = [buffer for named in norms for buffer in named.values() if buffer is not None]
        self._statistics = list(filter(can_be_filled, held))

    def statistics(self) -> list[Before]:
        """Keep the statistics of batch norms: they change in each call, and are no reason to refuse one."""
        contents = _saved_clones(self._statistics)
        return [
            Before((id(self), str(place)), buffer, version(buffer), content, fresh=False, unseen=True)
            for place, (buffer, content) in enumerate(zip(self._statistics, contents, strict=True))
        ]

    def tensors(self, taken: PythonSnapshot) -> list[tuple[Key, Tensor]]:
        """Those others that the block may change in place, by their places."""
        counted = set(map(id, self._statistics))
        weights = {id(weight) for _, weight in self.python.weights()}
        named = [*self.python.buffers(), *taken.tensors]
        return [(key, tensor) for key, tensor in named if id(tensor) not in counted and id(tensor) not in weights]


class Seen:
    """The state that a block saw at one call.

    Attributes:
        draws: knows whether random numbers have to be looked after.
        compared: whether its replay is to be compared with it.
    """

    def __init__(self, state: BlockState, draws: Draws, inputs: Any) -> None:
        draws.block_begins()
        state.forget_after_cells()
        self._state = state
        self.compared = is_compared(state.calls)
        state.calls += 1
        self._python = [state.python, *_objects_among(inputs)]
        self._taken = [python.take(hold=without_graph) for python in self._python]
        self.draws = draws
        self._standing = RandomState.take(draws.recorded)
        self._weights = [weight for _, weight in state.python.weights()]
        self._looks = list(map(_look, self._weights))
        # What writes them by way of data is not counted by torch. A dry run's weights have nothing to sum up.
        compared = [weight for weight in self._weights if self.compared and can_be_filled(weight.detach())]
        self._summed = [(weight, quick_checksum(weight)) for weight in compared]
        self._tensors = state.changing.before(state.tensors(self._taken[0]))
        self._statistics = state.statistics()

    def returned(self) -> None:
        """The block has run.

        Raises:
            WorkloadError: it changed its weights.
        """
        self._state.changing.after(self._tensors, self.compared)
        if self.compared:
            self._state.counted |= self._taken[0].differing(self._state.python.take())
        summed, self._summed = self._summed, []
        self._check_weights(_OWN_WEIGHTS)
        if changed_since(summed):
            raise cannot(_OWN_WEIGHTS)

    def enter(self) -> None:
        """Let everything be as the block saw it.

        Raises:
            WorkloadError: something that it saw was changed in place since, and not kept.
        """
        self._check_weights("its weights were changed, frozen or unfrozen between forward and backward")
        for taken in self._taken:
            taken.put_back()
        for before in (*self._tensors, *self._statistics):
            if before.was_changed and before.content is None:
                raise cannot("it changed a large tensor that it had left alone before. Train on, and that is copied")
            before.put_back()
        self._standing.put_back()

    def changed(self) -> Iterable[Tensor]:
        """Tensors that a replay changes in place, to let them be as the block saw them, or when it runs."""
        return (before.tensor for before in (*self._tensors, *self._statistics) if before.was_changed)

    def now(self) -> list[PythonSnapshot]:
        """Return the same places as they are now."""
        return [python.take() for python in self._python]

    def _check_weights(self, why: str) -> None:
        if list(map(_look, self._weights)) != self._looks:
            raise cannot(why)


def _look(weight: Tensor) -> tuple[int, bool]:
    """Return what differs once a weight was written in place, frozen or unfrozen."""
    return version(weight), weight.requires_grad


@contextmanager
def undone_afterwards(calls: list[Seen]) -> Iterator[None]:
    """Whatever these calls change inside is put back, bit for bit, and autograd learns nothing of it."""
    calls[0].draws.replay_begins()
    standing = RandomState.take(calls[0].draws.recorded)
    taken = [one for seen in calls for one in seen.now()]
    tensors = list({id(tensor): tensor for seen in calls for tensor in seen.changed()}.values())
    with unversioned(tensors):
        contents = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, content in zip(tensors, contents, strict=True):
                refill(tensor, content)
            for one in taken:
                one.put_back()
            standing.put_back()


def _saved_clones(tensors: list[Tensor]) -> list[Tensor]:
    clones = [tensor.detach().clone() for tensor in tensors]
    if Recorder.current:
        for clone in clones:
            Recorder.current.saved(clone)
    return clones


def _objects_among(inputs: Any) -> list[PythonState]:
    """Return the state of arguments beside tensors and plain values: of a cache of keys and values, say, or a deque."""
    if type(inputs) in PLAIN and not isinstance(inputs, tuple):
        return []
    if isinstance(inputs, tuple) or type(inputs) in (dict, list):  # of which a call keeps copies
        return [found for value in elements_of(inputs) for found in _objects_among(value)]
    return [PythonState(lambda: [inputs])]
