"""Facts about the gradients of a step: finite or not, which weights had one, and how noisy they are.

The noise scale says how large a batch still pays. McCandlish et al. 2018 (arXiv 1812.06162): B_simple = tr(Sigma) /
|G|^2, the variance of single samples' gradients over the square of the true one. Far below that many samples a step,
twice as many do almost the work of two steps; far above it they add little: it is the critical batch. Both parts follow
from squared norms of gradients of two batch sizes (appendix A.1): each rank's own, and the average of all. Each is
averaged over steps by itself, because the mean of their ratio would be another number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...internals.torch_foreach_internals import norms_of, note_nonfinite
from ...internals.torch_internals import address, version
from ...shared.messages import Failure
from .parts import Parts


class FiniteCheck:
    """Whether the gradients of this rank are finite; they are looked at before they leave for other ranks.

    What is needed for it is made ahead of time: looking takes no memory, but of sparse gradients and such.

    Args:
        device: where the answer lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def begin(self) -> None:
        """A step begins: nothing is known."""
        self._found.zero_()

    def look(self, gradients: Iterable[Tensor | None]) -> None:
        """Look at these, where there are any, without waiting for the device. None of them may be under way."""
        there = [gradient for gradient in gradients if gradient is not None]
        try:
            note_nonfinite(there, self._found, self._one)
        except RuntimeError:  # not for this type or layout, or on another device
            for gradient in there:
                self._found.logical_or_((~torch.isfinite(values_of(gradient))).any().to(self._found.device))

    def nonfinite(self, loss: Tensor, scaler: GradScaler | None) -> Tensor:
        """Return whether the loss or a gradient is not finite (1, else 0), on the device, without waiting for it.

        Gradients of a loss that a ``scaler`` has scaled may overflow: it skips their updates and halves its scale. Once
        that is below 1 it is not the scale that makes them infinite.
        """
        if scaler:
            self._found *= scaler.scale(torch.ones_like(self._found)) < 1
        self.look([loss])
        return self._found

    def failure(
        self,
        rank: int,
        params: Iterable[Tensor],
        parts: Parts,
        norm: Callable[[Tensor], Tensor | None] = lambda _: None,
    ) -> Failure | None:
        """Return this rank's failure because of its gradients; ``None`` if all are finite. Waits for the device.

        A bucket that was sent may hold the average by now: not finite in one is not finite in the other. Of gradients
        that are not whole any more ``norm`` gives that of the average.
        """
        if not self._found:
            return None
        for param in params:
            gradient = param.grad if (of_whole := norm(param)) is None else of_whole
            if gradient is not None and not torch.isfinite(values := values_of(gradient)).all():
                names = {id(param): name for name, param in parts.named_parameters()}
                message = (
                    f"the gradient of {names[id(param)]} became {values.norm().item()}, though the loss is finite. "
                    "Look for a function without a derivative there (sqrt, norm or log of 0), lower learning_rate or "
                    "set clip_norm"
                )
                return Failure(rank, "error", "backward", message)
        return None


class NewGradients:
    """Which weights get a gradient from now on: those that have another one then, or one that was added to.

    Seen from the gradients themselves, when it is asked: a hook on every weight would cost each micro-batch more.
    """

    def __init__(self, params: Sequence[Tensor], marks: Sequence[object] | None = None) -> None:
        """Begin with the gradients that there are, by their ``marks``; without any there is none."""
        self._params, self._before = params, marks

    @classmethod
    def beside(cls, params: Sequence[Tensor]) -> NewGradients:
        """Begin with the gradients that these weights have now."""
        return cls(params, marks(params))

    @classmethod
    def from_none(cls, params: Sequence[Tensor]) -> NewGradients:
        """Let go of the gradients that these weights have, and begin."""
        new = cls(params)
        for param in new.weights():
            param.grad = None
        return new

    def weights(self) -> list[Tensor]:
        """Those that got one so far."""
        if self._before is None:
            return [param for param in self._params if param.grad is not None]
        pairs = zip(self._params, self._before, marks(self._params), strict=True)
        return [param for param, before, now in pairs if before != now]


def marks(params: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """Return by what it shows later that a gradient of these weights was changed, or is another one."""
    return [(address(grad), version(grad)) if (grad := param.grad) is not None else None for param in params]


def values_of(gradient: Tensor) -> Tensor:
    """Of a sparse gradient those that it has, else the gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class GradientsHad:
    """Facts about the steps so far.

    Attributes:
        any_step: whether there was one.
        partial: whether a weight ever had a gradient on some ranks only.
    """

    def __init__(self) -> None:
        self.any_step = self.partial = False
        self._had: set[int] = set()
        self._lacked: set[int] = set()  # on all ranks, and were not frozen
        self._latest: Collection[int] | None = None
        self._params: Sequence[Tensor] = ()  # of which those had one in some step that are there
        self._there: Sequence[bool] = ()

    def note(self, params: Sequence[Tensor], absent: Collection[int], partial: bool) -> None:
        """A step counted in which the ``absent`` ones of these weights, by id, had a gradient on no rank."""
        self.any_step, self.partial = True, self.partial or partial
        if absent is self._latest:  # as in the step before
            return
        self._latest = absent
        self._had.update(id(param) for param in params if id(param) not in absent)
        self._lacked.update(id(param) for param in params if id(param) in absent and param.requires_grad)

    def is_news(self, params: Sequence[Tensor], there: Sequence[bool]) -> bool:
        """Return whether one of these weights, ``there`` are those with a gradient now, had none in any step."""
        if params is self._params and there == self._there:
            return False
        news = not self._had.issuperset(map(id, compress(params, there)))
        self._params, self._there = params, () if news else there
        return news

    def never(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had none in any step, though they were not frozen, and are not."""
        lacked = (param for param in params if param.requires_grad and id(param) in self._lacked)
        return [param for param in lacked if id(param) not in self._had]

    def sometimes(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had one in some steps, and in others on no rank."""
        return [param for param in params if id(param) in self._had and id(param) in self._lacked]


FROZEN = 1024  # what a frozen weight counts for where a gradient counts for 1; there are fewer ranks than that


class Presence:
    """Which weights have a gradient on which ranks, as all of them learn it from the sum of a code for each weight.

    Attributes:
        frozen: of each weight, whether it is frozen on all ranks.
        partial: those with a gradient on some ranks only, in the latest step.
        absent: the ids of those with a gradient on none.
        came_back: whether one that was among these in the step before it has one again, for the first time.

    Args:
        params: in the same order on all ranks.
        ranks: how many there are.
    """

    def __init__(self, params: Sequence[Tensor], ranks: int) -> None:
        self._params, self._ranks = params, ranks
        self.frozen = [not param.requires_grad for param in params]
        self.partial: tuple[Tensor, ...] = ()
        self.absent: set[int] = set()
        self.came_back = False
        self._now_and_then: set[int] = set()
        self._heard: list[float] = []
        self._told: tuple[tuple[list[bool], list[bool]], Tensor] | None = None

    def codes(self, there: list[bool], device: torch.device) -> Tensor:
        """Return this rank's codes; ``there`` says which weights have a gradient."""
        facts = [param.requires_grad for param in self._params], there
        if self._told is None or self._told[0] != facts:  # fetching it from the host would wait for the device
            codes = [FROZEN * (not trained) + has_one for trained, has_one in zip(*facts, strict=True)]
            self._told = facts, torch.tensor(codes, dtype=torch.float32, device=device)
        return self._told[1]

    def complete(self, params: Iterable[Tensor], ready: Collection[int]) -> bool:
        """Return whether all of these are ``ready``, by id, but those that seem to get no gradient on any rank.

        They had none the last time, and one that had none and one by turns is not among them.
        """
        expected = self.absent - self._now_and_then
        return all(id(param) in ready or id(param) in expected for param in params)

    def learn(self, means: list[float], grouped: Sequence[bool]) -> bool:
        """Take in the means of all ranks' codes; returns whether a weight that was ``grouped`` out has a gradient."""
        self.came_back = False
        if means == self._heard:  # nothing was learned since from which other buckets were made
            return False
        sums = [round(number * self._ranks) for number in means]
        there = [total % FROZEN for total in sums]
        self.frozen = [total // FROZEN == self._ranks for total in sums]
        missed = any(count and out for count, out in zip(there, grouped, strict=True))
        self.partial = tuple(param for param, count in zip(self._params, there, strict=True) if 0 < count < self._ranks)
        absent = {id(param) for param, count in zip(self._params, there, strict=True) if not count}
        back = self.absent - absent - self._now_and_then
        self.came_back, self._now_and_then, self.absent = bool(back), self._now_and_then | back, absent
        self._heard = [] if missed else means
        return missed


EVERY_STEPS = 20
_OFFSET = 10  # away from the steps whose memory is recorded
_MEMORY = 0.95  # of the averages, from one measured step to the next


def is_measured(step: int, ranks: int) -> bool:
    """Return whether this step is; the same on all ranks. One rank by itself has one batch size only."""
    return ranks > 1 and step % EVERY_STEPS == _OFFSET


def square_of(params: Iterable[Tensor]) -> Tensor:
    """Return the squared 2-norm of these weights' gradients (one type and device) in fp32, without waiting for it."""
    there = list(params)
    gradients = [values_of(param.grad) for param in there if param.grad is not None]
    norms = norms_of([gradient for gradient in gradients if gradient.numel()])
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=there[0].device)
    return torch.stack(norms).float().square().sum()


class NoiseScale:
    """The estimate of one training, over its latest steps. The same on all ranks.

    Args:
        ranks: how many gradients an average is of.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._noise = self._signal = 0.0

    def add(self, own: float, average: float, samples: int, loss_scale: float = 1.0) -> float | None:
        """Take a step in; returns the noise scale in samples, ``None`` where noise alone is seen.

        Args:
            own: the squared norm of a rank's gradient, the mean of all ranks.
            average: the squared norm of the averaged gradient.
            samples: that one rank's gradient is the mean of.
            loss_scale: what these gradients are multiplied with.
        """
        if not (math.isfinite(own) and math.isfinite(average)) or own <= 0:
            return None
        own, average = own / loss_scale**2, average / loss_scale**2
        large = samples * self._ranks
        signal = (large * average - samples * own) / (large - samples)
        noise = (own - average) / (1 / samples - 1 / large)
        self._signal = _MEMORY * self._signal + (1 - _MEMORY) * signal
        self._noise = _MEMORY * self._noise + (1 - _MEMORY) * noise
        return self._noise / self._signal if self._signal > 0 and self._noise >= 0 else None
