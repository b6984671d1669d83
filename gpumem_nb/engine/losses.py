"""``loss(model, batch)`` from what people have: such a function, a criterion, or a model that returns its own loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..shared.errors import WorkloadError
from .step.own_loss import OwnLoss
from .step.parts import as_given
from .undo.step_undo import ForwardState, ForwardUndo

_MODELS = ("m", "net", "network", "module")  # what people call the first parameter of loss(model, batch)
_NAMED = {"loss": "A criterion", "metric": "A metric of outputs and targets"}


def as_loss(loss: Any) -> Callable[[Any, Any], Any]:
    """``loss(model, batch)`` from a function, a criterion or nothing.

    A function whose first parameter is called ``model`` is used as it is, and what comes with torch is a criterion,
    called as ``criterion(model(inputs), targets)``. What any other callable is shows when it is called first. Without
    one the model must return its own loss, as Hugging Face models do.

    Raises:
        WorkloadError: not callable.
    """
    return OwnLoss() if loss is None else _of_batch(loss, "loss")


def as_metric(metric: Any, name: str) -> Callable[[Any, Any], Any]:
    """``metric(model, batch)`` from what people have, as for losses; a number alone is called ``name``.

    Raises:
        WorkloadError: not callable.
    """
    of_batch = _of_batch(metric, "metric")

    def named(model: Any, batch: Any) -> Any:
        given = of_batch(model, batch)
        return given if isinstance(given, Mapping) else {name: given}

    named.criterion = as_given(of_batch)  # type: ignore[attr-defined]  # what was attached
    named.of_batch = of_batch  # type: ignore[attr-defined]
    return named


def takes(function: Any) -> str:
    """Return how an attached loss or metric is called: with ``outputs`` and targets, or the model and a ``batch``.

    ``model`` for a model that returns its own loss, ``unknown`` for a callable that was not called yet.
    """
    function = getattr(function, "of_batch", function)
    if isinstance(function, OwnLoss):
        return "model"
    if isinstance(function, LossOfUnknownForm):
        return "unknown" if function.chosen is None else takes(function.chosen)
    return "outputs" if isinstance(function, Criterion) else "batch"


def _of_batch(function: Any, what: str) -> Callable[[Any, Any], Any]:
    if not callable(function):
        raise WorkloadError(f"The {what} must be callable; this is a {type(function).__name__}.")
    if not isinstance(function, nn.Module) and _first_parameter(function) == "model":
        return function  # type: ignore[no-any-return]
    return Criterion(function, what) if _module_of(function).startswith("torch.") else LossOfUnknownForm(function, what)


class Criterion:
    """A criterion of outputs and targets, as ``loss(model, batch)``.

    Attributes:
        criterion: what was given; the weights of a module are trained too.
    """

    def __init__(self, criterion: Callable[..., Any], what: str = "loss") -> None:
        self.criterion = criterion
        self._what = what

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch of inputs and targets."""
        if not _is_pair(batch):
            raise WorkloadError(
                f"{_NAMED[self._what]} needs samples of (input, target); this dataset gives something else. "
                f"Write the {self._what} as a function {self._what}(model, batch) instead."
            )
        inputs, targets = batch
        return self.criterion(model(inputs), targets)


class LossOfUnknownForm:
    """A callable that takes ``(model, batch)`` or ``(outputs, targets)``, whatever it calls them.

    The first call shows which: given the model and the batch, what computes a loss of those uses the model, while a
    criterion, which wants tensors, fails or returns none before it does.

    Attributes:
        criterion: what was given; the weights of a module are trained too.
        chosen: what it showed to be; ``None`` before it was called.
    """

    def __init__(self, loss: Callable[..., Any], what: str = "loss") -> None:
        self.criterion = loss
        self._what = what
        self.chosen: Callable[[Any, Any], Any] | None = None

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch."""
        if self.chosen is None and not _is_pair(batch):
            self.chosen = self.criterion
        if self.chosen:
            return self.chosen(model, batch)
        parts = [self.criterion] if isinstance(self.criterion, nn.Module) else []
        before = ForwardUndo(ForwardState(parts, self.criterion))
        reached: _Reached | None = None  # where it failed
        with _calls_into(model) as called:
            try:
                result = self.criterion(model, batch)
            except (torch.OutOfMemoryError, NameError, ImportError):  # which come whatever it is given
                raise
            except Exception as error:  # not kept: with its frames it would be a circle around the batch
                if called:
                    raise
                reached = _reached(error)
        if reached is None and (called or isinstance(result, Tensor)):
            self.chosen = self.criterion
            return result
        before.undo()  # what a criterion had counted or drawn before it failed
        as_criterion, misread = Criterion(self.criterion, self._what), False
        try:
            result = as_criterion(model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            misread = reached is not None and self._is_misread(reached, _reached(error)[1:])
            if not misread:
                raise
        if misread:  # it got further with the model and the batch, so what stopped it there is its own error
            before.undo()
            return self.criterion(model, batch)
        self.chosen = as_criterion
        return result

    def _is_misread(self, given_model: _Reached, given_outputs: _Reached) -> bool:
        """Return whether a callable that failed both ways takes model and batch: it got further with these."""
        for (code, first), (other, second) in zip(given_model, given_outputs, strict=False):
            if code is not other:  # what failed the second time may be the model, before the criterion was called
                return False
            if first != second:
                return first > second
        return _first_parameter(self.criterion) in _MODELS


_Reached = list[tuple[CodeType, int]]


def _reached(error: Exception) -> _Reached:
    """Return how far code got that raised this, frame by frame, without the frame that caught it."""
    trace, reached = error.__traceback__, _Reached()
    while trace := trace and trace.tb_next:
        reached.append((trace.tb_frame.f_code, trace.tb_lasti))
    return reached


@contextmanager
def _calls_into(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules of the model that are called inside."""
    parts, called = set(model.modules()), list[nn.Module]()

    def note(module: nn.Module, args: Any) -> None:
        if module in parts:
            called.append(module)

    hook = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        hook.remove()


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and len(batch) == 2


def _module_of(loss: Any) -> str:
    return str(getattr(loss, "__module__", None) or type(loss).__module__) + "."


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # of what is written in C
        return ""
