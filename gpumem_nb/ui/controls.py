"""The controls: one for each knob, and the buttons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from ..shared.knobs import KNOBS, Knob
from .steered import Steered

_NOTHING_LOADED = "Load a workload first: %hvd_load digits-resnet"


class Controls:
    """Widgets that ask for a change and show what the session says.

    ``ask`` is called with an action to do; it must not wait for it.

    Attributes:
        knobs, buttons: the boxes to show.
    """

    def __init__(self, session: Steered, ask: Callable[[Callable[[], object]], None]) -> None:
        self._session = session
        self._ask = ask
        self._asked: dict[str, int] = dict.fromkeys(KNOBS, 0)
        self._knobs = dict(KNOBS)
        self._offering = False
        self._widgets = {name: self._control(knob) for name, knob in self._knobs.items()}
        self._buttons = [
            _button("Play", "play", "train until paused", lambda: ask(session.play)),
            _button("Pause", "pause", "stop after the steps under way", lambda: ask(session.pause)),
            _button("Step", "step-forward", "train one step", lambda: ask(session.step)),
        ]
        self._button_tips = [button.tooltip for button in self._buttons]
        self.knobs = _box(ipywidgets.Box, list(self._widgets.values()), "gpumem-controls")
        self.buttons = _box(ipywidgets.HBox, self._buttons, "gpumem-buttons")

    def follow(self) -> None:
        """Show the session's settings, wherever they were changed, and switch off what cannot be used."""
        session = self._session
        ended = bool(session.ended)
        for knob in self._knobs.values():
            if knob.choices:
                self._offer(knob)
        for name, widget in self._widgets.items():
            if not self._asked[name]:
                widget.value = self._shown(name)
            widget.disabled = ended
        why_not = session.ended or ("" if session.workload else _NOTHING_LOADED)
        for button, tip in zip(self._buttons, self._button_tips, strict=True):
            button.disabled = bool(why_not)
            button.tooltip = why_not or tip

    def _control(self, knob: Knob) -> Any:
        name = knob.name
        common = {"description": name, "tooltip": f"{name}: {knob.help}"}
        if knob.choices:
            widget = ipywidgets.Dropdown(options=knob.choices, value=self._shown(name), **common)
        else:
            widget = ipywidgets.Text(value=self._shown(name), continuous_update=False, **common)
        widget.observe(lambda change: self._wanted(name, change["new"]), names="value")
        return widget

    def _shown(self, name: str) -> str:
        value = getattr(self._session.settings, name)
        return f"{value:g}" if isinstance(value, float) else self._knobs[name].text(value)

    def _offer(self, knob: Knob) -> None:
        """Offer the values that go with what is loaded, and the one that is set."""
        session, name, dropdown = self._session, knob.name, self._widgets[knob.name]
        now = getattr(session.settings, name)
        refuses = knob.refuses or (lambda value, workload: "")
        choices = [choice for choice in knob.choices if choice == now or not refuses(choice, session.workload)]
        if list(dropdown.options) != choices:
            # New options choose the first of them; nobody asked for that.
            self._offering = True
            dropdown.options = choices
            dropdown.value = self._shown(name)
            self._offering = False

    def _wanted(self, name: str, value: Any) -> None:
        """A person, or :meth:`follow`, changed a widget; what the session has already needs no action."""
        if self._offering or value == self._shown(name):
            return
        self._asked[name] += 1

        def change() -> None:
            try:
                self._session.set(**{name: value.strip()})
            finally:
                self._asked[name] -= 1

        self._ask(change)


def _button(label: str, icon: str, tip: str, press: Callable[[], None]) -> Any:
    button = ipywidgets.Button(description=label, icon=icon, tooltip=tip)
    button.on_click(lambda _: press())
    return button


def _box(kind: Any, children: list[Any], css_class: str) -> Any:
    box = kind(children)
    box.add_class(css_class)
    return box
