"""Weights that lie in bf16 in place of fp32: ``precision=bf16_weights``.

Matrices, tables and kernels have all but some thousandths of a model's bytes. Biases and the weights of norms, which
have one dimension, stay in fp32, as do statistics and other buffers: so a forward under autocast meets what it meets
with ``precision=bf16``, and layers that compute with types of their own work.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from ...internals.torch_internals import address
from ...shared.errors import WorkloadError
from ...shared.knobs.step import has_narrow_weights
from ...shared.settings import Settings
from ..copies import host_copy, same
from ..link.communicator import here
from .parts import Parts
from .pieces import BF16_WEIGHTS, why_not

_STAY = (nn.RNNBase, nn.Bilinear, ParametrizationList)  # autocast does not bring all of their inputs to one type
_NONE = (
    "precision=bf16_weights finds no weight to hold in bf16: it takes those in fp32 with two or more dimensions, but "
    "for recurrent and bilinear layers, parametrized weights, tables with sparse gradients and weights that share "
    "memory. Use precision=bf16."
)


def to_narrow(parts: Parts, some: bool = True) -> list[Tensor]:
    """Return the weights in fp32 that can lie in bf16 instead; with ``some`` there must be one.

    Raises:
        WorkloadError: there is none.
    """
    weights = list(parts.parameters())
    buffers = (buffer for _, buffer in parts.named_buffers())
    held = Counter(address(one.untyped_storage()) for one in chain(weights, buffers) if one.layout is torch.strided)
    stay = {id(weight) for module in parts.modules() if _stays(module) for weight in module.parameters(recurse=False)}
    found = [
        weight
        for weight in weights
        if weight.dtype is torch.float32
        and weight.dim() > 1
        and weight.layout is torch.strided
        and held[address(weight.untyped_storage())] == 1
        and id(weight) not in stay
    ]
    if some and not found:
        raise WorkloadError(_NONE)
    return found


def _stays(module: nn.Module) -> bool:
    return isinstance(module, _STAY) or getattr(module, "sparse", 0) is True


def narrow_weight(weight: Tensor) -> None:
    """Let a weight lie in bf16, rounded to nearest; it stays the same object."""
    weight.data = weight.data.to(torch.bfloat16)


def widen_weight(weight: Tensor) -> None:
    """Let a weight lie in fp32: the same number."""
    weight.data = weight.data.float()


class Narrowed:
    """The weights of one rank that lie in bf16 at present.

    What they were in fp32 is kept in host memory until a step is done with them: a flip that is tried, or that is taken
    back because no step fits under it, leaves them as they were, to the bit.

    Args:
        parts: the modules whose weights these are.
        exempt: gives a context in which the device's limit is not enforced.
    """

    def __init__(self, parts: Parts, exempt: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._parts, self._exempt = parts, exempt
        self._narrow: dict[int, weakref.ref[Tensor]] = {}
        self._before: dict[int, Tensor] = {}
        self._agreed = False

    @property
    def ids(self) -> set[int]:
        """Return the ids of narrow weights."""
        return set(self._narrow)

    def follow(self, settings: Settings) -> None:
        """Bring weights to the type that settings ask for. All ranks call it together, and all do it or none.

        Raises:
            WorkloadError: there is no weight to narrow.
        """
        wanted, failure = has_narrow_weights(settings), None
        if wanted == self._agreed:
            return
        try:
            self.bring(wanted)
        except Exception as error:
            failure = error
        try:
            undone = here().any_rank(failure is not None, "types of weights")
        except BaseException:  # the ranks came apart: all of them come here again
            self.bring(self._agreed)
            raise
        if undone:
            self.bring(self._agreed)
            raise failure or WorkloadError("another rank could not bring its weights to the type of this precision")
        self._agreed = wanted

    def bring(self, narrowed: bool) -> None:
        """Let what can be narrow be so, or nothing, on this rank."""
        if not (narrowed or self._narrow):
            return  # and ask nothing of a device that may be gone
        with self._exempt():
            self._widen_shared()
            if narrowed:
                self._narrow_all()
            else:
                for weight in self._now():
                    self._widen(weight)
                self._narrow, self._before = {}, {}

    def meet_new(self) -> None:
        """Narrow what came into the model meanwhile, too."""
        if self._agreed:
            self.bring(True)

    def settle(self) -> None:
        """The weights are what a step has made of them, or a file: what they were before does not come back."""
        self._before.clear()

    def check(self, optimizer: Callable[[], Optimizer]) -> None:
        """Refuse an optimizer that cannot update narrow weights, if there are some; raises ``WorkloadError``."""
        if self._narrow and (problem := why_not(optimizer(), BF16_WEIGHTS)):
            raise WorkloadError(problem)

    def weights(self) -> list[Tensor]:
        """Return those that are narrow now."""
        return list(filter(self._is_narrow, self._now()))

    def under(self, settings: Settings) -> Iterator[tuple[str, Tensor]]:
        """Yield what stands for each weight under these settings, without memory, and its name."""
        wanted = has_narrow_weights(settings)
        able = set(map(id, to_narrow(self._parts, some=False))) if wanted else set()
        for name, weight in self._parts.named_parameters():
            is_narrow, dtype = self._is_narrow(weight), weight.dtype
            if wanted and (is_narrow or id(weight) in able):
                dtype = torch.bfloat16
            elif is_narrow:
                dtype = torch.float32
            yield name, torch.empty_like(weight, dtype=dtype, device="meta")

    def places(self, weights: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the places of those of these weights that are narrow."""
        return tuple(place for place, weight in enumerate(weights) if self._is_narrow(weight))

    def _narrow_all(self) -> None:
        for weight in to_narrow(self._parts, some=not self._narrow):
            self._before[id(weight)] = host_copy(weight)
            narrow_weight(weight)
            self._narrow[id(weight)] = weakref.ref(weight)

    def _now(self) -> list[Tensor]:
        return [weight for ref in self._narrow.values() if (weight := ref()) is not None]

    def _is_narrow(self, weight: Tensor) -> bool:
        ref = self._narrow.get(id(weight))
        return ref is not None and ref() is weight and weight.dtype is torch.bfloat16

    def _widen_shared(self) -> None:
        """Widen together those that a cell has made share memory: they go on sharing it, and no update is lost."""
        sharing = defaultdict[int, list[Tensor]](list)
        for weight in filter(self._is_narrow, self._now()):
            sharing[address(weight.untyped_storage())].append(weight)
        for weights in sharing.values():
            if len(weights) > 1:
                storage = weights[0].untyped_storage()
                wide = torch.empty(0, dtype=torch.bfloat16, device=weights[0].device).set_(storage).float()
                for weight in weights:
                    del self._narrow[id(weight)]
                    self._before.pop(id(weight), None)
                    weight.data = wide.as_strided(weight.shape, weight.stride(), weight.storage_offset())

    def _widen(self, weight: Tensor) -> None:
        if weight.dtype is not torch.bfloat16:  # a cell has changed it
            return
        before, now = self._before.get(id(weight)), weight.detach()
        if before is None or before.shape != now.shape or not same(before.to(torch.bfloat16), now.cpu()):
            widen_weight(weight)
        else:
            weight.data = torch.empty_like(now, dtype=torch.float32).copy_(before)
