"""The ranks begin alike: the same model and optimizer by description, and rank 0's values in them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...shared.errors import WorkloadError, text_of
from ..link.communicator import alike, here
from .live_model import LiveModel
from .optimizer_state import extra_states, from_first
from .parts import Parts


def check_alike(live: LiveModel) -> None:
    """Ask whether all ranks hold the same; all of them call it together.

    Raises:
        WorkloadError: models, optimizers or schedulers differ; raised on all ranks.
    """
    described = {
        "models: names, shapes, types or strides of their weights and buffers differ. Define the model": _tensors(
            live.parts
        ),
        "models: requires_grad of their weights differs. Freeze them": _trained(live.parts),
        "models: layers are in training mode on some and in evaluation mode on others. Call train() and eval()": [
            module.training for module in live.parts.modules()
        ],
        "optimizers: class, groups or options differ. Build the optimizer": _optimizers(live),
        "schedulers: class or position differ. Build the scheduler": _scheduler(live),
    }
    same = alike([zlib.crc32(repr(what).encode()) for what in described.values()], "model")
    for what, agreed in zip(described, same, strict=True):
        if not agreed:
            raise WorkloadError(f"The ranks hold different {what} in the same way on all ranks.")


def take_from_first(live: LiveModel) -> None:
    """Give every rank the weights, buffers, extra state and optimizer state of rank 0; all call it together.

    Raises:
        WorkloadError: what a module or the optimizer keeps besides tensors cannot be sent; raised on all ranks.
    """
    here().broadcast(dict((*live.parts.named_parameters(), *live.parts.named_buffers())))
    _send_extra_states(live.parts)
    if live.own_optimizer:
        live.sharing.agreed(live.own_optimizer).follow_first()


def make_alike(live: LiveModel) -> None:
    """Give every rank all that rank 0 holds of what is trained, whatever cells did to it; all call it together.

    Raises:
        WorkloadError: weights of other names or shapes, or something that cannot be sent; raised on all ranks.
    """
    used = [one for one in dict.fromkeys((live.own_optimizer, live.optimizer)) if one]
    names = {id(param): name for name, param in live.parts.named_parameters()}
    groups_of = [group["params"] for optimizer in used for group in optimizer.param_groups]
    held = [_tensors(live.parts), *([(names.get(id(one)), _shape(one)) for one in group] for group in groups_of)]
    if not all(alike([zlib.crc32(repr(held).encode())], "model")):
        raise WorkloadError(
            "The ranks hold weights of different names, shapes or strides, or sort them into other groups of the "
            "optimizer, so rank 0's cannot be given to the others. Run the cell that changed the model or the "
            "optimizer on all ranks, or attach it again."
        )
    live.modes.resume()  # a cell may have called eval() on one rank alone
    take_from_first(live)
    for optimizer in used:
        if optimizer is not live.own_optimizer:
            live.sharing.agreed(optimizer).follow_first()
        groups = optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        for group, first in zip(groups, from_first(options, "The optimizer's options"), strict=True):
            group.update(first)
    live.rates_were_given()
    frozen = from_first(_trained(live.parts), "What is frozen")
    for param, trained in zip(live.parts.parameters(), frozen, strict=True):
        param.requires_grad_(trained)
    if live.scheduler:
        live.scheduler.load_state_dict(from_first(live.scheduler.state_dict, "The scheduler's position"))
    live.replace_scaler(from_first(live.scaler.state_dict(), "The loss scale"))


def _send_extra_states(parts: Parts) -> None:
    keepers = list(extra_states(parts).values())
    if not keepers:
        return
    failure: BaseException | None = None
    states = from_first(lambda: [module.get_extra_state() for module in keepers], "What get_extra_state() gives")
    try:
        for module, state in zip(keepers, states, strict=True):
            if here().rank != 0:
                module.set_extra_state(state)
    except Exception as error:  # the user's own code
        failure = error
    if here().any_rank(failure is not None, "extra state"):
        why = f" {type(failure).__name__}: {text_of(failure)}." if failure else ""
        raise WorkloadError(f"set_extra_state() failed with what rank 0 keeps.{why} Make it take what the other gives.")


def _tensors(parts: Parts) -> list[Any]:
    named = (*parts.named_parameters(), *parts.named_buffers())
    described = ((name, tuple(tensor.shape), str(tensor.dtype), _strides(tensor)) for name, tensor in named)
    return [*described, *extra_states(parts)]


def _shape(param: Any) -> str:
    """Return the shape of an entry of a group as text; a cell may have put anything there."""
    return str(getattr(param, "shape", None))


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that count: fused kernels pair weights and rank 0's state in the order of memory."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _trained(parts: Parts) -> list[bool]:
    return [param.requires_grad for param in parts.parameters()]


def _optimizers(live: LiveModel) -> Any:
    names = {id(param): name for name, param in live.parts.named_parameters()}
    return [
        (
            type(optimizer).__qualname__,
            [
                [
                    [names[id(param)] for param in group["params"]],
                    sorted((name, _plain(value)) for name, value in group.items() if name != "params"),
                ]
                for group in optimizer.param_groups
            ],
        )
        for optimizer in (live.own_optimizer, live.optimizer)
        if optimizer
    ]


def _scheduler(live: LiveModel) -> Any:
    if live.scheduler is None:
        return None
    return type(live.scheduler).__qualname__, sorted(_flat(live.scheduler.state_dict(), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, _plain(value)


def _plain(value: Any) -> str:
    """Return a value as text that is the same on all ranks when the value is: nothing with an address in it."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, list | tuple):
        return str([_plain(item) for item in value])
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__
