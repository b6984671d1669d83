"""The interface of a log's target, and the names under which numbers are logged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from ...report.configurations import Tried
from ...report.evaluation import Evaluation
from ...shared.messages import Sample
from ..history import Event

_GIB = 2**30


class Target(Protocol):
    """The destination of a log. Used by one thread; whatever a method raises ends the log, and is told.

    Times are seconds since 1970.

    Attributes:
        about: what is written where, and how to look at it, in one line.
    """

    about: str

    def new_run(self, number: int) -> None:
        """Steps of something else follow, from the first on; runs count from 1, and the first is there already."""

    def go_on_from(self, step: int) -> None:
        """This step follows: what an earlier log in the same place has of it and of later ones is of no worth."""

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """The settings of the steps after this one."""

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """One step: the samples of all ranks, perhaps of one that was discarded."""

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """Loss and metrics on the validation data."""

    def event(self, time_s: float, event: Event) -> None:
        """A flip, an error, or whatever else is marked."""

    def flush(self) -> None:
        """Let what was written be on the disk."""

    def close(self) -> None:
        """Nothing follows."""


def of_step(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of one finished step by their tags: those of each rank, and one of all where one is wanted."""
    losses = [sample.loss for sample in samples if sample.loss is not None]
    tags: dict[str, float] = {"loss/mean": statistics.fmean(losses)} if losses else {}
    tags["samples_per_s/all"] = sum(sample.samples_per_s for sample in samples)
    tags["step_s/slowest"] = max(sample.step_s for sample in samples)
    for sample in samples:
        of_rank = {
            "loss": sample.loss,
            "step_s": sample.step_s,
            "memory/live_peak_gib": sample.live_peak_bytes / _GIB,
            "memory/reserved_peak_gib": sample.reserved_peak_bytes / _GIB,
            "memory/device_used_gib": None if sample.device_used_bytes is None else sample.device_used_bytes / _GIB,
        }
        tags |= {f"{name}/rank{sample.rank}": value for name, value in of_rank.items() if value is not None}
    return tags


def of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return the numbers of an evaluation by their tags."""
    return {f"eval/{name}": value for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items()}


def of_settings(tried: Tried) -> dict[str, float]:
    """Those settings that are numbers, by their tags."""
    numbers = {name: value for name, value in tried.settings.as_dict().items() if isinstance(value, int | float)}
    return {f"settings/{name}": float(value) for name, value in numbers.items()}
