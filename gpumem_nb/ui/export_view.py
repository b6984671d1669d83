"""The panel's way out: the plain script of what the session does, and a page about it."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from ..shared.progress import Progress
from .search_view import Ask, SearchView
from .steered import Steered

_REPORT = "report.html"


class ExportView(SearchView):
    """Asks the session for a script.

    Args:
        session: what is exported.
        search: has something done that may take long.
        ask: the same of what is done at once.
    """

    def __init__(self, session: Steered, search: Ask, ask: Ask) -> None:
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
