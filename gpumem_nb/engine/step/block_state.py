"""The state that a block of a model saw when it was called, so that it can run again from there without a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...internals.torch_internals import batch_norms, buffers_by_name, unversioned, version
from ...memory.ledger.recorder import Recorder
from .. import cells
from ..random_state import RandomState
from ..undo.changing import Changing, Key, can_be_filled
from ..undo.python_state import PythonSnapshot, PythonState
from ..undo.reachable import CONTAINERS, PLAIN
from .cannot import cannot
from .draws import Draws
from .fingerprint import is_compared
from .held import without_graph


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
            names = self.changing.names  # an export may ask for them before the next step
            self.python.let_go()
            self._begin()
            self.changing.names = names

    def _begin(self) -> None:
        self._cells = cells.ran()
        self.changing = Changing(_saved_clones)
        # Batch norm reads its statistics in evaluation only and writes them in training only, unseen by autograd.
        norms = [buffers_by_name(norm) for norm in batch_norms(self.block)]
        self.statistics = [buffer for named in norms for buffer in named.values() if buffer is not None]

    def tensors(self, taken: PythonSnapshot) -> list[tuple[Key, Tensor]]:
        """Those that the block may change in place, by their places."""
        counted = {id(buffer) for buffer in self.statistics}
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
        self._versions = [version(weight) for weight in self._weights]
        self._tensors = state.changing.before(state.tensors(self._taken[0]))

    def returned(self) -> None:
        """The block has run.

        Raises:
            WorkloadError: it changed its weights.
        """
        self._state.changing.after(self._tensors, self.compared)
        if self.compared:
            self._state.counted |= self._taken[0].differing(self._state.python.take())
        self._check_weights("it changes its own weights in forward")

    def enter(self) -> None:
        """Let everything be as the block saw it.

        Raises:
            WorkloadError: something that it saw was changed in place since, and not kept.
        """
        self._check_weights("its weights were changed between forward and backward")
        for taken in self._taken:
            taken.put_back()
        for before in self._tensors:
            if before.was_changed and before.content is None:
                raise cannot("it changed a large tensor that it had left alone before. Train on, and that is copied")
            before.put_back()
        self._standing.put_back()

    def changed(self) -> Iterable[Tensor]:
        """Tensors that a replay changes in place, to let them be as the block saw them, or when it runs."""
        put_back = (before.tensor for before in self._tensors if before.was_changed)
        return (*put_back, *filter(can_be_filled, self._state.statistics))

    def now(self) -> list[PythonSnapshot]:
        """Return the same places as they are now."""
        return [python.take() for python in self._python]

    def _check_weights(self, why: str) -> None:
        if [version(weight) for weight in self._weights] != self._versions:
            raise cannot(why)


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
                tensor.data.copy_(content)
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
    """Return the state of arguments that are neither tensors nor plain values, such as a cache of keys and values."""
    if type(inputs) in PLAIN and not isinstance(inputs, tuple):
        return []
    if isinstance(inputs, dict):
        return [found for value in inputs.values() for found in _objects_among(value)]
    if isinstance(inputs, (tuple, *CONTAINERS)):
        return [found for value in inputs for found in _objects_among(value)]
    return [PythonState(lambda: [inputs])]
