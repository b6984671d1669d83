"""Asks rank 0 for what is trained, and a dry run what it would need on GPUs that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planning import cold
from ...planning.cold_table import ColdPredictions
from ...planning.prediction import Prediction
from ...shared.answers import Progress
from ...shared.workload import Splits
from .. import compatibility
from ..cluster import AsksRanks, Cluster


class Elsewhere(AsksRanks):
    """Predicts what the model that is trained here, as it is now, would need on other GPUs."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting

    def predict(
        self,
        knobs: dict[str, Any],
        gpu: str | Sequence[str] | None,
        memory: str | int | None,
        ranks: int | None,
        progress: Progress,
    ) -> Prediction | ColdPredictions:
        """Return what the present settings with these changes would need there.

        Raises:
            InvalidInput: an unknown knob or GPU, or a value that cannot be used.
            WorkloadError: nothing is loaded, or it cannot be sent to another process or be run without memory.
        """
        self._foreground.check_loaded()
        together = len(self._ranks) if ranks is None else ranks
        settings = compatibility.asked(self._training.settings, knobs, together)
        splits: Splits = self._predicting.splits()
        return cold.of_packed(self._packed, settings, gpu, memory, together, progress, splits=splits)

    def _packed(self) -> bytes:
        packed: bytes = self._foreground.call("hollow", ranks=[0])[0]
        return packed
