"""The part of a panel that stays in a saved notebook, without widgets: a picture and a table of what was tried."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from .pictures import common_limit, picture

if TYPE_CHECKING:
    from ..session import Session

MOST_ROWS = 50  # the latest


class Kept:
    """An output below the panel, wherever it is shown; it changes when training has paused.

    Attributes:
        session: whose runs are kept; those of the session before stay until this one has any.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._id = uuid.uuid4().hex
        self._bundle = self._now()
        self._is_shown = False
        self._version: tuple[object, ...] = ()
        self._shell: Any = get_ipython()
        self._changing = threading.Lock()

    def show(self) -> None:
        """Make the output in the cell that runs."""
        if getattr(self._shell, "kernel", None) is None:
            return  # a terminal cannot change what it has printed
        if not self._is_shown:  # a program that executes notebooks without a page keeps only what comes with a cell
            self._shell.events.register("post_run_cell", self._cell_ended)
        self._is_shown, self._bundle = True, self._now()
        display(self._bundle, raw=True, display_id=self._id)

    def close(self) -> None:
        """Change it no more."""
        if self._is_shown:
            self._is_shown = False
            self._shell.events.unregister("post_run_cell", self._cell_ended)

    def follow(self) -> None:
        """Bring it up to date, if there is anything new."""
        version = self.session.runs_version  # not the history's: that grows with every look at a device
        with self._changing:
            if not self._is_shown or version == self._version:
                return
            self._version, bundle = version, self._now()
            if bundle == self._bundle or not bundle["text/plain"]:
                return
            self._bundle = bundle
            update_display(bundle, raw=True, display_id=self._id)

    def _cell_ended(self, _: object) -> None:
        self.follow()

    def _now(self) -> dict[str, str]:
        runs = self.session.runs.latest(MOST_ROWS)
        if not len(runs):
            return {"text/html": "", "text/plain": ""}
        svg = picture(runs.rows, common_limit(self.session.history.readings), self.session.ranks[0].device_name)
        return {"text/html": svg + runs._repr_html_(), "image/svg+xml": svg, "text/plain": str(runs)}
