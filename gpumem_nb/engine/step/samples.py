"""From how a step ended to what is shown of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...shared.messages import Failure, Ledger, Reading, Sample
from .gradients import NoiseScale
from .step_clock import StepTimings


def _not_looked_at(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Looks:
    """Who looks into steps: at each micro-batch, and at averaged gradients where the update will be undone."""

    batch: Callable[[Any], None] = _not_looked_at
    gradients: Callable[[], None] = _not_looked_at


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a step on this rank and its measurements.

    ``discarded`` (it was undone) and ``last`` (the chunk ends with it) are the same on every rank, ``failure`` its own.
    ``loss`` is still on the device; ``reading`` is the memory at the step's end, with the step's peaks; ``ledger`` is
    there for recorded steps that were finished; ``timings`` are how long its parts took. ``lost`` is the share of
    gradients that compression took, still on the device, where that was measured. ``notes`` are sentences to be said
    once. ``scales`` are the loss scale before and after the update, on the device too, if there is one; ``squares``
    those of :class:`Voting`.
    """

    loss: Tensor | None
    failure: Failure | None
    discarded: bool
    last: bool
    reading: Reading
    ledger: Ledger | None
    timings: StepTimings
    lost: Tensor | None
    notes: tuple[str, ...]
    scales: Tensor | None
    squares: tuple[float, Tensor] | None

    @property
    def skipped(self) -> bool:
        """Return whether the loss scale was lowered instead of an update; asking waits for the device."""
        return self.scales is not None and bool(self.scales[1] < self.scales[0])


def begun(outcome: Outcome, **known: Any) -> Sample:
    """Return a sample of what the host knows when a step has ended; ``known``: what the step itself does not."""
    reading = outcome.reading
    return Sample(
        loss=None,
        step_s=outcome.timings.step_s,
        live_bytes=reading.live_bytes,
        live_peak_bytes=reading.live_peak_bytes,
        reserved_bytes=reading.reserved_bytes,
        reserved_peak_bytes=reading.reserved_peak_bytes,
        device_used_bytes=reading.device_used_bytes,
        ledger=outcome.ledger,
        **known,
    )


def completed(sample: Sample, outcome: Outcome, noise: NoiseScale, seen: int) -> Sample:
    """Return a sample with what was still on the device when its step ended; reading that waits for the device.

    Args:
        sample: of :func:`begun`.
        outcome: of the same step.
        noise: takes the step in, if it was measured.
        seen: how many samples the rank's gradient is the mean of.
    """
    scale, skipped, noise_scale = None, False, None
    times = outcome.timings.times()
    if times and outcome.timings.of_device:  # parts and step are of one clock; the host runs ahead of the device
        step_s = sum(times.seconds)
        speed = sample.samples_per_s * sample.step_s / step_s
        sample = dataclasses.replace(sample, step_s=step_s, samples_per_s=speed)
    if outcome.scales is not None:
        scale, after = outcome.scales.tolist()
        skipped = after < scale  # it is lowered instead of an update
    if outcome.squares is not None:
        own, average = outcome.squares
        noise_scale = noise.add(own, average.item(), seen, scale or 1.0)
    return dataclasses.replace(
        sample,
        loss=_number(outcome.loss),
        times=times,
        compression_error=None if skipped or outcome.discarded else _finite(outcome.lost),
        loss_scale=scale,
        skipped=skipped,
        noise_scale=noise_scale,
    )


def _number(value: Tensor | None) -> float | None:
    return None if value is None else value.item()


def _finite(value: Tensor | None) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None
