"""Checks that a workload can be trained, made where it would go wrong."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn, strided
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...shared.errors import WorkloadError
from ...shared.settings import Settings
from .ambient import DTYPES
from .optimizers import check_state
from .parts import Parts, in_groups
from .rates import rate_of

Known = Mapping[int, tuple[weakref.ref[Tensor], torch.Size]]
"""Weights of some moment and the shapes that they had, by their ids."""
_KERAS = ("keras", "tf_keras")
_LOOP = "run steps of your own in a %%hvd cell, with hvd.DistributedOptimizer"


def checked_model(model: Any) -> nn.Module:
    """Return the model, if it is one and has anything to train; else raises ``WorkloadError``."""
    if not isinstance(model, nn.Module):
        several = isinstance(model, list | tuple | Mapping)
        hint = " Put its members into one nn.ModuleDict, and write the loss as loss(model, batch)." if several else ""
        raise WorkloadError(f"The model must be a torch.nn.Module; this is a {type(model).__name__}.{hint}")
    if "_original_forward" in vars(model):
        raise WorkloadError(
            f"accelerate computes the forward of this {type(model).__name__} in a precision of its own, which the "
            "settings here would not know. Attach the Accelerator, which brings it as a knob: trainer=accelerator. Or "
            "unwrap the model, net = accelerator.unwrap_model(net, keep_fp32_wrapper=False), and attach it again."
        )
    check_tensors(model)
    if not any(param.requires_grad for param in model.parameters()):
        raise WorkloadError("The model has no trainable parameters: every requires_grad is False.")
    return model


def check_modules(module: nn.Module) -> None:
    """Refuse a module that would do something else on ranks than it says.

    Raises:
        WorkloadError: it has a ``SyncBatchNorm``, an embedding with ``max_norm``, or parts of Keras or ``torch.jit``.
    """
    for name, one in module.named_modules():
        where = name or "the model itself"
        if isinstance(one, nn.SyncBatchNorm):
            raise WorkloadError(
                f"SyncBatchNorm ({where}) averages over torch.distributed, which joins no ranks "
                "here, so each rank would normalise by itself. Use nn.BatchNorm, whose statistics are each rank's own, "
                "or nn.GroupNorm, which keeps none."
            )
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
            raise WorkloadError(
                f"{type(one).__name__} ({where}) has max_norm={one.max_norm:g}: its forward shortens the rows that a "
                "rank looks up, so the ranks' weights come apart. Leave max_norm out, and penalise long rows in the "
                "loss instead, or normalise what the embedding returns."
            )
        if isinstance(one, torch.jit.ScriptModule):
            raise WorkloadError(
                f"{one.original_name} ({where}) was compiled by torch.jit: what its forward changes could not be put "
                "back when a step is undone. Use the module that it was made of; torch.compile may compile it."
            )
        if any(kind.__module__.partition(".")[0] in _KERAS for kind in type(one).__mro__):
            raise WorkloadError(
                f"{type(one).__name__} ({where}) is a Keras layer. Keras takes training=True as an argument of each "
                "call, and model.train() does not reach it: dropout and batch norm would stay off. Build the model "
                "from torch.nn modules."
            )


def check_tensors(module: nn.Module) -> None:
    """Refuse a module that ranks cannot hold alike.

    Raises:
        WorkloadError: it has lazy layers, weights without data or in a sparse form, or a ``SyncBatchNorm``.
    """
    check_modules(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise WorkloadError(
                f"{name} belongs to a lazy layer and has no shape yet. Run one batch through the model first, in a "
                "%%hvd cell: net(inputs)."
            )
        if tensor.is_meta:
            raise WorkloadError(f"{name} is on the meta device and holds no values. Load the model's weights first.")
        if tensor.layout != strided or tensor.is_quantized:
            what = "quantized" if tensor.is_quantized else "sparse"
            raise WorkloadError(f"{name} is a {what} tensor, which ranks cannot hold alike. Keep it dense.")


def check_strangers(parts: Parts, known_before: Known, trained: Set[int]) -> None:
    """Check weights that came meanwhile, and shapes of those that are trained; ``trained`` are the ids of these.

    Raises:
        WorkloadError: naming the first that no optimizer has, or one of another shape.
    """
    for name, param in parts.named_parameters():
        known, shape = known_before.get(id(param), (lambda: None, param.shape))
        if known() is param and shape != param.shape and id(param) in trained:
            raise WorkloadError(
                f"{name} has shape {tuple(param.shape)} now and had {tuple(shape)}, as the optimizer's state has. "
                "Build the optimizer anew, and attach model and optimizer again."
            )
        if param.requires_grad and known() is not param and id(param) not in trained:
            raise WorkloadError(
                f"{name} came into the model after it was attached, and no optimizer trains it. Add it with "
                "optimizer.add_param_group({'params': [...]}) on all ranks, or attach the model again."
            )


def checked_optimizer(optimizer: Any, parts: Parts) -> Optimizer:
    """Return the optimizer, if it can train the model; else raises ``WorkloadError``."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, list | tuple | Mapping):
        raise WorkloadError(
            f"One optimizer trains here; this is a {kind} of {len(optimizer)}. Put all weights into one optimizer, in "
            f"groups with options of their own; for a step with several updates, as a GAN's, {_LOOP}."
        )
    if not isinstance(optimizer, Optimizer):
        raise WorkloadError(f"The optimizer must be a torch.optim.Optimizer; this is a {kind}.")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise WorkloadError(
            f"{kind} passes for an optimizer without being one: it was not built by Optimizer.__init__, as those that "
            "wrap another optimizer are. Attach the optimizer inside it."
        )
    if hasattr(optimizer, "skip_synchronize"):
        raise WorkloadError(
            "hvd.DistributedOptimizer averages the gradients over the ranks, and so does every step here. Build model "
            f"and optimizer anew and attach the plain {kind}."
        )
    if isinstance(optimizer, LBFGS) or _needs_closure(optimizer):
        raise WorkloadError(
            f"{kind} computes the loss several times in one update, and here an update has one loss. Use another "
            "optimizer, such as AdamW."
        )
    if isinstance(optimizer, SparseAdam):
        raise WorkloadError(
            "SparseAdam takes sparse gradients, and the average over all ranks is dense. Use Adam, or SGD."
        )
    check_state(optimizer)
    inner = next((one for one in vars(optimizer).values() if isinstance(one, Optimizer)), None)
    if inner is not None and inner.state is not optimizer.state:
        raise WorkloadError(
            f"{kind} keeps a state of its own beside that of the {type(inner).__name__} in it: such an update cannot "
            f"be undone when another rank fails, and would not be saved whole. Attach the {type(inner).__name__}."
        )
    trainable = {id(param) for param in parts.named[""].parameters() if param.requires_grad}
    if trainable.isdisjoint(map(id, in_groups(optimizer))):
        raise WorkloadError(
            f"The optimizer {kind} holds none of this model's weights: it was built on another instance of the model. "
            f"Build it anew on this one: {kind}(net.parameters(), ...)."
        )
    if optimizer.param_groups[0].get("lr") is None:
        raise WorkloadError(f"The optimizer {kind} has no learning rate of its own. Build it with one: lr=1e-3.")
    return optimizer


def check_groups(optimizer: Optimizer) -> None:
    """Refuse groups that an update could not be made with.

    Raises:
        WorkloadError: a group's learning rate is not a number, or the groups are empty.
    """
    for place, group in enumerate(optimizer.param_groups):
        if math.isnan(rate_of(group)):
            raise WorkloadError(
                f"The learning rate of the optimizer's group {place} is {group.get('lr')!r}. Set a number in a %%hvd "
                f"cell: optimizer.param_groups[{place}]['lr'] = 1e-3."
            )
    if next(iter(in_groups(optimizer)), None) is None:
        raise WorkloadError(
            f"The optimizer {type(optimizer).__name__} has no weights left to train: its groups are empty. Build it "
            "anew, and attach the model and the optimizer again."
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    # On the class: a scheduler replaces the step of the object.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def checked_scheduler(scheduler: Any, optimizer: Optimizer | None) -> LRScheduler:
    """Return the scheduler, if it can advance with every step of this optimizer; else raises ``WorkloadError``."""
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise WorkloadError(f"The scheduler must be one of torch.optim.lr_scheduler; this is a {kind}.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise WorkloadError(
            "ReduceLROnPlateau waits for a metric, which a step does not have. Leave it out here, and call "
            "scheduler.step(metric) in a %%hvd cell: the rate that it sets stays."
        )
    if optimizer is None or scheduler.optimizer is not optimizer:
        raise WorkloadError(
            f"The scheduler {kind} changes an optimizer that is not trained with: "
            "name the optimizer that it was built for, optimizer=."
        )
    return scheduler


def check_precision(settings: Settings, parts: Parts) -> None:
    """Refuse loss scaling for gradients that are in fp16 themselves; torch's scaler cannot unscale those.

    Raises:
        WorkloadError: such a weight is trained, and the settings ask for ``precision=fp16``.
    """
    if settings.precision != "fp16":
        return
    for name, param in parts.named_parameters():
        if param.requires_grad and param.dtype == DTYPES["fp16"]:
            raise WorkloadError(
                f"precision=fp16 scales the loss for weights in fp32, and {name} is in fp16 itself. Use "
                "precision=fp32, which trains the weights as they are."
            )


def checked_loss(loss: Any) -> Tensor:
    """The loss as a scalar, if it is one real number that depends on the weights; else raises ``WorkloadError``."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"The loss must return one number as a tensor; it returned a {type(loss).__name__}.")
    if loss.numel() != 1:
        raise WorkloadError(
            f"The loss must return one number (a scalar tensor); it returned shape {tuple(loss.shape)}. "
            "Take its mean, for example: loss.mean()."
        )
    if not loss.requires_grad and not torch.is_grad_enabled():
        raise WorkloadError(
            "Gradients are switched off on this rank, so the loss depends on no weight. Switch them on again in a "
            "%%hvd cell: torch.set_grad_enabled(True)"
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "The loss does not depend on the model's weights, so there is nothing to train. "
            "Remove detach(), item() or no_grad() between model and loss."
        )
    if loss.is_complex():
        raise WorkloadError("The loss must be a real number; it is complex. Take its absolute value: loss.abs().")
    return loss.reshape(())
