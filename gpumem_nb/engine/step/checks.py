"""What a workload must bring so that there is something to train, checked where it would go wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...shared.errors import WorkloadError


def checked_model(model: Any) -> nn.Module:
    """The model, if it is one and has anything to train; else raises ``WorkloadError``."""
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"The model must be a torch.nn.Module; this is a {type(model).__name__}.")
    if not any(param.requires_grad for param in model.parameters()):
        raise WorkloadError("The model has no trainable parameters: every requires_grad is False.")
    return model


def checked_loss(loss: Any) -> Tensor:
    """The loss, if it is one number that depends on the weights; else raises ``WorkloadError``."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"The loss must return one number as a tensor; it returned a {type(loss).__name__}.")
    if loss.numel() != 1:
        raise WorkloadError(
            f"The loss must return one number (a scalar tensor); it returned shape {tuple(loss.shape)}. "
            "Take its mean, for example: loss.mean()."
        )
    if loss.grad_fn is None:
        raise WorkloadError(
            "The loss does not depend on the model's weights, so there is nothing to train. "
            "Remove detach(), item() or no_grad() between model and loss."
        )
    return loss
