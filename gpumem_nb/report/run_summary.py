"""What one stretch of training measured, as a sentence and as data."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..shared.categories import CATEGORIES
from ..shared.messages import Sample
from ..shared.settings import Settings
from ..shared.step_times import UNKNOWN
from ..shared.units import format_bytes, format_rate
from .configurations import Tried
from .evaluation import Evaluation
from .speed import Speed

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """What one stretch of training measured. Printed, it says what ``%hvd_runs`` has of its last settings.

    Attributes:
        steps: optimizer steps done in it.
        notes: what happened on the way (an out-of-memory error that was survived, for example).
        evaluations: those on the validation data.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        settings: Mapping[int, Settings],
        configuration: Callable[[int], Tried | None],
        notes: Sequence[str],
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        self._samples = list(samples)
        self._settings = settings
        self.notes = list(notes)
        self.evaluations = list(evaluations)
        self._done = [sample for sample in self._samples if sample.done]
        self.steps = len({sample.step for sample in self._done})
        latest_first = (configuration(sample.settings_id) for sample in reversed(self._done))
        now = next(filter(None, latest_first), None)  # autotune's are none
        self._samples_per_s, self._peak_bytes = (now.samples_per_s, now.peak_bytes) if now else self._own_figures()

    def frame(self) -> pd.DataFrame:
        """One row per rank and step; bytes, seconds and samples/s as the column names say.

        The columns of categories hold their bytes at the peak of the steps that were recorded; of others nothing.
        ``data_s``, ``copy_s`` and so on are the parts of ``step_s`` (:data:`gpumem_nb.shared.step_times.MEANING`; on
        GPUs of the device's time for it), and in ``hidden_s`` of backward gradients were on their way.
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

    def _own_figures(self) -> tuple[float | None, int | None]:
        by_step: dict[int, float] = defaultdict(float)
        for sample in self._done:
            by_step[sample.step] += sample.samples_per_s
        speed = Speed.of(list(by_step.values()))
        return speed.median if speed else None, max((sample.live_peak_bytes for sample in self._done), default=None)

    def __str__(self) -> str:
        if not self.steps:
            return "\n".join(["No step was done.", *self.notes])
        last = [sample for sample in self._done if sample.step == self._done[-1].step]
        losses = [sample.loss for sample in last if sample.loss is not None]
        text = f"{self.steps} steps on {len(last)} ranks"
        if losses:
            text += f": loss {statistics.fmean(losses):.4g}"
        speed, peak = format_rate(self._samples_per_s), format_bytes(self._peak_bytes)
        measured = f"{text}, {speed} samples/s, live peak {peak}."
        return "\n".join([measured, *map(str, self.evaluations[-1:]), *self.notes])

    __repr__ = __str__
