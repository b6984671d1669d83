"""A Lightning module, with its loaders and optimizer, and what a Lightning ``Trainer`` says of how to train it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...internals.lightning_internals import logging_to, syncs_batch_norm
from ...shared.errors import WorkloadError, text_of
from .pace import Paced
from .taking import Taking, length_of

_ARGUMENTS = {
    "batch_size": "the DataLoader's batch_size",
    "accumulation_steps": "accumulate_grad_batches",
    "precision": "precision",
    "clip_norm": "gradient_clip_val",
    "num_workers": "the DataLoader's num_workers",
}
_PACKAGES = ("lightning", "pytorch_lightning")
_PRECISIONS = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16"}
_SINGLE = ("SingleDeviceStrategy", "DDPStrategy")  # in place of whose processes the ranks stand
_USUAL = {"ModelCheckpoint", "ModelSummary", "TQDMProgressBar", "RichProgressBar", "RichModelSummary"}
_NAME_IT = (
    "Name a Lightning Trainer, trainer=pl_trainer model=module, whose arguments it can ask; hand over what follows "
    "from training itself, such as the number of steps, when the module is made."
)
# A module that does one of these in its own way could not be trained as it says.
_REFUSED = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "optimizer_step",
    "transfer_batch_to_device",
)


def is_module(thing: Any) -> bool:
    """Return whether it is a Lightning module."""
    return _is(thing, "LightningModule")


def is_lightnings_trainer(thing: Any) -> bool:
    """Return whether it is a ``Trainer`` of Lightning."""
    return _is(thing, "Trainer")


def is_data_module(thing: Any) -> bool:
    """Return whether it is a Lightning data module."""
    return _is(thing, "LightningDataModule")


def of_module(module: Any, trainer: Any, beside: Mapping[str, Any], ranks: int) -> Taking:
    """Take what a Lightning module brings, and how its ``Trainer`` would train it, if there is one.

    Args:
        module: a ``LightningModule``.
        trainer: of Lightning, or ``None``.
        beside: what was named beside it, by the roles of ``attach``; its data may be a ``LightningDataModule``.
        ranks: as many will train it.

    Raises:
        WorkloadError: it trains in a way that cannot be kept.
    """
    name, taking = type(module).__name__, Taking("a Lightning module", _ARGUMENTS)
    _check(module, trainer)
    for hook in ("setup", "configure_model"):
        if _overrides(module, hook):
            getattr(module, hook)(*(("fit",) if hook == "setup" else ()))
    taking.model(module, name)
    taking.part("loss", ModuleLoss(module, trainer), f"{name}.training_step", "training_step")
    loader = _take_data(taking, module, beside)
    if _overrides(module, "validation_step") and ("eval_data" in beside or "eval_data" in taking.parts):
        taking.part("metric", ModuleMetric(module, trainer), "what validation_step logs", "validation_step")
    _take_update(taking, module, trainer, loader, ranks)
    if trainer:
        _take_knobs(taking, trainer)
    _leave(taking, module, trainer)
    return taking


def _is(thing: Any, name: str) -> bool:
    kinds = type(thing).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] in _PACKAGES for kind in kinds)


def _overrides(module: Any, name: str) -> bool:
    """Return whether the class of the user's own defines this method."""
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in (*_PACKAGES, "torch")


def _check(module: Any, trainer: Any) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise WorkloadError(
            f"{name} optimizes by hand (automatic_optimization=False), and a step here has one loss and one update. "
            "Return the loss from training_step instead."
        )
    for hook in _REFUSED:
        if _overrides(module, hook):
            raise WorkloadError(
                f"{name} defines {hook}, which no step here calls. Put what it does into training_step, or leave it "
                "out."
            )
    strategy = type(trainer.strategy).__name__ if trainer else _SINGLE[0]
    if strategy not in _SINGLE:
        raise WorkloadError(
            f"This Trainer has the {strategy}, which spreads a model or its updates over processes of its own. A "
            "session has a whole model on every rank. Make the Trainer with devices=1."
        )
    if trainer and _is_part(limit := trainer.limit_train_batches):  # overfit_batches and fast_dev_run set it, too
        raise WorkloadError(
            f"This Trainer trains on a part of the data (limit_train_batches={limit}), and steps here go through "
            "all of it. Leave that out, and give the loader the part: torch.utils.data.Subset(dataset, range(100))."
        )
    if trainer and trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") != "norm":
        raise WorkloadError("This Trainer clips gradients by value, and steps here clip by their norm: leave it out.")


def _is_part(limit: float) -> bool:
    """Return whether a limit of batches leaves some out: a share below 1, or any number of them."""
    return isinstance(limit, int) or limit < 1


class ModuleLoss:
    """``training_step`` of a Lightning module, as ``loss(model, batch)``.

    Attributes:
        criterion: the user's own function.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self.criterion, self._trainer = type(module).training_step, trainer
        self._takes = _batch_and_places(module.training_step)

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch; what the module logs is dropped.

        Raises:
            WorkloadError: ``training_step`` returned none.
        """
        given = _asked(model.training_step, self._trainer, lambda name, value: None, batch, *self._takes)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if loss is None:
            raise WorkloadError("training_step returned no loss. Return it, or a dict that has it under 'loss'.")
        return loss


class ModuleMetric:
    """``validation_step`` of a Lightning module: what it logs of a micro-batch, by name.

    Attributes:
        criterion: the user's own function.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self.criterion, self._trainer = type(module).validation_step, trainer
        self._takes = _batch_and_places(module.validation_step)

    def __call__(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Return what the module logs for one micro-batch; raises ``WorkloadError`` if that is no number per batch."""
        logged: dict[str, Any] = {}

        def log(name: str, value: Any) -> None:
            if hasattr(value, "compute"):
                raise WorkloadError(
                    f"validation_step logs {name} as a torchmetrics object, which adds up batches. Log its value for "
                    f"the micro-batch: self.log({name!r}, metric(outputs, targets))."
                )
            logged["validation_loss" if name == "loss" else name] = value

        _asked(model.validation_step, self._trainer, log, batch, *self._takes)
        return logged


def _asked(method: Any, trainer: Any, log: Callable[[str, Any], None], *args: Any) -> Any:
    """Call a method of a module, whose ``trainer`` is the one that was named beside it, and which trains nothing here.

    Raises:
        WorkloadError: it asks for one where none was named.
    """
    try:
        with logging_to(method.__self__, log, trainer):
            return method(*args)
    except RuntimeError as error:
        if trainer is not None or "not attached to a" not in str(error):
            raise
        raise WorkloadError(f"{method.__name__} asks for self.trainer. {_NAME_IT}") from None


def _batch_and_places(step: Any) -> tuple[int, ...]:
    """Return what a step takes beside its batch: the number of the batch, and of its loader."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise WorkloadError(
            f"{step.__name__} takes a dataloader_iter, and a step here gives it a micro-batch: let it take batch."
        )
    needed = [one for one in list(parameters.values())[1:] if one.default is one.empty or one.name == "batch_idx"]
    return (0,) * sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in needed)


def _take_data(taking: Taking, module: Any, beside: Mapping[str, Any]) -> Any:
    """Take loaders from the module, or from a data module; returns that of the training data."""
    data = beside.get("data")
    holder: Any = data if is_data_module(data) else module
    if holder is not module:
        holder.setup("fit")
    source = type(holder).__name__
    if _overrides(holder, "prepare_data"):
        taking.leave(f"{source}.prepare_data: call it once, in a %%hvd --ranks 0 cell")
    loader = data if holder is module else None
    if loader is None and _overrides(holder, "train_dataloader"):
        loader = holder.train_dataloader()
        if isinstance(loader, Sequence | Mapping) or type(loader).__name__ == "CombinedLoader":
            raise WorkloadError(
                f"{source}.train_dataloader gives several loaders, and one is trained on here. Return one, of a "
                "torch.utils.data.ConcatDataset say."
            )
        taking.part("data", loader, length_of(getattr(loader, "dataset", loader)), f"{source}.train_dataloader")
    if _overrides(holder, "val_dataloader"):
        _take_validation(taking, holder.val_dataloader(), source)
    return loader


def _take_validation(taking: Taking, loader: Any, source: str) -> None:
    if isinstance(loader, Sequence):
        if len(loader) > 1:
            taking.leave(f"{source}.val_dataloader gives {len(loader)} loaders, of which evaluations see the first")
        loader = next(iter(loader), None)
    what = length_of(getattr(loader, "dataset", loader)) if loader is not None else ""
    taking.part("eval_data", loader, what, f"{source}.val_dataloader")


def _take_update(taking: Taking, module: Any, trainer: Any, loader: Any, ranks: int) -> None:
    try:
        given = _asked(module.configure_optimizers, trainer, lambda name, value: None)
    except Exception as error:  # whatever a Trainer raises that knows no module
        if isinstance(error, WorkloadError) or "trainer" not in module.configure_optimizers.__code__.co_names:
            raise
        said = next(iter(text_of(error).strip().splitlines()), type(error).__name__)
        raise WorkloadError(
            f"configure_optimizers asks a Trainer that does not train here ({said}). {_NAME_IT}"
        ) from None
    optimizer, schedule = _one_of_each(given)
    taking.optimizer(optimizer, "configure_optimizers", "configure_optimizers")
    scheduler = schedule.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        taking.leave("ReduceLROnPlateau, which waits for a metric: call scheduler.step(metric) in a %%hvd cell")
        scheduler = None
    if scheduler is None:
        return
    every, interval = int(schedule.get("frequency") or 1), schedule.get("interval") or "epoch"
    accumulation = trainer.accumulate_grad_batches if trainer else 1
    if interval == "epoch":
        every *= _steps_of_epoch(loader, ranks, accumulation)
    kind = type(scheduler).__name__
    taking.part("scheduler", scheduler if every == 1 else Paced(scheduler, every), kind, "configure_optimizers")
    often = "each step" if every == 1 else f"every {every:,} steps"
    taking.row("lr_schedule", f"own, {often}", f"interval={interval!r}, frequency={schedule.get('frequency') or 1}")


def _one_of_each(given: Any) -> tuple[Optimizer, dict[str, Any]]:
    """Return the one optimizer, and the schedule with how often it goes on (``{}`` without one).

    Raises:
        WorkloadError: there is no optimizer, or more than one.
    """
    schedules: list[Any] = []
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], tuple | list):
        given, schedules = given[0], list(given[1]) if isinstance(given[1], tuple | list) else [given[1]]
    optimizers = list(given) if isinstance(given, tuple | list) else [given]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        one = optimizers[0]
        optimizers, schedules = [one["optimizer"]], [one["lr_scheduler"]] if one.get("lr_scheduler") else []
    if len(optimizers) != 1 or len(schedules) > 1:
        what = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else f"{len(schedules)} schedulers"
        raise WorkloadError(
            f"configure_optimizers gives {what}, and a step here has one update. Put all weights into one optimizer, "
            "in groups with options of their own."
        )
    if not isinstance(optimizers[0], Optimizer):
        raise WorkloadError("configure_optimizers gives no optimizer. Return one, such as torch.optim.AdamW.")
    schedule = schedules[0] if schedules else {}
    return optimizers[0], dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}


def _steps_of_epoch(loader: Any, ranks: int, accumulation: int) -> int:
    try:
        return max(1, math.ceil(math.ceil(len(loader) / ranks) / accumulation))
    except TypeError:
        raise WorkloadError(
            "The scheduler goes on once an epoch, and the training data has no length. Let configure_optimizers return "
            "it with interval='step'."
        ) from None


def _take_knobs(taking: Taking, trainer: Any) -> None:
    accumulation = trainer.accumulate_grad_batches
    taking.knob("accumulation_steps", accumulation, f"accumulate_grad_batches={accumulation}")
    precision = str(trainer.precision)
    taking.knob("precision", _PRECISIONS.get(precision, "fp32"), f"precision={precision!r}")
    if precision not in _PRECISIONS:
        taking.leave(f"precision={precision!r}: convert the module itself before it is attached, or set precision=bf16")
    clip = trainer.gradient_clip_val or None
    taking.knob("clip_norm", clip, f"gradient_clip_val={clip}")


def _leave(taking: Taking, module: Any, trainer: Any) -> None:
    names = {name for kind in type(module).__mro__ for name in vars(kind) if name.startswith("on_")}
    if hooks := sorted(name for name in names if _overrides(module, name)):
        taking.leave(f"hooks that no step here calls: {', '.join(hooks)}")
    callbacks = [type(one).__name__ for one in trainer.callbacks] if trainer else []
    if theirs := [name for name in callbacks if name not in _USUAL]:
        taking.leave(f"callbacks, which no step here calls: {', '.join(theirs)}")
    if trainer and _is_part(limit := trainer.limit_val_batches):
        taking.leave(f"limit_val_batches={limit}: evaluations see all of the validation data")
    if trainer and syncs_batch_norm(trainer):
        taking.leave("sync_batchnorm=True: batch norm takes the statistics of each rank's own micro-batch")
    taking.leave("self.log in training_step; self.global_step, self.current_epoch and batch_idx stay at 0")
