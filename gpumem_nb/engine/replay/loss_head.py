"""``loss_head=chunked``: the model's last linear layer gives :class:`~.logits.Logits`, and the loss takes its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn

from ...internals.torch_internals import has_backward_hooks, is_compiled, uncompiled
from ...shared.errors import WorkloadError
from .logits import Logits, WholeLogitsNeeded, logits_of


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that makes logits: what a Hugging Face model calls so, or the last linear layer."""
    named = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else None
    if isinstance(head, nn.Module):
        return head
    return next((one for one in reversed(list(model.modules())) if isinstance(one, nn.Linear)), None)


def is_wide(head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether a head has more classes than features, as those of language models; others have small logits."""
    return isinstance(head, nn.Linear) and head.out_features > head.in_features


class ChunkedHead:
    """The head of one model, which gives logits in parts inside :meth:`on`, and nowhere else.

    Args:
        model: whose head it is.
        head: the layer; ``None`` if none was found.

    Raises:
        WorkloadError: it is no linear layer of torch's, or is compiled with what is around it.
    """

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        kind = "model without one" if head is None else f"{type(head).__name__} of {type(head).__module__}"
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise WorkloadError(
                f"loss_head=chunked computes the loss from the input of the last torch.nn.Linear; this is a {kind}. "
                "Use loss_head=full, or name the layer in Workload(head=...)."
            )
        for module in filter(is_compiled, model.modules()):
            if any(one is head for one in module.modules()):
                raise WorkloadError(
                    f"loss_head=chunked cannot take the head out of the {type(uncompiled(module)).__name__} that "
                    "torch.compile compiled as a whole. Compile its blocks instead, each by block.compile(), or use "
                    "loss_head=full."
                )
        self._head = head
        self._around = [one for one in model.modules() if any(part is head for part in one.modules())] or [head]
        self._made = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have it give logits in parts inside.

        Raises:
            WorkloadError: the loss needs them whole, or something else changes what the layer does.
        """
        if "forward" in vars(self._head):
            raise WorkloadError(
                "loss_head=chunked takes the place of the head's forward, and something else has replaced that "
                "already. Use loss_head=full, or delete the head's own attribute forward."
            )
        for module in filter(has_backward_hooks, self._around):
            raise WorkloadError(
                f"loss_head=chunked never has the gradient of the logits whole, and a backward hook of a "
                f"{type(module).__name__} that returns logits asks for it. Use loss_head=full, or remove the hook."
            )
        self._head.forward = InsteadOfForward(self._head, self._logits)  # type: ignore[method-assign]
        try:
            yield
        except WholeLogitsNeeded as error:
            raise WorkloadError(
                f"loss_head=chunked never has the logits whole, and the loss or the model asks for their {error}. Use "
                "loss_head=full, or take the loss by torch.nn.functional.cross_entropy, or CrossEntropyLoss, alone."
            ) from None
        finally:
            del self._head.forward

    def finished(self) -> None:
        """A forward of the model is over.

        Raises:
            WorkloadError: it did not call the head, so nothing was computed in parts.
        """
        if not self._made:
            raise WorkloadError(
                "loss_head=chunked has no effect: forward does not call the last torch.nn.Linear of the model. Use "
                "loss_head=full, or name the layer that forward calls in Workload(head=...)."
            )

    def _logits(self, input: Tensor) -> Logits:
        self._made = True
        return logits_of(self._head, input)


class InsteadOfForward:
    """Takes the place of a module's ``forward``; a copy of that module, also one that was pickled, has its own."""

    def __init__(self, module: nn.Module, called: Callable[..., Any]) -> None:
        self._module, self._called = module, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch."""
        return self._called(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._module).forward, self._module)  # which is read without this package
