"""The cause of lost time, with a button that makes the changes that would help."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from html import escape

import ipywidgets

from ..report.bottleneck import Bottleneck
from .controls import box
from .region import Region
from .steered import Steered

_AUTOTUNED_S = 60.0  # that it can be read what autotune found
_LOOK_EVERY_S = 2.0  # a sentence whose numbers change more often cannot be read


class BottleneckLine:
    """A line of the panel; empty while there is nothing to say.

    Attributes:
        widget: the sentence and the button.

    Args:
        session: whose steps are judged.
        ask: runs an action, and shows why where it is refused.
    """

    def __init__(self, session: Steered, ask: Callable[[Callable[[], object]], object]) -> None:
        self._session = session
        self._verdict: Bottleneck | None = None
        self._looked_s = -_LOOK_EVERY_S
        self._looked_at: tuple[object, ...] = ()
        self._sentence = Region(role="status", label="what time is lost to")
        self._sentence.add_class("gpumem-verdict")
        self._button = ipywidgets.Button(tooltip="change this now")
        self._button.on_click(lambda _: ask(partial(self._apply, self._verdict)))
        self.widget = box([self._sentence, self._button], "gpumem-lost")
        self._show()

    def follow(self) -> None:
        """Look again, if enough has happened since."""
        history, settings = self._session.history, self._session.settings
        state = (history, history.version, settings)
        now_s = time.monotonic()
        waits = now_s - self._looked_s < _LOOK_EVERY_S and self._looked_at[-1:] == (settings,)
        if waits or state == self._looked_at:
            return
        self._looked_s, self._looked_at = now_s, state
        self._verdict = self._session.verdict()
        self._show()

    def _show(self) -> None:
        history, verdict = self._session.history, self._verdict
        said = history.autotuned
        if said and history.now_s() - said.time_s < _AUTOTUNED_S:
            verdict = None  # there is room for one of them
            self._sentence.html = f"<p>{escape(said.text)}</p>"
        else:
            self._sentence.html = f"<p>{escape(verdict.sentence)}</p>" if verdict else ""
        self._button.layout.display = "" if verdict and verdict.changes else "none"
        self._button.description = f"Apply {verdict.typed}" if verdict else ""

    def _apply(self, verdict: Bottleneck | None) -> None:
        """As it was when the button was pressed: others may wait to be done before."""
        if verdict:
            self._session.set(**verdict.changes)
