"""The interface of a session that a panel shows and steers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..kernel.history import History
from ..kernel.policy import Policy
from ..planning.doctor.diagnosis import Diagnosis
from ..planning.prediction import Prediction
from ..planning.tuning.result import TuneResult
from ..planning.what_fits import WhatFits
from ..report.bottleneck import Bottleneck
from ..report.runs import Runs
from ..report.waits import WaitReport
from ..shared.answers import Progress
from ..shared.messages import RankInfo
from ..shared.settings import Settings
from ..shared.workload import WorkloadInfo


class Steered(Protocol):
    """A session, as far as a panel knows it; ``gpumem_nb.session.Session`` is one."""

    @property
    def history(self) -> History:
        """Return what has been measured."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Return who the ranks are, in rank order."""

    @property
    def runs(self) -> Runs:
        """Every configuration tried."""

    @property
    def runs_version(self) -> tuple[object, ...]:
        """Another one whenever they may have changed."""

    @property
    def workload(self) -> WorkloadInfo | None:
        """Return what is loaded."""

    @property
    def settings(self) -> Settings:
        """The knobs as they are now."""

    @property
    def policy(self) -> Policy:
        """Return what the session does by itself."""

    @property
    def doing(self) -> str:
        """Return what is happening, in one line of words."""

    @property
    def wait_report(self) -> WaitReport | None:
        """Return what takes long, and which ranks wait for which; ``None`` when nothing does."""

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not answered yet what training asked of them."""

    @property
    def playing(self) -> bool:
        """Return whether training runs."""

    @property
    def busy(self) -> bool:
        """Return whether the notebook waits for the ranks."""

    @property
    def ended(self) -> str:
        """Return why the session is over, in words; empty while it lives."""

    def set(self, **knobs: Any) -> Settings:
        """Change knobs."""

    def predict(self, **knobs: Any) -> Prediction:
        """Return what the present settings with these changes would need."""

    def foreseen(self, settings: Settings | None = None) -> Prediction | None:
        """Return what was predicted last for these settings, or the present ones."""

    def peaks_by_batch(self, **knobs: Any) -> dict[int, int]:
        """Reserved bytes by ``batch_size``."""

    def largest_batch(self, **knobs: Any) -> int:
        """Return the largest ``batch_size`` that fits."""

    def tune(
        self,
        *,
        budget: str | int | None = None,
        global_batch: int | None = None,
        seconds: float = 60.0,
        knobs: Iterable[str] | None = None,
        same_mathematics: bool = True,
        progress: Progress = lambda what, done: None,
    ) -> TuneResult:
        """Look for the fastest settings that fit."""

    def what_fits(self, *, progress: Progress = lambda what, done: None) -> WhatFits:
        """Return the largest micro-batch that fits under each precision and checkpointing."""

    def export(self, path: str, *, ddp: bool = False) -> Any:
        """Write one plain script that trains as the session does; the answer says how to run it."""

    def doctor(self, progress: Progress = lambda what, done: None) -> Diagnosis:
        """Return what is wrong with it as it is."""

    def report(self, path: str, progress: Progress = lambda what, done: None) -> Any:
        """Write the session as one page."""

    def telling(self, progress: Progress) -> AbstractContextManager[None]:
        """Inside, ``progress`` is told what the ranks are doing while the notebook waits for them."""

    def verdict(self) -> Bottleneck | None:
        """Return what the time of a step is lost to."""

    def pin(self, wanted: bool = True) -> None:
        """Compare all further settings with those of now."""

    def play(self) -> None:
        """Train in the background until :meth:`pause`."""

    def pause(self) -> None:
        """Stop training after the steps under way."""

    def step(self) -> None:
        """Train one step in the background."""
