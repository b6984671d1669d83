"""Parts that the panel's boxes are made of: regions that are read aloud, buttons, style sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import anywidget
import ipywidgets
import traitlets

from ..report.tables import marked
from ..shared.errors import GpumemError
from . import threads

Ask = Callable[[Callable[[], object]], object]
"""Has something done away from the page's own thread."""


def text_of(name: str) -> str:
    """Return a style sheet or a script that lies beside this file."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


class Region(anywidget.AnyWidget):
    """A piece of the page that changes while people read it or have it read to them.

    It is HTML under an ARIA role: ``status`` and ``alert`` are announced when they change, ``group`` is not. A press on
    what has the attribute ``data-press`` is told to :attr:`pressed` with its value, and so is Escape, as ``close``,
    where something can be pressed that has that value.
    """

    _esm = text_of("region.js")
    html = traitlets.Unicode().tag(sync=True)
    role = traitlets.Unicode("group").tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.pressed: Callable[[str], object] = lambda what: None
        self.on_msg(lambda widget, what, buffers: self.pressed(str(what)))


class FocusedKnob(anywidget.AnyWidget):
    """Draws nothing, and knows the name of the knob of its panel that had the focus last."""

    _esm = text_of("focused_knob.js")
    knob = traitlets.Unicode().tag(sync=True)


class Tab(anywidget.AnyWidget):
    """Draws nothing. It names the tab of a docked panel, which sidecar does but once, when it makes it.

    And it closes docked panels of a kernel that is gone, of which this kernel knows nothing.
    """

    _esm = text_of("tab.js")
    label = traitlets.Unicode().tag(sync=True)


def region(css_class: str, role: str, label: str) -> Region:
    """Return an empty region with a class for the style sheet."""
    made = Region(role=role, label=label)
    made.add_class(css_class)
    return made


def style_sheet(css: str) -> Any:
    """Return a widget that brings a style sheet along."""
    made = ipywidgets.HTML(f"<style>{css}</style>")
    made.add_class("gpumem-css")
    return made


def box(children: list[Any], css_class: str) -> Any:
    """Return a box that the style sheet lays out."""
    made = ipywidgets.Box(children)
    made.add_class(css_class)
    return made


def button(label: str, icon: str, tip: str, press: Callable[[], object]) -> Any:
    """Return a button."""
    made = ipywidgets.Button(description=label, icon=icon, tooltip=tip)
    made.on_click(lambda _: press())
    return made


def toggle(label: str, icon: str, tip: str) -> Any:
    """Return a button that stays pressed."""
    return ipywidgets.ToggleButton(description=label, icon=icon, tooltip=tip)


def family(widget: Any) -> Iterator[Any]:
    """Yield a widget and all that lie in it."""
    for child in getattr(widget, "children", ()):
        yield from family(child)
    yield widget


class ApplyButton:
    """A button that changes settings, and a line that says what came of it.

    Attributes:
        button, said: the two widgets.

    Args:
        typed: what is applied; empty where that stands beside it.
        tip: more about it.
        change: makes the change, and returns what is to be said of it; empty where it was said already.
        ask: has it done; without one, a thread of its own does it.
        again: whether it may be pressed again once the change was made, as it may be after one that was refused.
        then: what that thread does afterwards.
    """

    def __init__(
        self,
        typed: str,
        tip: str,
        change: Callable[[], str],
        ask: Ask | None,
        again: bool = True,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._change, self._ask, self._again, self._then = change, ask, again, then
        self.button = button(f"Apply {typed}".rstrip(), "", tip, self._press)
        self.said = region("gpumem-came", "status", "what came of it")

    def _press(self) -> None:
        self.button.disabled = True
        if self._ask:
            self._ask(self._apply)
        else:
            threads.start(self._apply_alone, "gpumem_nb apply")

    def _apply_alone(self) -> None:
        self._apply()
        self._then()

    def _apply(self) -> None:
        """Make the change, and say so or why not."""
        self.said.html = "<p>Being changed …</p>"
        again = True
        try:
            said, again = self._change(), self._again
        except GpumemError as refused:
            said = str(refused)
        except Exception as error:
            said = f"That did not work: {type(error).__name__}: {error}"
        if said:
            self.said.html = f"<p>{marked(said)}</p>"
        self.button.disabled = not again
