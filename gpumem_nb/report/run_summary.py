"""The measurements of one stretch of training, as a sentence and as data, with its evaluations."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..shared.categories import CATEGORIES
from ..shared.messages import ChunkReply, Sample
from ..shared.settings import Settings
from ..shared.step_times import UNKNOWN
from ..shared.units import format_bytes, format_rate
from .speed import Speed, of_first_step
from .tables import Words


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Words):
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
        names = dict.fromkeys(name for of_rank in found for name in of_rank.sums)  # none of a rank without samples
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


def _total(values: Iterable[float]) -> float:
    """Return the sum; not a number where ranks have infinite ones of both signs, of which fsum makes an error."""
    try:
        return math.fsum(values)
    except ValueError:
        return math.nan


if TYPE_CHECKING:
    import pandas as pd


class Run(Words):
    """The measurements of one stretch of training; printed, it sums up these steps and no others.

    Attributes:
        steps: optimizer steps done in it.
        notes: what happened on the way (an out-of-memory error that was survived, for example).
        evaluations: those on the validation data.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        settings: Mapping[int, Settings],
        notes: Sequence[str],
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        self._samples = list(samples)
        self._settings = settings
        self.notes = list(notes)
        self.evaluations = list(evaluations)
        self._done = [sample for sample in self._samples if sample.done]
        self.steps = len({sample.step for sample in self._done})

    def frame(self) -> pd.DataFrame:
        """Return one row per rank and step; bytes, seconds and samples/s as the column names say.

        The columns of categories hold their bytes at the peak of the steps that were recorded; of others nothing.
        ``data_s``, ``copy_s`` and so on are the parts of ``step_s`` (:data:`gpumem_nb.shared.step_times.MEANING`; on
        GPUs of the device's time for it), and in ``hidden_s`` of backward gradients were on their way. ``first`` is
        true of the first step of what is loaded, which loads kernels: what a run says of samples/s leaves it out.
        """
        import pandas as pd

        left_out = ("settings_id", "event", "ledger", "times")
        columns = [field.name for field in dataclasses.fields(Sample) if field.name not in left_out]
        rows: list[dict[str, Any]] = []
        for sample in self._samples:
            row = {name: getattr(sample, name) for name in columns} | (sample.times or UNKNOWN).columns
            settings = self._settings[sample.settings_id]
            at_peak = sample.ledger.at_peak if sample.ledger else {}
            shares = {f"{category.replace(' ', '_')}_bytes": at_peak.get(category) for category in CATEGORIES}
            # A step's own learning rate stands in place of the knob's: cells and schedulers set it too.
            rows.append(row | settings.as_dict() | row | {"event": sample.event} | shares)
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        if not self.steps:
            return "\n".join(["No step was done.", *self.notes])
        ranks = len({sample.rank for sample in self._done})
        measured = f"{_count(self.steps, 'step')} on {_count(ranks, 'rank')}: {measured_by(self._done)}."
        first = of_first_step(self._done)
        return "\n".join([measured, *filter(None, [first]), *map(str, self.evaluations[-1:]), *self.notes])


def measured_by(samples: Sequence[Sample], peak_bytes: int | None = None) -> str:
    """Return the latest loss, the median throughput without a first step, and the highest live peak, in words.

    ``peak_bytes``: where it is known already.
    """
    rates: dict[int, float] = defaultdict(float)
    for sample in samples:
        if not sample.prepares:
            rates[sample.step] += sample.samples_per_s
    losses = [one.loss for one in samples if one.step == samples[-1].step and one.loss is not None]
    speed = Speed.of(list(rates.values()))
    loss = [f"loss {statistics.fmean(losses):.4g}"] if losses else []
    rate = f"{format_rate(speed.median if speed else None)} samples/s"
    peak = max(one.live_peak_bytes for one in samples) if peak_bytes is None else peak_bytes
    return ", ".join([*loss, rate, f"live peak {format_bytes(peak)}"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
