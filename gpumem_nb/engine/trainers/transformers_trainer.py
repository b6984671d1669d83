"""A ``Trainer`` of transformers, or an ``SFTTrainer`` of TRL: what it holds, and what its arguments say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...internals.transformers_internals import forget_scheduler, on_this_device
from ...shared.errors import WorkloadError
from ..random_state import seeded
from ..replay.checkpointing import find_blocks
from .prepared import PRECISIONS, shares_batches, unprepared, unwrapped
from .taking import Taking, length_of, named
from .transformers_loss import TrainerLoss, TrainerMetric, counts_all_ranks

_ARGUMENTS = {
    "batch_size": "per_device_train_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "learning_rate",
    "precision": "bf16 or fp16",
    "checkpointing": "gradient_checkpointing",
    "clip_norm": "max_grad_norm",
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
}
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # as the versions call it
# What a step of theirs does beside compute_loss: a class of the user's that does it otherwise could not be kept.
_STEPS = (
    *("training_step", "_inner_training_loop", "_run_epoch", "_prepare_for_training", "_prepare_inputs"),
    *("_prepare_input", "compute_loss_context_manager", "autocast_smart_context_manager", "_clip_grad_norm"),
)
_AROUND = ("evaluate", "evaluation_loop", "log", "save_model", "train")  # which are the user's to call
_WHOLE = "and a session has a whole model on every rank."
_USUAL = {"DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
_WITHOUT_AN_UPDATE = ("lomo", "adalomo")  # optimizers that update within backward, as galore's layer by layer do

_OF_METRICS = ("reduce_lr_on_plateau", "greedy")  # schedules that wait for one

# Arguments that change training and are not kept, each with what is done instead.
_NOT_KEPT = {
    "neftune_noise_alpha": "embeddings get no noise",
    "torch_compile": "the model is not compiled",
    "use_liger_kernel": "the model's own kernels are used",
    "activation_offloading": "activations stay on the device",
    "auto_find_batch_size": "%hvd_tune and --largest-batch find the batch size",
    "load_best_model_at_end": "%hvd_save keeps what you choose",
    "push_to_hub": "call trainer.push_to_hub() in a %%hvd --ranks 0 cell",
    "fp16_full_eval": "evaluations are under precision=",
    "bf16_full_eval": "evaluations are under precision=",
}


def is_trainer(thing: Any) -> bool:
    """Return whether it is a ``Trainer`` of transformers, or of a class made from it."""
    return any(kind.__module__ == "transformers.trainer" and kind.__name__ == "Trainer" for kind in type(thing).__mro__)


def of_trainer(trainer: Any, ranks: int, device: torch.device) -> Taking:
    """Take what a ``Trainer`` holds, as it would train it on so many processes.

    Its optimizer and scheduler are made, if it has none yet, and are then its own.

    Raises:
        WorkloadError: it trains in a way that cannot be kept.
    """
    for reason in _refusals(trainer, ranks):
        raise WorkloadError(f"trainer=: {reason}")
    args, taking = trainer.args, Taking(_kind(trainer), _ARGUMENTS)
    on_this_device(trainer, device)
    model = unwrapped(trainer.model).train()  # all of it, as each of its steps does
    taking.model(model, "model")
    taking.part("loss", TrainerLoss(trainer, device), *_loss_in_words(trainer))
    with seeded(args.seed):  # as its own training begins: the order of samples is the same
        loader = unprepared(trainer.get_train_dataloader())
    collator = named(trainer.data_collator)
    dataset = getattr(loader, "dataset", loader)  # get_train_dataloader may be the user's own
    taking.part("data", loader, length_of(dataset), f"train_dataset, data_collator={collator}")
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if sampler is not None:
        taking.row("order of samples", type(sampler).__name__, f"seed={seed}, train_dataset")
    _take_validation(taking, trainer)
    _take_update(taking, trainer, loader, ranks)
    _take_knobs(taking, trainer, model, loader)
    for sentence in _not_kept(trainer):
        taking.leave(sentence)
    return taking


def _kind(trainer: Any) -> str:
    """Return what people call it, with the class that they made of it."""
    theirs = type(trainer).__module__.partition(".")[0]
    return f"{type(trainer).__name__} of {theirs}" if theirs in ("transformers", "trl") else type(trainer).__name__


def _refusals(trainer: Any, ranks: int) -> Iterator[str]:
    args = trainer.args
    what = f"this {type(trainer).__name__}"
    if trainer.is_deepspeed_enabled:
        yield f"{what} trains with DeepSpeed, {_WHOLE} Make it without deepspeed=."
    if trainer.is_fsdp_enabled or args.fsdp:
        yield f"{what} trains with FSDP, {_WHOLE} Make it without fsdp=."
    if getattr(args, "parallelism_config", None) is not None or trainer.is_model_parallel:
        yield f"{what} spreads the model over several devices, {_WHOLE} Load the model onto one device."
    if trainer.accelerator.split_batches and ranks > 1:
        yield f"{what} {shares_batches(ranks)}"
    theirs = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if theirs and "SFTTrainer" not in theirs:
        yield f"of TRL's trainers SFTTrainer can be attached. {theirs[0]} holds more than one model and its loss."
    for name in filter(lambda name: _is_users(trainer, name), _STEPS):
        yield f"{what} defines {name}, which no step here calls. Put what it does into compute_loss, or leave it out."
    if _is_users(trainer, name := "create_optimizer_and_scheduler"):
        yield f"{what} defines {name}, which newer versions do not call. Define create_optimizer and create_scheduler."
    optim = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is None and (optim in _WITHOUT_AN_UPDATE or "layerwise" in optim):
        yield f"optim={optim} updates weights during backward, before gradients are averaged. Use optim=adamw_torch."
    if trainer.train_dataset is None:
        yield f"{what} has no train_dataset. Make it with one."


def _loss_in_words(trainer: Any) -> tuple[str, str]:
    """Return what computes the loss, and which arguments say so."""
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    items = ", divided by num_items_in_batch of all ranks" * counts_all_ranks(trainer)
    if owner.__module__.partition(".")[0] != "transformers":
        return f"{owner.__name__}.compute_loss{items}", owner.__name__
    if trainer.compute_loss_func is not None:
        return f"{named(trainer.compute_loss_func)}{items}", "compute_loss_func"
    if trainer.label_smoother is not None:
        return f"smoothed labels{items}", f"label_smoothing_factor={trainer.args.label_smoothing_factor:g}"
    return f"the model's own{items}", "compute_loss"


def _take_validation(taking: Taking, trainer: Any) -> None:
    held_out, args = trainer.eval_dataset, trainer.args
    if held_out is None:
        return
    source = "eval_dataset"
    if isinstance(held_out, dict):
        first, *others = held_out
        held_out, source = held_out[first], f"eval_dataset[{first!r}]"
        if others:
            taking.leave(f"eval_dataset has {len(others) + 1} sets, of which evaluations see {first!r} alone")
    if not hasattr(held_out, "__len__"):
        taking.leave(f"{source}, which can only be iterated: name eval_data=, with numbered samples")
        return
    loader = unprepared(trainer.get_eval_dataloader(held_out))
    taking.part("eval_data", loader, length_of(held_out), source)
    if trainer.compute_metrics is None:
        return
    if args.batch_eval_metrics or not args.eval_do_concat_batches:
        how = "batch_eval_metrics=True" if args.batch_eval_metrics else "eval_do_concat_batches=False"
        taking.leave(f"compute_metrics, which with {how} sees batch by batch: leave that argument out, or name metric=")
        return
    taking.part("metric", TrainerMetric(trainer), named(trainer.compute_metrics), "compute_metrics, of all ranks")


def _take_update(taking: Taking, trainer: Any, loader: Any, ranks: int) -> None:
    args = trainer.args
    given = trainer.optimizer is not None
    trainer.optimizer = unprepared(trainer.optimizer)
    forget_scheduler(trainer)
    trainer.create_optimizer()  # which sets what it makes; a class of the user's need not return it
    optimizer = trainer.optimizer
    optim = getattr(args.optim, "value", args.optim)
    source = "trainer.optimizer" if given else f"optim={optim}, weight_decay={args.weight_decay:g}"
    kind, steps = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)), _steps(args, loader, ranks)
    scheduler = unprepared(trainer.lr_scheduler)
    if scheduler is None and kind in _OF_METRICS and not _is_users(trainer, "create_scheduler"):
        taking.leave(f"lr_scheduler_type={kind}, which waits for a metric: the rate stays as it is")
    elif scheduler is None and (kind != "constant" or _is_users(trainer, "create_scheduler")):
        trainer.create_scheduler(num_training_steps=steps)
        scheduler = trainer.lr_scheduler
    taking.optimizer(optimizer, source, "trainer.optimizer" if given else "learning_rate")
    if scheduler is None:
        taking.constant_rate(f"lr_scheduler_type={kind}")
    else:
        taking.part("scheduler", scheduler, type(scheduler).__name__, "create_scheduler")
        taking.row("lr_schedule", "own", f"lr_scheduler_type={kind}, warmup_steps={args.get_warmup_steps(steps)}")
    length = f"max_steps={steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    taking.row("steps", f"{steps:,}, with %hvd_train {steps}", f"{length}, on {ranks} rank{'s' * (ranks > 1)}")


def _steps(args: Any, loader: Any, ranks: int) -> int:
    """Return how many steps its own training would take on so many processes."""
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        batches = math.ceil(len(loader) / ranks)
    except TypeError:
        raise WorkloadError(
            "trainer=: the train_dataset has no length, so the length of the schedule is not known. Make "
            "TrainingArguments with max_steps=."
        ) from None
    steps: float = args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return math.ceil(steps)


def _take_knobs(taking: Taking, trainer: Any, model: nn.Module, loader: Any) -> None:
    args = trainer.args
    batches = getattr(loader, "batch_sampler", None)
    if size := getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None):
        taking.row("batch_size", str(size), "per_device_train_batch_size")
    taking.knob("accumulation_steps", args.gradient_accumulation_steps, "gradient_accumulation_steps")
    mixed = trainer.accelerator.mixed_precision
    if mixed not in PRECISIONS:
        taking.leave(f"mixed_precision={mixed}, which no knob has")
    source = "neither bf16 nor fp16" if mixed == "no" else f"{mixed}=True"
    taking.knob("precision", PRECISIONS.get(mixed, "fp32"), source)
    most = args.max_grad_norm
    taking.knob("clip_norm", most if most is not None and most > 0 else None, f"max_grad_norm={most}")
    asked = next((name for name in _CHECKPOINTING if getattr(args, name, False)), "")
    if name := _switched_on(model):
        getattr(model, f"{name}_disable")()  # the knob decides from now on
        asked = asked or f"model.{name}_enable()"
    if asked and not find_blocks(model):
        taking.leave(f"{asked}: no repeated blocks were found in the model")
    else:
        taking.knob("checkpointing", "blocks" if asked else "none", asked or "gradient_checkpointing=False")
    if args.dataloader_num_workers:
        taking.row("num_workers", str(args.dataloader_num_workers), "dataloader_num_workers")


def _switched_on(model: nn.Module) -> str:
    """Return what the model calls its own checkpointing, if that is on; empty if not."""
    known = [name for name in reversed(_CHECKPOINTING) if hasattr(model, f"{name}_disable")]  # adapters pass it on
    return known[0] if known and getattr(model, f"is_{known[0]}", False) else ""


def _not_kept(trainer: Any) -> Iterator[str]:
    args = trainer.args
    callbacks = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    if theirs := [name for name in callbacks if name not in _USUAL]:
        yield f"callbacks, which no step here calls: {', '.join(theirs)}"
    for name, instead in _NOT_KEPT.items():
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)}: {instead}"
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy != "no" and trainer.eval_dataset is not None:
        every = int(args.eval_steps) if strategy == "steps" and args.eval_steps >= 1 else 0
        regularly = f", or regularly with %hvd_set eval_every={every}" * bool(every)
        yield f"eval_strategy={strategy}: evaluate with %hvd_eval{regularly}"
    if called := [name for name in _AROUND if _is_users(trainer, name)]:
        yield f"methods of {type(trainer).__name__} that no step here calls: {', '.join(called)}"
    code = getattr(type(trainer).compute_loss, "__code__", None)
    if _is_users(trainer, "compute_loss") and code is not None and {"state", "control"} & set(code.co_names):
        yield "trainer.state and trainer.control, which compute_loss asks: global_step and epoch stay at 0"


def _is_users(trainer: Any, name: str) -> bool:
    """Return whether a class of the user's own defines this method."""
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in ("transformers", "trl")
