"""State that outlives the ranks: the origin of the workload, and what a restart has yet to bring back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..shared.seeds import DEFAULT_SEED
from ..shared.settings import Settings
from ..shared.workload import Workload


@dataclass(frozen=True)
class Unrestored:
    """The training at the moment when the ranks ended; kept until it is back, because a fault may cut a restart short.

    Attributes:
        generation: of the workload.
        snapshots: what can be gone back to, the newest first.
        named: the one of them that was named by hand: which weights are frozen is not for it to say.
        steps, settings: how far training was, and under what.
        up_to_date: whether the newest snapshot is of that very step.
    """

    generation: int
    snapshots: tuple[Path, ...]
    named: Path | None
    steps: int
    settings: Settings
    up_to_date: bool


@dataclass
class Origin:
    """The origin of the workload; outlives the ranks, so that a restart can load it again.

    Attributes:
        workload: what was loaded, with ``sent`` as it travelled then: a restart loads that again.
        options: those of a ready-made workload; ``None`` for any other.
        attached: the variables of what was attached instead, by their roles.
        trained_before: steps that their weights had been trained for then.
        not_kept: why the attached objects cannot be brought back.
        resumed_from: the file that training went on from.
        named: that file, if it was named by hand and no restart took it.
        unrestored: what a restart has yet to bring back.
        seed: of the initial weights, the order of the data and dropout.
        default_seed: of cells' random numbers, and of what is loaded next.
    """

    workload: Workload | None = None
    sent: bytes = b""
    options: dict[str, float] | None = None
    attached: dict[str, str | None] | None = None
    trained_before: int = 0
    not_kept: str = ""
    resumed_from: Path | None = None
    named: Path | None = None
    unrestored: Unrestored | None = None
    seed: int = DEFAULT_SEED
    default_seed: int = DEFAULT_SEED

    @property
    def loaded(self) -> bool:
        """Return whether there is something to load again; unlike training, this knows while ranks come and go."""
        return self.workload is not None or self.attached is not None
