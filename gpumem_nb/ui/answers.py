"""The buttons that answer: doctor, tuner, what fits and export. A press asks; one answer is open at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import ipywidgets

from ..report.tables import words_html
from ..shared.answers import Progress
from ..shared.settings import Settings
from .controls import NOTHING_LOADED
from .doctor_view import DoctorView
from .knob_tip import KnobTip
from .ladder_view import LadderView
from .search_view import SearchView
from .tune_view import FitsView, TuneView
from .widgets import Ask, box, button

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..session import Session

_REPORT = "report.html"


class ExportView(SearchView):
    """Asks the session for a script."""

    def __init__(self, session: Session, search: Ask, ask: Ask, close: Callable[[], object]) -> None:
        self._path = ipywidgets.Text(
            value="train.py", description="file", tooltip="where to write it, from the notebook's folder"
        )
        self._ddp = ipywidgets.Checkbox(description="for torchrun, without Horovod", indent=False)
        tip = "one plain script that trains as this session does"
        page = "a page of this session to hand on: charts, runs, findings"
        questions = [
            ("Write the script", "file-code-o", tip, self._write),
            (f"Write {_REPORT}", "file-text-o", page, self._report),
        ]
        self._settings: Settings | None = None  # of the script that was written last
        super().__init__(session, "Export", [self._path, self._ddp], questions, search, ask, close)

    def open(self) -> None:
        """Show what was written last, or write the script: a press after a flip does so again."""
        if self._settings != self._session.settings:
            self.forget()
        super().open()

    def _write(self, progress: Progress) -> str:
        progress("writing the script", 0.5)
        self._settings = self._session.settings
        return self._told(self._session.export(self._path.value.strip(), ddp=self._ddp.value))

    def _report(self, progress: Progress) -> str:
        progress(f"writing {_REPORT}", 0.0)
        return self._told(self._session.report(_REPORT, progress))

    def _told(self, written: object) -> str:
        """Show what is said of a file after the first line, and return that line."""
        first, _, more = str(written).partition("\n")
        shown = ipywidgets.HTML(words_html(more))
        shown.add_class("gpumem-written")
        self.show([shown] if more else [])
        return first


class Answers:
    """Buttons, and the views that they open.

    Attributes:
        buttons: one for each.
        views: what they open. One is open at a time, in a place that ``tip`` makes free; of the others a line stays.
    """

    def __init__(self, session: Session, search: Ask, ask: Ask, tip: KnobTip) -> None:
        self._session = session
        self._tip = tip
        buttons = {
            ("Doctor", "stethoscope", "what is wrong, and how to fix it"): DoctorView,
            ("Tune", "bolt", "the fastest settings that fit"): TuneView,
            ("What fits", "th", "the largest micro-batch under each precision and checkpointing"): FitsView,
            ("Ladder", "sort-amount-desc", "which changes free memory, one on top of the other"): LadderView,
            ("Export", "file-code-o", "a plain script to take home"): ExportView,
        }
        self._views: list[SearchView] = [view(session, search, ask, self._close) for view in buttons.values()]
        self._buttons = [
            button(*words, partial(self._press, view)) for words, view in zip(buttons, self._views, strict=True)
        ]
        self.buttons = box(self._buttons, "gpumem-answers")
        self.views = ipywidgets.VBox([view.widget for view in self._views])

    def follow(self) -> None:
        """Switch off what cannot be asked."""
        why_not = self._session.ended or ("" if self._session.workload else NOTHING_LOADED)
        for view, pressed in zip(self._views, self._buttons, strict=True):
            view.follow(why_not)
            pressed.disabled = bool(why_not) and not view.is_open

    def close(self) -> None:
        """End what is under way."""
        for view in self._views:
            view.close()

    def _press(self, view: SearchView) -> None:
        if view.is_open:
            self._close()
            return
        self._close()
        self._tip.explain("")
        view.open()

    def _close(self) -> None:
        for view in self._views:
            view.fold()
