"""The result of an evaluation, put together from the results of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..shared.messages import ChunkReply
from ..shared.units import format_bytes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The model's results on the validation data.

    Attributes:
        step: optimizer steps done before it.
        loss: mean over all samples; a micro-batch counts with its number of samples.
        metrics: by name, averaged in the same way.
        samples: of the validation data, each seen once by one rank.
        seconds: of the slowest rank.
        live_peak_bytes: highest live bytes in it, worst rank; peaks of training steps do not include it.
        settings_id: the settings it ran under, as in samples.
        time_s: when it ended, since the session started.
    """

    step: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    live_peak_bytes: int
    settings_id: int = field(repr=False)
    time_s: float = field(repr=False)

    @classmethod
    def of_ranks(cls, replies: Sequence[ChunkReply]) -> Evaluation | None:
        """Return the evaluation of all ranks; ``None`` unless all of them evaluated."""
        found = [reply.evaluated for reply in replies if reply.evaluated]
        if not found or len(found) < len(replies):
            return None
        samples = sum(of_rank.samples for of_rank in found)
        names = next(of_rank.sums for of_rank in found if of_rank.samples)
        # A number that some rank did not give is not known: the ranks' metrics differ.
        means = {
            name: _total(of_rank.sums.get(name, math.nan) for of_rank in found if of_rank.samples) / samples
            for name in names
        }
        return cls(
            step=found[0].step,
            loss=means.pop("loss"),
            metrics=means,
            samples=samples,
            seconds=max(of_rank.seconds for of_rank in found),
            live_peak_bytes=max(of_rank.live_peak_bytes for of_rank in found),
            settings_id=found[0].settings_id,
            time_s=found[0].time_s,
        )

    @property
    def numbers(self) -> str:
        """Loss and metrics in words."""
        return ", ".join(f"{name} {value:.4g}" for name, value in {"loss": self.loss, **self.metrics}.items())

    def __str__(self) -> str:
        return (
            f"validation after step {self.step}: {self.numbers} "
            f"({self.samples:,} samples in {self.seconds:.1f} s, live peak {format_bytes(self.live_peak_bytes)})"
        )

    __repr__ = __str__


def _total(values: Iterable[float]) -> float:
    """Return the sum; not a number where ranks have infinite ones of both signs, of which fsum makes an error."""
    try:
        return math.fsum(values)
    except ValueError:
        return math.nan
