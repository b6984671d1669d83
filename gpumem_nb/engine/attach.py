"""Making a workload of objects that already live on the rank, and keeping these objects over a restart."""

from __future__ import annotations

import difflib
import inspect
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..internals.cloudpickle_internals import IntoMain
from ..internals.torch_internals import has_step_hooks
from ..memory.device import Device, opened
from ..shared import snapshot_folder
from ..shared.errors import StateFileError, WorkloadError
from ..shared.units import format_bytes
from ..shared.workload import Workload
from .link.communicator import here
from .packing import TooLarge, at_most
from .step.evaluation import WholeMetric
from .step.optimizers import beside_state, with_inner
from .step.own_loss import OwnLoss
from .step.parts import as_given
from .trainers.adopting import adopt
from .trainers.lightning_module import ModuleMetric
from .trainers.prepared import unprepared
from .undo.step_undo import ForwardState, ForwardUndo


def attached(names: Mapping[str, str | None], namespace: Mapping[str, Any]) -> Workload:
    """Return the workload that trains exactly the named objects of ``namespace``.

    Args:
        names: variable names under the keys ``model``, ``data`` and optionally ``loss``, ``optimizer``,
            ``scheduler``, ``eval_data`` and ``metric``; or under ``trainer``, which brings these.
        namespace: the rank's variables.

    Raises:
        WorkloadError: there is no such variable, or what it holds cannot be trained.
    """
    found = {role: unprepared(value) for role, value in named(names, namespace).items()}
    adopted = None
    if "trainer" in found:
        found, adopted = adopt(found, here().size, opened().torch_device)
    if "scheduler" in found and "optimizer" not in found:
        raise WorkloadError("scheduler= also needs optimizer=: name the optimizer that it was built for.")
    metric = None if "metric" not in found else as_metric(found["metric"], str(names["metric"]))
    return Workload(
        name=type(found["model"]).__name__ if adopted else str(names["model"]),
        model=lambda: found["model"],
        data=lambda: found["data"],
        loss=as_loss(found.get("loss")),
        optimizer=(lambda params: found["optimizer"]) if "optimizer" in found else None,
        scheduler=(lambda optimizer: found["scheduler"]) if "scheduler" in found else None,
        eval_data=None if "eval_data" not in found else lambda: found["eval_data"],
        metric=metric,
        adopted=adopted,
    )


def found_by_cells(names: Mapping[str, str | None]) -> set[str]:
    """Return the names without which cells could not find what is trained: they hold no optimizer of the toolkit's."""
    return set() if names["optimizer"] or names["trainer"] else {"optimizer"}


def named(names: Mapping[str, str | None], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects under these variable names, by what they are named for.

    Raises:
        WorkloadError: there is no such variable.
    """
    return {role: _look_up(role, name, namespace) for role, name in names.items() if name is not None}


def _look_up(role: str, name: str, namespace: Mapping[str, Any]) -> Any:
    if name in namespace:
        return namespace[name]
    if not name.isidentifier():
        raise WorkloadError(f"{role}={name}: name one variable here. Make it in a %%hvd cell: {role} = {name}")
    close = difflib.get_close_matches(name, namespace, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Define it in a %%hvd cell."
    raise WorkloadError(f"{role}={name}: there is no variable {name!r} on the ranks. {hint}")


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
    if isinstance(metric, WholeMetric | ModuleMetric):
        return metric  # type: ignore[return-value]  # a whole metric is asked for its parts instead
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
    if isinstance(function, type):
        name = function.__name__
        raise WorkloadError(f"The {what} is the class {name} and not an object of it: {what} = {name}()")
    if _parameters(function)[1:2] == ["model"]:
        raise WorkloadError(f"The {what} takes the model second. Write it as {what}(model, batch).")
    if not isinstance(function, nn.Module) and _parameters(function)[:1] == ["model"]:
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
        return any(name in _MODELS for name in _parameters(self.criterion)[:1])


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


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of what is written in C
        return []


def to_keep(names: Iterable[str | None], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of these names, and what a person holds where every rank begins with something of its own.

    Attached functions may use it, and would find that of the rank there.
    """
    given = {"rank": here().rank, "size": here().size}
    replaced = [name for name, ours in given.items() if str(variables.get(name, ours)) != str(ours)]
    held, ours = variables.get("device"), opened().torch_device
    replaced += ["device"] * (isinstance(held, str) or (isinstance(held, torch.device) and held != ours))
    return {name: variables[name] for name in (*replaced, *names) if name}


def save_objects(objects: dict[str, Any], path: Path, space: int) -> str:
    """Write ``objects`` (by variable name) to a file in the session's own folder.

    All in one, because an optimizer holds the very parameters of its model; in torch's form, which keeps memory that
    tensors share.

    Returns:
        Empty, or why they cannot be kept: with snapshots more than ``space`` bytes, or not to be pickled.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        if any(isinstance(value, Optimizer) and has_step_hooks(value) for value in objects.values()):
            path.unlink(missing_ok=True)
            return "an optimizer loses its step hooks, and what stands in place of its step, when it is pickled"
        # torch pickles an optimizer without what only this one has.
        beside = {
            name: list(map(beside_state, with_inner(value)))
            for name, value in objects.items()
            if isinstance(value, Optimizer)
        }
        stream = io.BytesIO()
        torch.save((objects, beside), stream, pickle_module=at_most(space), pickle_protocol=pickle.HIGHEST_PROTOCOL)
        path.unlink(missing_ok=True)  # what was attached before
        written = stream.getbuffer()
        if not snapshot_folder.make_room(path.parent, len(written), space):
            return (
                f"they take {format_bytes(len(written))}, more than is left of the {format_bytes(space)} for snapshots"
            )
        partial.write_bytes(written)
        os.replace(partial, path)
    except Exception as error:  # pickling runs the objects' own code
        with suppress(OSError):
            partial.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if isinstance(error, TooLarge):
            return f"they take more than the {format_bytes(space)} for snapshots"
        return f"{type(error).__name__}: {error}"
    return ""


def load_objects(path: Path, device: Device) -> dict[str, Any]:
    """Return the objects that :func:`save_objects` wrote; what lay on rank 0's GPU, or names it, is of this rank's.

    Functions of cells have the variables of cells again, so that what a cell sets later reaches a loss as before.

    The file lies in a folder that its owner alone can write to.

    Raises:
        StateFileError: they cannot be made again.
    """

    ours = device.torch_device

    def place(storage: Any, where: str) -> Any:
        return storage.to(device=ours) if where.startswith("cuda") else storage

    def named(kind: str, *index: int) -> torch.device:
        return ours if kind == "cuda" and index else torch.device(kind, *index)

    class Here(IntoMain):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            return named if found is torch.device else found

    try:
        with device.exempt():
            pickles = SimpleNamespace(__name__="pickle", Unpickler=Here)
            objects, beside = torch.load(path, map_location=place, pickle_module=pickles, weights_only=False)
        if isinstance(held := objects.get("device"), str) and held.startswith("cuda:"):
            objects["device"] = str(ours)
        for name, (own, *of_inner) in beside.items():
            vars(objects[name]).update(own)  # the inner ones among it
            for one, kept in zip(with_inner(objects[name])[1:], of_inner, strict=True):
                vars(one).update(kept)
        return objects  # type: ignore[no-any-return]
    except Exception as error:
        raise StateFileError(
            f"The attached objects could not be brought back ({type(error).__name__}: {error}). "
            "Run their cells again, attach them, and type %hvd_resume."
        ) from None
