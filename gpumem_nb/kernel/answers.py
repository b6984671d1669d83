"""What was found out about what is loaded, until it may have changed."""

from __future__ import annotations

from ..report.instead import Instead
from ..report.rescue import Rescue
from ..shared.settings import Settings
from ..shared.workload import Splits, WorkloadInfo


class Answers:
    """Holds what to train with in place of settings that do not fit, so that it is the same wherever it is asked.

    Attributes:
        mean: what the ranks said of training micro-batches in parts; see ``Splits``. Nothing before they were asked.
    """

    def __init__(self) -> None:
        self.mean: list[bool | None] = []
        self._instead: dict[Settings, Instead] = {}

    def splits(self, workload: WorkloadInfo | None) -> Splits:
        """Return what is known of training micro-batches of this workload in parts."""
        mean = None if not self.mean or None in self.mean else all(self.mean)
        return Splits(bool(workload and workload.batch_norm), mean)

    def found(self, instead: Instead, rescue: Rescue | None) -> None:
        """Take in an answer, which the card of a step that was discarded gives, too."""
        self._instead[instead.failed] = instead
        if rescue and rescue.settings == instead.failed:
            rescue.instead = instead

    def instead_of(self, settings: Settings) -> Instead | None:
        """Return what was found in place of these settings; ``None`` where that is to be asked, or asked again."""
        found = self._instead.get(settings)
        return found if found and (found.offers or (found.tried and not found.unfinished)) else None

    @property
    def known(self) -> tuple[Instead, ...]:
        """Return all that was found."""
        return tuple(self._instead.values())

    def forget(self) -> None:
        """Drop all answers: the model may have changed."""
        self.mean, self._instead = [], {}
