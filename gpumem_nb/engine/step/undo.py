"""What a step changes, kept so that a step which one rank cannot finish can be undone on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...internals.torch_internals import forget_scaler
from ..copies import Aside, host_copy, overwrite
from ..random_state import RandomState
from . import optimizers
from .changing import Before, Changing, Key, can_be_filled
from .parts import as_given
from .python_state import PythonState, Taken
from .reachable import Reachable

_PLAIN = (bool, int, float, complex, str, type(None))  # of an optimizer's attributes: a count of its steps, for example
_LARGEST_BYTES = 2**20  # of a tensor that is neither a buffer nor trained, to be copied before it was seen to change


class ForwardUndo:
    """What a forward pass or a hook changes: buffers, batch norm's for example, what Python keeps, random numbers.

    And ``weights``, if they are given.
    """

    def __init__(self, state: ForwardState, weights: KeptWeights | None = None) -> None:
        self._weights = weights
        self._python = state.python.take()
        # On a GPU the copy stays there: fetching it would wait for the device at every step.
        self._buffers = [(b, state.copy(b)) for _, b in state.python.buffers() if can_be_filled(b)]
        self._others = state.others_before(self._python)
        self._random = RandomState.take()

    def undo(self) -> None:
        """Put everything back, bit by bit; what was not there before is dropped."""
        self._python.put_back()
        for before in self._others:
            if before.was_changed:
                before.put_back()
        for buffer, content in self._buffers:
            overwrite(buffer.data, content)
        if self._weights:
            self._weights.put_back()
        self._random.put_back()


class ForwardState:
    """Where somebody's code can change something: in modules, their hooks, functions, and what these reach.

    Args:
        parts: the modules whose weights are trained.
        code: the loss, or hooks around an update.
        copy: of a tensor, to be put back.
    """

    def __init__(
        self, parts: Iterable[nn.Module], *code: Callable[..., Any], copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.copy = copy or _copy
        self._parts = tuple(parts)
        roots = (*self._parts, *code, *map(as_given, code))
        self.python = PythonState(lambda: roots)  # not by way of self: a circle would keep the model
        self._changing = Changing(self.copy, _LARGEST_BYTES)
        self._fresh: list[Before] = []
        self._found_by_python: Reachable | None = None
        self._trained: set[int] = set()
        self._other_weights: list[tuple[Key, Tensor]] = []  # of an average of the model that a hook keeps, for example

    def let_go(self) -> None:
        """Hold nothing until the next step."""
        self.python.let_go()
        self._fresh, self._other_weights, self._found_by_python = [], [], None
        self._changing = Changing(self.copy, _LARGEST_BYTES)

    def others_before(self, taken: Taken) -> list[Before]:
        """What is in tensors that are neither buffers nor trained, as far as it may have to be put back."""
        self._changing.after(self._fresh)
        if self._found_by_python is not self.python.found:
            self._found_by_python = self.python.found
            self._trained = {id(weight) for part in self._parts for weight in part.parameters()}
            self._other_weights = self.python.weights()
        named = chain(taken.tensors, self._other_weights)
        befores = self._changing.before((key, tensor) for key, tensor in named if id(tensor) not in self._trained)
        self._fresh = [before for before in befores if before.fresh]
        return befores


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.is_cuda else host_copy(tensor)


class KeptWeights:
    """Weights, copied to host memory."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        aside = Aside(release=False)
        self._params = [aside.put(param) for param in params]

    @classmethod
    def of_trial(cls, trained: Iterable[Tensor], weights: Iterable[Tensor]) -> KeptWeights:
        """Of all ``weights`` those that forward or update may change, which a trial must not.

        Some models keep an average of what is trained in weights of the same shapes, and bring it up to date in
        forward. Others that are large and not trained, such as those below adapters, are not copied; nor are more bytes
        of the same shapes than are trained, as they are where the last block of many is.
        """
        kept = {id(param): param for param in trained}
        shapes = {param.shape for param in kept.values()}
        frozen = [weight for weight in weights if id(weight) not in kept and can_be_filled(weight)]
        alike = [weight for weight in frozen if weight.shape in shapes and weight.nbytes > _LARGEST_BYTES]
        few = sum(weight.nbytes for weight in alike) <= sum(param.nbytes for param in kept.values())
        small = [weight for weight in frozen if weight.nbytes <= _LARGEST_BYTES]
        return cls([*kept.values(), *small, *(alike if few else ())])

    def put_back(self) -> None:
        """Put everything back, bit by bit."""
        for param in self._params:
            param()


class UpdateUndo:
    """What an update changes: weights, the optimizer's state, and what hooks before it do; copied to host memory."""

    def __init__(self, params: Iterable[Tensor], optimizer: Optimizer, hooks: ForwardUndo | None = None) -> None:
        self._hooks = hooks
        self._weights = KeptWeights(params)
        self._state = KeptState(optimizer, release=False)

    def undo(self) -> None:
        """Put everything back, bit by bit; state that was not there before is dropped."""
        if self._hooks:
            self._hooks.undo()
        self._weights.put_back()
        self._state.restore()
        forget_scaler(self._state.optimizer)


class KeptState:
    """The state of an optimizer in host memory.

    With ``release`` the optimizer gives up its own until :meth:`restore`: it is out of use, but may be wanted back.
    """

    def __init__(self, optimizer: Optimizer, release: bool) -> None:
        self.optimizer = optimizer
        aside = Aside(release)
        self._state = {param: aside.put(values) for param, values in optimizer.state.items()}
        in_place = Aside(release=False)  # the groups stay, and so do rates that are tensors
        self._groups = [
            {name: in_place.put(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._own = {name: value for name, value in vars(optimizer).items() if type(value) in _PLAIN}
        if release:
            optimizer.state.clear()

    def restore(self) -> None:
        """Put state and options back."""
        state = {param: back() for param, back in self._state.items()}
        groups = [{name: back() for name, back in group.items()} for group in self._groups]
        optimizers.put_state(self.optimizer, state, groups)
        vars(self.optimizer).update(self._own)
