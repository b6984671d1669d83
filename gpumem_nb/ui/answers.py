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
        boxes: what they open, closed at first.

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
        toggles = [_toggle(*words, view.widget) for words, view in views.items()]
        self.buttons = box(toggles, "gpumem-answers")
        self.boxes = [view.widget for view in self._views]

    def follow(self) -> None:
        """Switch off what cannot be asked."""
        why_not = self._session.ended or ("" if self._session.workload else NOTHING_LOADED)
        for view in self._views:
            view.follow(why_not)

    def close(self) -> None:
        """End what is under way."""
        for view in self._views:
            view.close()


def _toggle(label: str, icon: str, tip: str, opened: Any) -> Any:
    toggle = ipywidgets.ToggleButton(description=label, icon=icon, tooltip=tip)
    opened.layout.display = "none"

    def open_or_close(change: dict[str, Any]) -> None:
        opened.layout.display = "" if change["new"] else "none"

    toggle.observe(open_or_close, names="value")
    return toggle
