"""What accelerate's ``prepare`` made of people's objects: taken as what it was given, in its precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from ...internals.accelerate_internals import prepared_by
from ...shared.errors import WorkloadError
from .pace import Paced
from .taking import Taking, length_of

# What accelerate's prepare() makes of an optimizer, a scheduler and a loader, and where it keeps what it was given.
_PREPARED = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "DataLoaderShard": "base_dataloader",
    "DataLoaderDispatcher": "base_dataloader",
}
_ARGUMENTS = {"accumulation_steps": "gradient_accumulation_steps", "precision": "mixed_precision"}
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def shares_batches(ranks: int) -> str:
    """Return why batches that several processes share cannot be kept, and what to do."""
    return (
        "shares each batch out among the processes (split_batches=True), and here a batch is a rank's own. Leave that "
        f"out, and make batches 1/{ranks} as large."
    )


def unprepared(value: Any) -> Any:
    """Return the object that accelerate's ``prepare()`` was given; any other value itself."""
    kind = type(value)
    inside = _PREPARED.get(kind.__name__) if kind.__module__.startswith("accelerate.") else None
    return getattr(value, inside) if inside else value


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model with the forward that it had before accelerate put a precision around it."""
    if "_original_forward" not in vars(model):
        return model
    from accelerate.utils import extract_model_from_parallel

    plain: nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    return plain


def of_accelerator(accelerator: Any, ranks: int) -> Taking:
    """Take what an ``Accelerator`` has prepared, as it would train it on so many processes.

    Raises:
        WorkloadError: it has prepared nothing, more than one model or optimizer, or trains on several devices.
    """
    states = accelerator.state, accelerator.gradient_state
    things = prepared_by(accelerator)
    return _of(things, "what the Accelerator prepared", ranks, states, accelerator.split_batches)


def of_prepared(things: Iterable[Any], ranks: int) -> Taking:
    """Take what ``prepare`` returned; raises ``WorkloadError`` as :func:`of_accelerator`."""
    from accelerate.state import AcceleratorState, GradientState, is_initialized

    things = list(things)
    # A process that was started anew has the objects of the one before, and no Accelerator of its own.
    optimizer = next((thing for thing in things if hasattr(thing, "accelerator_state")), None)
    if optimizer is not None:
        states = optimizer.accelerator_state, optimizer.gradient_state
    elif is_initialized():
        states = AcceleratorState(), GradientState()
    else:
        raise WorkloadError(
            "trainer= is of type tuple, and no Accelerator has prepared what is in it. Name the objects themselves: "
            "model=net data=loader optimizer=opt."
        )
    shares = any(getattr(thing, "split_batches", False) for thing in things)  # a schedule knows, not each loader
    return _of(things, "what prepare returned", ranks, states, shares)


def _of(things: list[Any], source: str, ranks: int, states: tuple[Any, Any], shares: bool) -> Taking:
    taking, (state, gradients) = Taking("accelerate's Accelerator", _ARGUMENTS), states
    _check(state)
    if shares and ranks > 1:
        raise WorkloadError(f"The Accelerator {shares_batches(ranks)}")
    models = [thing for thing in things if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in things if hasattr(thing, "param_groups")]
    loaders = [thing for thing in things if isinstance(thing, DataLoader)]
    schedulers = [thing for thing in things if _is_scheduler(thing)]
    for what, found in (("model", models), ("optimizer", optimizers), ("scheduler", schedulers)):
        if len(found) > 1:
            raise WorkloadError(
                f"accelerate prepared {len(found)} {what}s, and one is trained here. Name those to train: "
                "%hvd_attach model=net data=loader optimizer=opt."
            )
    if not models:
        raise WorkloadError(
            "accelerate has prepared no model yet. Run the cell with accelerator.prepare(model, optimizer, loader) "
            "first, then name what it returned, or the Accelerator."
        )
    taking.model(unwrapped(models[0]), source)
    for optimizer in map(unprepared, optimizers):
        taking.optimizer(optimizer, source, "the optimizer")
    for scheduler in schedulers:
        _take_schedule(taking, scheduler, source, ranks)
    for role, loader in zip(("data", "eval_data"), loaders, strict=False):
        taking.part(role, unprepared(loader), length_of(loader.dataset), f"{source}: its {_ORDINAL[role]} DataLoader")
    if more := loaders[len(_ORDINAL) :]:
        what = f"DataLoader{'s' * (len(more) > 1)}, which {'are' if len(more) > 1 else 'is'}"
        taking.leave(f"{len(more)} more {what} neither trained nor validated on")
    taking.knob("precision", PRECISIONS[state.mixed_precision], f"mixed_precision={state.mixed_precision!r}")
    taking.knob("accumulation_steps", gradients.num_steps, "gradient_accumulation_steps")
    return taking


def _is_scheduler(thing: Any) -> bool:
    return isinstance(thing, LRScheduler) or type(thing).__name__ == "AcceleratedScheduler"


def _take_schedule(taking: Taking, given: Any, source: str, ranks: int) -> None:
    """Take a scheduler; one that was prepared goes on in each step as often as there are processes."""
    scheduler = unprepared(given)
    kind, times = type(scheduler).__name__, 1
    if scheduler is not given and given.step_with_optimizer:
        times = ranks
    paced = times > 1 and not isinstance(scheduler, ReduceLROnPlateau)  # which is refused
    taking.part("scheduler", Paced(scheduler, times=times) if paced else scheduler, kind, source)
    often = f"{times} times a step, as accelerate does on {times} processes" if times > 1 else "once a step"
    taking.row("lr_schedule", "own", f"{kind}, {often}")


_ORDINAL = {"data": "first", "eval_data": "second"}


def _check(state: Any) -> None:
    """Refuse what a session cannot keep."""
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    if kind != "NO":
        raise WorkloadError(
            f"The Accelerator trains with {kind}, which spreads a model or its updates over processes of its own. A "
            "session has a whole model on every rank. Make a plain one: Accelerator(mixed_precision=...)."
        )
    if state.mixed_precision not in PRECISIONS:
        raise WorkloadError(
            f"The Accelerator trains with mixed_precision={state.mixed_precision!r}. Allowed here: "
            f"{', '.join(map(repr, PRECISIONS))}."
        )
