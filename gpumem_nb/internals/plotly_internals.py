"""Undocumented parts of plotly.

A ``FigureWidget`` tells a page that is loaded again what the figure was at first: ``get_state`` reads the traits
``_widget_data`` and ``_widget_layout``, which are set once. What it is now lies in ``_data`` and ``_layout_obj``.

The page answers each update once it is drawn, which ends ``_trace_edit_in_process``. What is sent between the widget's
making and the moment when the page has loaded plotly is lost: none listens yet. ``plotly_update`` sends nothing that
Python's own figure holds already, so to send all of it again takes ``_send_update_msg``.

A page gives an anywidget 2 seconds to load its JavaScript; if it takes longer, all that the widget is sent afterwards
is dropped (anywidget 0.11.0, ``Runtime``). plotly's 5 MB take longer on a slow or busy computer: charts would stay as
they were at first, without a word. So what is loaded in those 2 seconds is a few lines; these load plotly, and wait.
A kernel sends it once, in a widget that all figures name, and a page loads it once: to send and to read 5 MB again
takes as long as the first time. And it begins with the first figure that it hears of, which need not be shown
(:func:`load_ahead`).

A view that was taken off the page (its cell ran again) goes on listening in plotly, fails at the next update, and the
views after it hear nothing any more. So each view's listeners go with it.

plotly's widget looks at its place when it draws, and hears of no change of it: the charts of a session that had ended
kept their width when the window or the dock got another. What plotly makes for ``responsive`` sizes them anew.

A figure is no place for two threads: copying its parts fails when another adds to them, and while what a page has sent
is taken in, no update is sent. A lock keeps the panel's thread, cells, and the page's messages apart; none waits for
a page while they hold it. What a figure is called in words, for the text beside a widget, would be a copy, too.

plotly imports nbformat, and with it jsonschema's grammars: most of what the import of a panel takes. All that it asks
of it is its version, when ``show()`` is called, so it is given that alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import ipywidgets
import traitlets
from _plotly_utils import optional_imports  # type: ignore[import-untyped]


@contextmanager
def _without_nbformat() -> Iterator[None]:
    if "nbformat" in sys.modules or "plotly.io" in sys.modules:
        yield
        return
    optional_imports._not_importable.add("nbformat")
    yield
    optional_imports._not_importable.discard("nbformat")
    shows: Any = sys.modules["plotly.io._renderers"]
    with suppress(PackageNotFoundError):
        shows.nbformat = SimpleNamespace(__version__=version("nbformat"))


with _without_nbformat():
    from plotly import graph_objects as go

    FigureWidget: Any = go.FigureWidget  # plotly imports it when it is asked for

CHECKED_WITH = ("7.1.0",)
_LOADER = """
const scripts = globalThis.gpumemPlotly ??= new Map();  // by their length: two kernels may have two versions
const loaded = (script) => {
  if (!scripts.has(script.length)) {
    const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const loads = import(/* webpackIgnore: true */ url);
    scripts.set(script.length, loads);
    loads.catch(() => scripts.delete(script.length)).finally(() => URL.revokeObjectURL(url));
  }
  return scripts.get(script.length);
};
const script = async (model) => {
  const sent = await model.widget_manager.get_model(model.get("_plotly").slice("IPY_MODEL_".length));
  return loaded(sent.get("script"));
};
export default () => {
  let own, plotly, listening;
  const load = async () => {
    const widget = await (await script(own)).default();
    await widget.initialize({ model: own });
    return widget;
  };
  return {
    initialize({ model }) {
      const on = (event, heard) => { listening?.push([event, heard]); model.on(event, heard); };
      own = { ...model, on, widget_manager: model.widget_manager };
      script(own);
    },
    async render({ el }) {
      plotly ??= load();
      const widget = await plotly;
      const mine = listening = [];
      const remove = widget.render({ model: own, el });
      const follows = new ResizeObserver(() => el._responsiveChartHandler?.());
      follows.observe(el);
      return () => { follows.disconnect(); mine.forEach(([event, heard]) => own.off(event, heard)); remove(); };
    },
  };
};
"""


class Script(ipywidgets.Widget):  # type: ignore[misc]
    """What all figures of a kernel are drawn by: plotly's own script. It is never shown."""

    script = traitlets.Unicode(str(FigureWidget._esm)).tag(sync=True)


_script = cache(Script)


class LiveFigure(FigureWidget):  # type: ignore[misc]
    """A figure that a slow page draws, too, and that a reloaded page shows as it is now and not as it was at first."""

    _esm = _LOADER
    _plotly = traitlets.Instance(Script).tag(sync=True, **ipywidgets.widget_serialization)
    _complete = False
    _config: dict[str, Any]

    def __init__(self, **parts: Any) -> None:
        self._in_use = threading.RLock()
        super().__init__(**parts)
        self._config = self._config | {"responsive": True}
        self._complete = True

    @traitlets.default("_plotly")
    def _one_for_all(self) -> Script:
        return _script()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def acknowledged(self) -> bool:
        """Return whether a page has drawn the latest update."""
        return not self._trace_edit_in_process

    def plotly_update(self, *changes: Any, **more: Any) -> None:
        """Change points and layout, here and in the browser."""
        with self._in_use:
            super().plotly_update(*changes, **more)

    def resend(self, layout: Mapping[str, Any]) -> None:
        """Send all points, and this part of the layout, to all pages that listen.

        Not its height: plotly takes a size that is sent for one that shall not follow the page any more.
        """
        with self._in_use:
            points = {axis: [trace.get(axis) for trace in self._data] for axis in ("x", "y")}
            self._send_update_msg(points, layout)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take in what a page has sent."""
        with self._in_use:
            super().set_state(sync_data)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state for the browser; all of it when it asks for all."""
        with self._in_use:
            state: dict[str, Any] = super().get_state(key, drop_defaults)
            if key is None and self._complete:
                to_json = self.trait_metadata("_widget_data", "to_json")
                state["_widget_data"] = to_json(self._data, self)
                state["_widget_layout"] = to_json(self._layout_obj._props, self)
            return state


@cache
def load_ahead() -> LiveFigure:
    """Have the page load plotly before anything is shown, by a figure that never is; one for each kernel."""
    return LiveFigure()
