"""The loss that a model returns by itself, as Hugging Face models do, averaged over the tokens of a whole step."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ...shared.errors import WorkloadError

_IGNORED = -100  # labels of this value count for nothing

# transformers' names of losses that divide by num_items_in_batch: whether a token is the label of the one before it.
_SHIFTED = {
    "ForCausalLM": True,
    "ForConditionalGeneration": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
}


class StepLoss(ABC):
    """``loss(model, batch)`` that looks at all micro-batches of a step before the first is trained.

    Attributes:
        together: whether it divides by what the steps of all ranks hold; :class:`~.step_items.StepItems` counts that.
    """

    together = False

    @abstractmethod
    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch."""

    @abstractmethod
    def begin(self, model: Any, batches: Iterable[Any], count: int) -> Iterable[Any]:
        """The ``count`` micro-batches of a step that begins; if their items have to be counted they are fetched now."""

    @abstractmethod
    def alone(self) -> None:
        """Each micro-batch is a step by itself from now on, as in an evaluation, until a step begins."""

    @property
    def items(self) -> int | None:
        """Return what the step that began holds on this rank; ``None`` where nothing is counted."""
        return None

    def hold(self, items: int, ranks: int) -> None:
        """Divide by ``items``, which the steps of so many ranks hold together."""
        raise NotImplementedError


class OwnLoss(StepLoss):
    """``loss(model, batch)`` of a model that is given its labels.

    Such losses are means over tokens, and micro-batches hold different numbers of them. A model that takes
    ``num_items_in_batch`` divides by that instead: so the mean of a rank's step is the same however it is split.

    Attributes:
        by_key: whether the model returned it in a dict that has no attributes.
    """

    def __init__(self) -> None:
        self.by_key = False
        self._items: Any = None
        self._divides_by_items: bool | None = None  # known once a step has several micro-batches

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch."""
        items = {} if self._items is None else {"num_items_in_batch": self._items}
        try:
            output = model(**batch, **items) if isinstance(batch, Mapping) else model(batch)
        except (TypeError, AttributeError) as error:
            if not isinstance(batch, tuple | list):
                raise
            raise WorkloadError(
                f"No loss was named, so the model was given the whole micro-batch, a {type(batch).__name__} of "
                f"{len(batch)}, and failed ({type(error).__name__}: {error}). Name the loss, e.g. "
                "loss=torch.nn.functional.cross_entropy: then the model is given the inputs alone."
            ) from error
        self.by_key = isinstance(output, Mapping) and not hasattr(output, "loss")
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise WorkloadError(
                "No loss was named and the model returned none. Name one (loss=...), or give the model its labels."
            )
        return loss

    def alone(self) -> None:
        """Let the model take the mean over the tokens of each micro-batch."""
        self._items = None

    def begin(self, model: Any, batches: Iterable[Any], count: int) -> Iterable[Any]:
        """The micro-batches of a step that begins; if their tokens have to be counted they are all fetched now."""
        self._items = None
        if count == 1:
            return batches
        if self._divides_by_items is None:
            self._divides_by_items = _takes_items(model)
        if not self._divides_by_items:
            return batches
        fetched = list(batches)
        if all(isinstance(batch, Mapping) and "labels" in batch for batch in fetched):
            # The step divides by the number of micro-batches.
            self._items = sum(_labels_that_count(batch, model) for batch in fetched) / count
        return fetched


def labels_counted(model: Any) -> str:
    """Return which labels of a step count where a model divides its own loss by their number.

    ``shifted``: those of all tokens but the first; ``labels``: all; empty for a model that does not.
    """
    if not _takes_items(model):
        return ""
    return "shifted" if _is_shifted(model) else "labels"


def micro_batches(loss: Any, model: Any, batches: Iterable[Any], count: int) -> Iterable[Any]:
    """Return the micro-batches of one step, which a loss that averages over the whole step looks at first."""
    return loss.begin(model, batches, count) if isinstance(loss, StepLoss) else batches


def each_alone(loss: Any) -> None:
    """Let each micro-batch be a step by itself from now on."""
    if isinstance(loss, StepLoss):
        loss.alone()


def _takes_items(model: Any) -> bool:
    if _kind(model) not in _SHIFTED or getattr(model, "accepts_loss_kwargs", True) is False:
        return False
    parameters = inspect.signature(model.forward).parameters.values()
    return any(one.name == "num_items_in_batch" or one.kind is one.VAR_KEYWORD for one in parameters)


def _kind(model: Any) -> str:
    """Return what transformers calls the model's loss; where it has no name, that is a causal language model's."""
    return (model.loss_type or "ForCausalLM") if hasattr(model, "loss_type") else ""


def _labels_that_count(batch: Mapping[str, Any], model: Any) -> Any:
    labels = batch["labels"][..., 1:] if _is_shifted(model) else batch["labels"]
    return batch.get("shift_labels", labels).ne(_IGNORED).sum()


def _is_shifted(model: Any) -> bool:
    # A decoder that is fed by an encoder gets its inputs shifted, not its labels.
    return _SHIFTED[_kind(model)] and not getattr(model.config, "is_encoder_decoder", False)
