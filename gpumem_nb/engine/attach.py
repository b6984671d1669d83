"""Make a workload of objects that already live on the rank."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ..shared.errors import WorkloadError
from ..shared.workload import Workload
from .losses import as_loss, as_metric

# What accelerate's prepare() makes of an optimizer, a scheduler and a loader, and where it keeps what it was given.
_PREPARED = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "DataLoaderShard": "base_dataloader",
    "DataLoaderDispatcher": "base_dataloader",
}


def attached(names: Mapping[str, str | None], namespace: Mapping[str, Any]) -> Workload:
    """Return the workload that trains exactly the named objects of ``namespace``.

    Args:
        names: variable names under the keys ``model``, ``data`` and optionally ``loss``, ``optimizer``,
            ``scheduler``, ``eval_data`` and ``metric``.
        namespace: the rank's variables.

    Raises:
        WorkloadError: there is no such variable, or what it holds cannot be trained.
    """
    found = {role: unprepared(value) for role, value in named(names, namespace).items()}
    if "scheduler" in found and "optimizer" not in found:
        raise WorkloadError("scheduler= also needs optimizer=: name the optimizer that it was built for.")
    metric = None if "metric" not in found else as_metric(found["metric"], str(names["metric"]))
    return Workload(
        name=str(names["model"]),
        model=lambda: found["model"],
        data=lambda: found["data"],
        loss=as_loss(found.get("loss")),
        optimizer=(lambda params: found["optimizer"]) if "optimizer" in found else None,
        scheduler=(lambda optimizer: found["scheduler"]) if "scheduler" in found else None,
        eval_data=None if "eval_data" not in found else lambda: found["eval_data"],
        metric=metric,
    )


def unprepared(value: Any) -> Any:
    """Return the object that accelerate's ``prepare()`` was given; any other value itself."""
    kind = type(value)
    inside = _PREPARED.get(kind.__name__) if kind.__module__.startswith("accelerate.") else None
    return getattr(value, inside) if inside else value


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
