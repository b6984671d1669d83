"""The buttons that answer: each opens a box below the controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from .controls import NOTHING_LOADED, box
from .steered import Steered
from .tune_view import TuneView

Ask = Callable[[Callable[[], object]], object]


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
        self._tune = TuneView(session, search, ask)
        views = (("Tune", "bolt", "the fastest settings that fit, and what fits", self._tune.widget),)
        toggles = [self._toggle(*view) for view in views]
        self._toggles = toggles
        self.buttons = box(toggles, "gpumem-answers")
        self.boxes = [view[-1] for view in views]

    def follow(self) -> None:
        """Switch off what cannot be asked."""
        why_not = self._session.ended or ("" if self._session.workload else NOTHING_LOADED)
        self._tune.follow(why_not)

    def close(self) -> None:
        """End what is under way."""
        self._tune.close()

    def _toggle(self, label: str, icon: str, tip: str, view: Any) -> Any:
        toggle = ipywidgets.ToggleButton(description=label, icon=icon, tooltip=tip)
        view.layout.display = "none"

        def open_or_close(change: dict[str, Any]) -> None:
            view.layout.display = "" if change["new"] else "none"

        toggle.observe(open_or_close, names="value")
        return toggle
