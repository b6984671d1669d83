"""Evaluation on the validation data: each sample once over all ranks, and everything afterwards as it was."""

from __future__ import annotations

import gc
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ...memory.device import Device
from ...shared.errors import WorkloadError
from ...shared.messages import Failure
from ...shared.workload import Workload
from ..data.fetching import to_device
from ..data.handed import may_give_stored
from ..data.held_out import HeldOut, batches_once
from ..link.communicator import Separated, here
from ..link.signals import interruptible
from ..undo.step_undo import ForwardState, ForwardUndo, WrittenByForward
from .ambient import Ambient, autocast
from .failures import failure_of
from .live_model import LiveModel
from .optimizers import may_write
from .own_loss import each_alone
from .parts import as_given, evaluating

PHASE = "evaluation"


class WholeMetric(ABC):
    """A metric that is no mean over samples: it sees what the model gives for all of them together."""

    @abstractmethod
    def part(self, model: Any, batch: Any) -> Any:
        """Return what one micro-batch gives, which can be pickled and lies on the host."""

    @abstractmethod
    def whole(self, ranks: list[list[Any]]) -> Mapping[str, Any]:
        """Return numbers by name from the parts of every rank: rank r saw the samples r, r + ranks, and so on."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of an evaluation, in the words of :class:`~gpumem_nb.shared.messages.Evaluated`."""

    samples: int
    sums: dict[str, float]
    seconds: float
    live_peak_bytes: int


class Evaluator:
    """Evaluates a live model on one rank's share of the validation data.

    Args:
        live: evaluated as it is, under the settings of the moment.
        workload: brings the loss and the metric.
        held_out: the validation data, the same on all ranks.
        rank, size: of this rank, and of all.

    Attributes:
        held_out: see above.
        length: samples of the validation data.
        changed: what the latest evaluation changed, and put back: the name of something, or nothing.
    """

    def __init__(
        self, live: LiveModel, workload: Workload, held_out: HeldOut, device: Device, rank: int, size: int
    ) -> None:
        self._live = live
        self._workload = workload
        self.held_out = held_out
        self.length = len(held_out)
        metric = as_given(workload.metric)
        self._metric = (metric.to(device.torch_device),) if isinstance(metric, nn.Module) else ()
        self._look_after(live.loss)
        self._written = WrittenByForward()
        self._device = device
        self._rank, self._size = rank, size
        self._samples, self._sums, self._parts = 0, dict[str, float](), b""
        self.changed = ""

    def run(self, failure: Failure | None) -> tuple[Found | None, Failure | None]:
        """Evaluate, all ranks together: what this rank found, unless one of them failed, and why if it was this one.

        No rank waits for another before its own share is done; then they vote, so no rank goes on without the others. A
        rank that brings a ``failure`` only votes.
        """
        began_s = time.perf_counter()
        self._device.reset_peak()
        failed, failure = self._done(self._see_share, failure)
        if not failed and isinstance(self._workload.metric, WholeMetric):
            failed, failure = self._done(self._see_all, None)
        self._parts = b""
        if failed:
            return None, failure
        seconds, peak_bytes = time.perf_counter() - began_s, self._device.reading().live_peak_bytes
        return Found(self._samples, self._sums, seconds, peak_bytes), None

    def _done(self, work: Callable[[], None], failure: Failure | None) -> tuple[bool, Failure | None]:
        """Work unless there is a ``failure``; returns whether any rank failed by then, and why if it was this one."""
        ambient = Ambient()
        try:
            here().check()
            if failure is None:
                work()
        except BaseException as error:  # a rank that left without a vote would keep the others waiting
            failure = self._failure(error)
            self._live.recomputing.abandon()
            with self._device.exempt():
                ambient.restore()
            gc.collect()
        try:
            return here().any_rank(failure is not None, PHASE), failure
        except Separated as error:
            return True, failure or self._failure(error)

    def _see_share(self) -> None:
        if self._live.loss is not self._loss:  # a knob has put another one in its place
            self._look_after(self._live.loss)
        around = left_as_it_was(self._modules(), self._forward, self._live, self._written)
        with around as changed, interruptible():
            self._sums, self._samples, parts = self._sum_up()
            self._parts = pickle.dumps(parts)
        self.changed = changed[0]

    def _see_all(self) -> None:
        """Compute on every rank what takes the parts of all of them."""
        assert isinstance(self._workload.metric, WholeMetric)
        with self._device.exempt():
            ranks = [pickle.loads(parts) for parts in here().of_each(self._parts, f"{PHASE} of all samples")]
        with interruptible():
            numbers = _named_numbers(self._workload.metric.whole(ranks), self._workload.metric)
        if self._samples:  # each counts for this rank's samples, so the mean of all ranks is the number itself
            self._sums |= {name: float(number) * self._samples for name, number in numbers.items()}

    def _look_after(self, loss: Callable[[Any, Any], Any]) -> None:
        self._loss, self._forward = loss, ForwardState((*self._live.parts.named.values(), *self._metric), loss)

    def _modules(self) -> Iterator[nn.Module]:
        """Everything that takes part, a metric that is a module included."""
        yield from self._live.parts.modules()
        for metric in self._metric:
            yield from metric.modules()

    def _sum_up(self) -> tuple[dict[str, float], int, list[Any]]:
        """Return the sums of all numbers over this rank's samples, how many these are, and the parts of a metric."""
        settings, device = self._live.settings, self._device.torch_device
        sums: dict[str, Any] = {}
        samples, parts, metric = 0, list[Any](), self._workload.metric
        data = self.held_out
        share = batches_once(data.dataset, data.collate, self._rank, self._size, settings.batch_size)
        stored = may_give_stored(data.collate)
        with torch.no_grad():
            each_alone(self._live.loss)  # one that divides by the tokens of a step still has those of the last one
            for batch, count in share:
                with autocast(settings.precision, device.type):
                    batch = to_device(batch, device, copy=stored)
                    found = self._numbers(batch)
                    parts += [metric.part(self._live.model, batch)] if isinstance(metric, WholeMetric) else []
                if samples and found.keys() != sums.keys():
                    raise WorkloadError(
                        f"The metric gave {_named(found)} for one micro-batch and {_named(sums)} for another. It must "
                        "give the same names each time."
                    )
                # On the device, in fp64: asking for a number would wait for it.
                sums = {name: sums.get(name, 0.0) + number * count for name, number in found.items()}
                samples += count
        return {name: float(number) for name, number in sums.items()}, samples, parts

    def _numbers(self, batch: Any) -> dict[str, Any]:
        """Loss and metric of one micro-batch by name."""
        model, metric = self._live.model, self._workload.metric
        with self._live.recomputing.head_on():
            loss = {"loss": _number(self._live.loss(model, batch), "loss")}
        if metric is None or isinstance(metric, WholeMetric):
            return loss
        return loss | _named_numbers(metric(model, batch), metric)

    def _failure(self, error: BaseException) -> Failure:
        return failure_of(error, self._rank, PHASE, self._live.model, (), self._device)


@contextmanager
def left_as_it_was(
    modules: Iterable[nn.Module], forward: ForwardState, live: LiveModel, written: WrittenByForward
) -> Iterator[list[str]]:
    """All of these in eval mode inside; modes, weights, buffers, what forward keeps and random numbers as before.

    Gives a list that gets the name of something that was otherwise in the end, or an empty one.
    """
    kept = written.before(may_write(live.optimizer), live.parts.parameters(), copy=True)
    before, changed = ForwardUndo(forward, kept), list[str]()
    try:
        with evaluating(modules):
            yield changed
        changed.append("a weight" if written.after(kept) else before.changed())
    finally:
        before.undo()


def _named_numbers(given: Any, metric: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        given = {getattr(metric, "__name__", "metric").replace("<lambda>", "metric"): given}
    if "loss" in given:
        raise WorkloadError("The metric may not call a number 'loss', which is the loss itself. Rename it.")
    return {str(name): _number(value, f"metric {name!r}") for name, value in given.items()}


def _number(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().double().reshape(())
    if isinstance(value, Real):  # NumPy's numbers too
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise WorkloadError(
        f"The {what} must be one number for a micro-batch; it is a {type(value).__name__}{shape}. Take its mean, for "
        "example: .mean()."
    )


def _named(numbers: Mapping[str, Any]) -> str:
    return ", ".join(name for name in numbers if name != "loss") or "nothing"
