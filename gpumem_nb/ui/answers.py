"""The buttons that answer: each opens a box below the controls."""

from __future__ import annotations

from typing import Any

import ipywidgets

from .controls import NOTHING_LOADED, box
from .doctor_view import DoctorView
from .export_view import ExportView
from .search_view import Ask, SearchView
from .steered import Steered
from .tune_view import TuneView


class Answers:
    """Toggles and what they open.

    Attributes:
        buttons: the toggles.
        opened: what they open, closed at first; that which was opened last is on top.

    Args:
        session: whom to ask.
        search: has something done that may take long; ``ask`` is for what is done at once. Of either somebody may be
            told that it was refused.
    """

    def __init__(self, session: Steered, search: Ask, ask: Ask) -> None:
        self._session = session
        views: dict[tuple[str, str, str], SearchView] = {
            ("Doctor", "stethoscope", "what is wrong, and what mends it"): DoctorView(session, search, ask),
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
        toggle = ipywidgets.ToggleButton(description=label, icon=icon, tooltip=tip)
        layout = view.widget.layout
        layout.display = "none"

        def open_or_close(change: dict[str, Any]) -> None:
            layout.display = "" if change["new"] else "none"
            if change["new"]:
                self._presses += 1
                layout.order = str(-self._presses)  # CSS's: nothing is drawn anew
                view.was_opened()

        toggle.observe(open_or_close, names="value")
        return toggle
