"""One start's ranks, with what works beside them, as all that asks them takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cluster.ranks import Ranks
from .foreground import Foreground
from .history import History
from .origin import Origin
from .policy import Policy
from .record import Record
from .snapshot_plan import SnapshotPlan
from .training import Training

if TYPE_CHECKING:
    from .questions.inspection import Inspection
    from .questions.predicting import Predicting


@dataclass
class Cluster:
    """Ranks from their start to their end, what works beside them, and what of the session outlives them."""

    ranks: Ranks
    history: History
    training: Training
    foreground: Foreground
    policy: Callable[[], Policy]
    origin: Origin
    record: Record
    snapshots: SnapshotPlan
    inspection: Inspection = field(init=False)
    predicting: Predicting = field(init=False)


class AsksRanks:
    """The base of what asks the ranks of one cluster: those that run when it is made, and never others."""

    def __init__(self, cluster: Cluster) -> None:
        self._ranks = tuple(cluster.ranks.infos)
        self._foreground = cluster.foreground
        self._training = cluster.training
        self._history = cluster.history
        self._policy = cluster.policy
        self._origin = cluster.origin
        self._record = cluster.record
        self._snapshots = cluster.snapshots
