"""The panel's tuner: what to look for, and what was found with a button that applies it."""

from __future__ import annotations

from typing import Any

import ipywidgets

from ..planning.tuning.result import TuneResult
from ..shared.errors import InvalidInput
from ..shared.progress import Progress
from .apply_view import ApplyView
from .fits_view import fits_view
from .search_view import Ask, SearchView
from .steered import Steered


class TuneView(SearchView):
    """Asks the session to tune, and for what fits.

    Args:
        session: what is tuned.
        search: has something done that may take long.
        ask: the same of what is done at once.
    """

    def __init__(self, session: Steered, search: Ask, ask: Ask) -> None:
        self._budget = _text("budget", "the limit", "what may be reserved on a rank, such as 512MiB")
        self._batch = _text("global batch", "as it is", "samples of a step of all ranks")
        self._seconds = _text("seconds", "60", "how long it may take, about")
        self._any = ipywidgets.Checkbox(description="change the mathematics", indent=False)
        self._any.tooltip = "consider fp16 and bf16 too, which train another way"
        tune = ("Find the fastest", "bolt", "look for the fastest settings that fit", self._tune)
        tip = "the largest micro-batch under each precision and checkpointing"
        super().__init__(
            session,
            [self._budget, self._batch, self._seconds, self._any],
            [tune, ("What fits?", "th", tip, self._what_fits)],
            search,
            ask,
        )

    def _tune(self, progress: Progress) -> str:
        batch, seconds = self._batch.value.strip(), self._seconds.value.strip() or "60"
        if batch and not batch.isdecimal():
            raise InvalidInput(f"global batch {batch!r} cannot be used: write a whole number, or leave it empty.")
        try:
            longest_s = float(seconds)
        except ValueError:
            raise InvalidInput(f"{seconds!r} are no seconds: write a number, such as 60.") from None
        result = self._session.tune(
            budget=self._budget.value.strip() or None,
            global_batch=int(batch) if batch else None,
            seconds=longest_s,
            same_mathematics=not self._any.value,
            progress=progress,
        )
        self.show(list(self._parts(result)))
        return result.why

    def _parts(self, result: TuneResult) -> list[Any]:
        parts: list[Any] = [ipywidgets.HTML(result.table_html())]
        if result.measured:
            from .tune_figure import tuned_widget  # plotly takes long to import

            parts.insert(0, tuned_widget(result))
        if result.typed:
            parts.insert(0, ApplyView(result, self.ask).view)
        return parts

    def _what_fits(self, progress: Progress) -> str:
        self.show([fits_view(self._session.what_fits(progress=progress), self.ask)])
        return ""


def _text(label: str, placeholder: str, tip: str) -> Any:
    return ipywidgets.Text(description=label, placeholder=placeholder, tooltip=tip, continuous_update=False)
