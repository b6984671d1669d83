"""The buttons that answer: doctor, tuner and export, each of which opens a box below the controls."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..shared.answers import Progress
from .controls import NOTHING_LOADED
from .doctor_view import DoctorView
from .search_view import SearchView
from .tune_view import TuneView
from .widgets import Ask, box, toggle

if TYPE_CHECKING:
    from ..session import Session

_REPORT = "report.html"


class ExportView(SearchView):
    """Asks the session for a script."""

    def __init__(self, session: Session, search: Ask, ask: Ask) -> None:
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
        super().__init__(session, [self._path, self._ddp], questions, search, ask)

    def _write(self, progress: Progress) -> str:
        progress("writing the script", 0.5)
        self.show([_words(self._session.export(self._path.value.strip(), ddp=self._ddp.value))])
        return ""

    def _report(self, progress: Progress) -> str:
        progress(f"writing {_REPORT}", 0.0)
        self.show([_words(self._session.report(_REPORT, progress))])
        return ""


def _words(written: Any) -> Any:
    shown = ipywidgets.HTML(f"<pre>{escape(str(written))}</pre>")
    shown.add_class("gpumem-written")
    return shown


class Answers:
    """Toggles and what they open.

    Attributes:
        buttons: the toggles.
        opened: what they open, closed at first; that which was opened last is on top.
    """

    def __init__(self, session: Session, search: Ask, ask: Ask) -> None:
        self._session = session
        views: dict[tuple[str, str, str], SearchView] = {
            ("Doctor", "stethoscope", "what is wrong, and how to fix it"): DoctorView(session, search, ask),
            ("Tune", "bolt", "the fastest settings that fit, and what fits"): TuneView(session, search, ask),
            ("Export", "file-code-o", "a plain script to take home"): ExportView(session, search, ask),
        }
        self._views = list(views.values())
        self._presses = 0
        self.buttons = box([self._toggle(*words, view) for words, view in views.items()], "gpumem-answers")
        self.opened = ipywidgets.VBox([view.widget for view in self._views])

    def follow(self) -> None:
        """Switch off what cannot be asked."""
        why_not = self._session.ended or ("" if self._session.workload else NOTHING_LOADED)
        for view in self._views:
            view.follow(why_not)

    def close(self) -> None:
        """End what is under way."""
        for view in self._views:
            view.close()

    def _toggle(self, label: str, icon: str, tip: str, view: SearchView) -> Any:
        pressed = toggle(label, icon, tip)
        layout = view.widget.layout
        layout.display = "none"

        def open_or_close(change: dict[str, Any]) -> None:
            layout.display = "" if change["new"] else "none"
            if change["new"]:
                self._presses += 1
                layout.order = str(-self._presses)  # CSS's: nothing is drawn anew
                view.was_opened()

        pressed.observe(open_or_close, names="value")
        return pressed
