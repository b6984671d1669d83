"""Make a workload of objects that already live on the rank."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..shared.errors import WorkloadError
from ..shared.workload import Workload


def attached(names: Mapping[str, str | None], namespace: Mapping[str, Any]) -> Workload:
    """The workload that trains exactly the named objects of ``namespace``.

    Args:
        names: variable names under the keys ``model``, ``data`` and optionally ``loss``, ``optimizer``, ``eval_data``
            and ``metric``.
        namespace: the rank's variables.
    """
    found = {role: _look_up(role, name, namespace) for role, name in names.items() if name is not None}
    optimizer = found.get("optimizer")
    metric = None if "metric" not in found else _as_metric(found["metric"], str(names["metric"]))
    return Workload(
        name=str(names["model"]),
        model=lambda: found["model"],
        data=lambda: found["data"],
        loss=_as_loss(found.get("loss")),
        optimizer=None if optimizer is None else lambda params: optimizer,
        eval_data=None if "eval_data" not in found else lambda: found["eval_data"],
        metric=metric,
    )


def _look_up(role: str, name: str, namespace: Mapping[str, Any]) -> Any:
    if name in namespace:
        return namespace[name]
    close = difflib.get_close_matches(name, namespace, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Define it in a %%hvd cell."
    raise WorkloadError(f"{role}={name}: there is no variable {name!r} on the ranks. {hint}")


def _as_loss(loss: Any) -> Callable[[Any, Any], Tensor]:
    """``loss(model, batch)`` from what people have.

    A function whose first parameter is called ``model`` is used as it is. Any other callable is a criterion, called as
    ``criterion(model(inputs), targets)``. Without one the model must return its own loss, as Hugging Face models do.
    """
    return _models_own_loss if loss is None else _of_batch(loss, "loss")


def _as_metric(metric: Any, name: str) -> Callable[[Any, Any], Any]:
    """``metric(model, batch)`` from what people have, as for losses; a number alone is called ``name``."""
    of_batch = _of_batch(metric, "metric")

    def named(model: Any, batch: Any) -> Any:
        given = of_batch(model, batch)
        return given if isinstance(given, Mapping) else {name: given}

    return named


def _of_batch(function: Any, what: str) -> Callable[[Any, Any], Any]:
    if not callable(function):
        raise WorkloadError(f"The {what} must be callable; this is a {type(function).__name__}.")
    if not isinstance(function, nn.Module) and _first_parameter(function) == "model":
        return function  # type: ignore[no-any-return]

    def criterion(model: Any, batch: Any) -> Any:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            needs = "A criterion" if what == "loss" else f"A {what} of outputs and targets"
            raise WorkloadError(
                f"{needs} needs samples of (input, target); this dataset gives something else. "
                f"Write the {what} as a function {what}(model, batch) instead."
            )
        inputs, targets = batch
        return function(model(inputs), targets)

    criterion.criterion = function  # type: ignore[attr-defined]  # its own weights are trained too
    return criterion


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except ValueError:
        return ""


def _models_own_loss(model: Any, batch: Any) -> Any:
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise WorkloadError(
            "No loss was named and the model returned none. Name one (loss=...), or give the model its labels."
        )
    return loss
