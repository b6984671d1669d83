"""A button that trains with what the tuner found, in a cell's output and in the panel."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from ..planning.tuning.result import TuneResult
from ..report.tables import notes_html
from ..shared.errors import GpumemError
from . import threads
from .controls import box
from .region import Region

# The theme's variables, so that a change of theme shows at once; the panel has a style of its own.
_CSS = """<style>
.gpumem-tuned { display: flex; flex-wrap: wrap; align-items: center; gap: 0.2em 0.8em; overflow: visible; }
.gpumem-tuned .gpumem-css { display: none; }
.gpumem-tuned .gpumem-apply { width: auto; max-width: 100%; height: auto; min-height: 2.1em; line-height: 1.4;
  padding: 0.2em 0.8em; white-space: normal; font-weight: 600; }
.gpumem-tuned button:focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.gpumem-tuned .gpumem-came p { margin: 0.1em 0; color: var(--jp-ui-font-color1, inherit); }
</style>"""


class ApplyView:
    """The best settings to apply, which there must be; shown by being displayed, or by :attr:`view` as part of more.

    Attributes:
        view: the widget.

    Args:
        result: what was found; ``typed`` of it is not empty.
        ask: has something done away from the page's own thread; without one, a thread does it.
    """

    def __init__(self, result: TuneResult, ask: Callable[[Callable[[], object]], object] | None = None) -> None:
        self._result = result
        self._ask = ask
        self.view = threads.make(self._make)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget, and for a page without a kernel what is typed instead."""
        said = f"Train with the best settings: %hvd_set {self._result.typed}"
        bundle: dict[str, Any] = dict(self.view._repr_mimebundle_() or {})
        return bundle | {"text/plain": said, "text/html": notes_html([said])}

    def _make(self) -> Any:
        self._button = ipywidgets.Button(
            description=f"Apply {self._result.typed}", tooltip="train with the best settings"
        )
        self._button.add_class("gpumem-apply")
        self._button.on_click(lambda _: self._press())
        self._said = Region(role="status", label="what came of it")
        self._said.add_class("gpumem-came")
        css = ipywidgets.HTML(_CSS)
        css.add_class("gpumem-css")
        return box([css, self._button, self._said], "gpumem-tuned")

    def _press(self) -> None:
        self._button.disabled = True
        if self._ask:
            self._ask(self._apply)
        else:
            threads.start(self._apply, "gpumem_nb apply")

    def _apply(self) -> None:
        """Change the settings, and say so or why not."""
        self._said.html = "<p>Being changed …</p>"
        try:
            self._result.apply()
        except GpumemError as refused:
            self._said.html = f"<p>{escape(str(refused))}</p>"
        except Exception as error:
            self._said.html = f"<p>That did not work: {escape(f'{type(error).__name__}: {error}')}</p>"
        else:
            self._said.html = "<p>Changed: the next steps are trained with these settings.</p>"
        self._button.disabled = False
