"""The micro-batches of a step, and what a loss divides by that averages over the whole step on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...memory.device import Device
from ..data.stream import Stream
from ..link.communicator import here
from ..link.signals import interruptible
from .live_model import LiveModel
from .own_loss import StepLoss, micro_batches


class StepItems:
    """Fetches the micro-batches of one rank's steps.

    A loss that averages over the tokens of the step on all ranks has to know their number before the first micro-batch
    is trained. So all ranks fetch their whole step, and add up what it holds in one reduction of two numbers; other
    losses take micro-batches one by one, and cost no reduction.
    """

    def __init__(self, live: LiveModel, stream: Stream, device: Device) -> None:
        self._live, self._stream, self._device = live, stream, device
        self._fetched: list[Any] | None = None

    @property
    def counted(self) -> bool:
        """Return whether the loss divides by what the steps of all ranks hold."""
        return isinstance(self._live.loss, StepLoss) and self._live.loss.together

    def count(self, failed: bool) -> None:
        """Fetch and count, all ranks together; one that has ``failed`` before takes part with nothing.

        Raises:
            Separated: the ranks came apart. What fetching raises comes as it is, once the others have their number.
        """
        loss: Any = self._live.loss
        self._fetched, own = None, None
        try:
            if not failed:
                with interruptible():
                    self._fetched = list(self._begun())
                    own = loss.items
        finally:
            with self._device.exempt():
                rows = here().numbers([own or 0, own is not None], "items of a step")
            if any(counted for _, counted in rows):
                loss.hold(sum(items for items, _ in rows), len(rows))

    def batches(self) -> Iterable[Any]:
        """Return the micro-batches of the step."""
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            return self._begun()
        return (fetched.pop(0) for _ in range(len(fetched)))  # none is held longer than it is trained

    def _begun(self) -> Iterable[Any]:
        count = self._live.settings.accumulation_steps
        batches = self._stream.micro_batches(self._live.settings.batch_size, count)
        return micro_batches(self._live.loss, self._live.model, batches, count)
