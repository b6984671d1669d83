"""The live panel: controls, what is happening in words, and charts."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ipywidgets

from ..shared.messages import Sample
from . import legend, threads, wording
from .actions import Actions
from .charts import Charts, View
from .controls import Controls
from .region import Region
from .steered import Steered
from .style import CSS

REFRESH_S = 0.25
LARGEST_SHARE = 0.1  # of a core, for refreshing
_log = logging.getLogger(__name__)


class Panel:
    """Shows a session and steers it; made by ``session.panel()``, shown by being the last expression of a cell.

    It lives from :meth:`watch` on: until then it shows nothing new and does nothing that its controls ask for.

    Attributes:
        closed: whether :meth:`close` was called.
        view: the widget that holds everything.
    """

    def __init__(self, session: Steered) -> None:
        self._session = session
        self._actions = Actions(self._refused, self._refresh)
        self._refreshing = threading.RLock()
        self._shown: tuple[Any, ...] = ()
        self._heard_s = time.monotonic()
        self._heard: Any = None
        self._refusal = ""
        self._sidecar: Any = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._worker: threading.Thread | None = None
        self.view = threads.make(self._make)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing.is_set()

    def dock(self) -> Panel:
        """Show it beside the notebook."""
        from sidecar import Sidecar

        if self._sidecar is None:
            self._sidecar = Sidecar(title="GPU memory", anchor="split-right")
        with self._sidecar:
            from IPython.display import display

            display(self.view)
        return self

    def close(self) -> None:
        """Take it off the page and stop updating it; the session goes on."""
        self._closing.set()
        self._actions.close()
        with self._refreshing:
            for widget in (self._sidecar, self.view, *self.view.children):
                if widget is not None:
                    widget.close()

    def watch(self) -> None:
        """Keep the panel up to date until it is closed or the session ends, and do what its controls ask for."""
        if self._worker is None:
            self._worker = threads.start(self._actions.work, "gpumem_nb panel actions")
        if self._watcher is None or not self._watcher.is_alive():
            self._shown = ()
            self._watcher = threads.start(self._watch, "gpumem_nb panel")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.view._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"<Panel of {self._session!r}>"

    def _make(self) -> Any:
        self._ranks = self._session.ranks
        self._charts = Charts(self._ranks)
        self._controls = Controls(self._session, self._ask)
        self._status = _region("gpumem-status", "status", "what is happening")
        self._alert = _region("gpumem-alert", "alert", "")
        self._effect = _region("gpumem-effect", "status", "before and after the latest change")
        self._tiles = _region("gpumem-numbers", "group", "numbers now")
        self._filling = _region("gpumem-filling", "group", "what fills the memory")
        self._truths = _region("gpumem-truths", "group", "what the numbers of memory mean")
        self._truths.html = wording.truths(self._ranks)
        css = ipywidgets.HTML(CSS + self._charts.css)
        css.add_class("gpumem-css")
        regions = [self._status, self._alert]
        numbers = [self._effect, self._tiles, self._filling]
        parts = [css, *regions, self._controls.buttons, self._controls.knobs, *numbers]
        view = ipywidgets.VBox([*parts, self._charts.figure, self._truths])
        view.add_class("gpumem-panel")
        return view

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            began = time.thread_time()
            ended = bool(self._session.ended)
            self._refresh()
            if ended:
                return
            pause_s = max(REFRESH_S, (time.thread_time() - began) / LARGEST_SHARE)

    def _ask(self, action: Any) -> None:
        self._refusal = ""
        self._actions.submit(action)

    def _refused(self, why: str) -> None:
        self._refusal = why

    def _refresh(self) -> None:
        with self._refreshing:
            if self.closed:
                return
            try:
                self._show()
            except Exception:
                _log.exception("The panel could not be updated.")

    def _show(self) -> None:
        session, history = self._session, self._session.history
        if history.readings is not self._heard:
            self._heard, self._heard_s = history.readings, time.monotonic()
        status = wording.status(session, time.monotonic() - self._heard_s)
        self._controls.follow()
        self._status.html = status
        cards = wording.rescue(history.rescue) + "".join(map(wording.leak, history.leaks.values()))
        self._alert.html = wording.alert(self._refusal) or cards
        state = (history, history.version)
        if state == self._shown:
            return
        self._shown = state
        samples = self._samples()
        self._effect.html = wording.effect(history.effect())
        self._tiles.html = wording.tiles(session, samples, history.readings)
        settings = {tried.settings_id: tried.settings for tried in list(history.tried)}
        evaluations = [one for one in list(history.evaluations) if one.settings_id >= history.loaded_as]
        view = View.of(self._ranks, history.readings, samples, settings.get, evaluations)
        blocks = session.workload.blocks if session.workload else 0
        words = wording.filling(view.peaks, history, blocks)
        self._filling.html = f"<p>{words}</p>{legend.key(view.worst)}{legend.strip(view.peaks)}" if words else ""
        self._charts.update(view)

    def _samples(self) -> list[list[Sample]]:
        history = self._session.history
        return [[s for s in of_rank if s.settings_id >= history.loaded_as] for of_rank in history.samples()]


def _region(css_class: str, role: str, label: str) -> Region:
    region = Region(role=role, label=label)
    region.add_class(css_class)
    return region
