"""Times of updates, which trials do not take: from the steps of training."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from ...memory.tensors import tensors_in
from ...shared.knobs.step import has_narrow_weights
from ...shared.messages import Sample
from ...shared.settings import Settings
from ...shared.step_times import UPDATE
from .live_model import LiveModel

_KEPT = 20


class UpdateTimes:
    """Times of updates: from those that training performs, because trials perform none."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], deque[float]] = {}
        self._moved_bytes: dict[tuple[object, ...], int] = {}
        self._weights: object = None  # of which these are

    def note(self, live: LiveModel, steps: Iterable[Sample]) -> None:
        """Take in steps of training, and how many bytes of weights, gradients and state each update goes through.

        Not the first one of a kind, which makes the optimizer's state, and on a GPU loads kernels.
        """
        took_s = [one.times[UPDATE] for one in steps if one.done and not one.skipped and one.times]
        if not took_s:
            return
        kind = _kind(live.settings)
        if kind not in self._known:
            del took_s[0]
        known = self._known.setdefault(kind, deque(maxlen=_KEPT))
        known.extend(took_s)
        if live.parameters is not self._weights:
            self._weights = live.parameters
            self._moved_bytes.clear()
        if known and kind not in self._moved_bytes:
            self._moved_bytes[kind] = 2 * sum(param.nbytes for param in live.parameters) + state_bytes(live)

    def of(self, settings: Settings) -> float | None:
        """Return the median of the latest ones of that kind, in seconds; ``None`` where there were none but a first."""
        known = self._known.get(_kind(settings), ())
        return statistics.median(known) if known else None

    def scaled(self, moved_bytes: int) -> float | None:
        """Return the seconds of an update that goes through so many bytes, from the nearest known one."""
        known = [(abs(moved_bytes - bytes_), kind) for kind, bytes_ in self._moved_bytes.items()]
        if not known:
            return None
        _, kind = min(known, key=lambda one: one[0])
        return statistics.median(self._known[kind]) * moved_bytes / self._moved_bytes[kind]


def state_bytes(live: LiveModel) -> int:
    """Return the bytes of the state of the optimizer in use."""
    return sum(tensor.nbytes for tensor in tensors_in(list(live.optimizer.state.values())))


def leaving_bytes(live: LiveModel) -> int:
    """Return how many of these are on the device, as what waits in host memory is not."""
    return max(0, state_bytes(live) - live.recomputing.host_bytes.host_state_bytes)


def _kind(settings: Settings) -> tuple[object, ...]:
    """Return what the time of an update depends on."""
    how = settings.precision == "fp16", has_narrow_weights(settings)
    clipped = settings.clip_norm is not None
    where = settings.shard_optimizer, settings.offload_optimizer
    return settings.optimizer, settings.optimizer_impl, *where, clipped, how
