"""The controls: one for each knob, and the buttons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from ..shared.settings import KNOBS
from .steered import Steered

_OWN = "own"
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
        self._offering = False
        self._widgets = {name: self._knob(name) for name in KNOBS}
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
        has_own = session.workload is not None and session.workload.own_optimizer is not None
        has_own |= session.settings.optimizer == _OWN
        self._offer("optimizer", [c for c in KNOBS["optimizer"].choices if c != _OWN or has_own])
        for name, widget in self._widgets.items():
            if not self._asked[name]:
                widget.value = self._shown(name)
            widget.disabled = ended
        why_not = session.ended or ("" if session.workload else _NOTHING_LOADED)
        for button, tip in zip(self._buttons, self._button_tips, strict=True):
            button.disabled = bool(why_not)
            button.tooltip = why_not or tip

    def _knob(self, name: str) -> Any:
        knob = KNOBS[name]
        tip = f"{name}: {knob.help}" + " (offered when it brings one)" * (name == "optimizer")
        common = {"description": name, "tooltip": tip}
        if knob.choices:
            widget = ipywidgets.Dropdown(options=knob.choices, value=self._shown(name), **common)
        else:
            widget = ipywidgets.Text(value=self._shown(name), continuous_update=False, **common)
        widget.observe(lambda change: self._wanted(name, change["new"]), names="value")
        return widget

    def _shown(self, name: str) -> str:
        value = getattr(self._session.settings, name)
        return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else str(value)

    def _offer(self, name: str, choices: list[str]) -> None:
        dropdown = self._widgets[name]
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
