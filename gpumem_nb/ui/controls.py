"""The controls: one for each knob, the buttons, and the line that says what time is lost to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..kernel.policy import RULES
from ..report.bottleneck import Bottleneck
from ..report.differences import DOES
from ..shared.errors import GpumemError
from ..shared.knobs import KNOBS, Knob
from ..shared.knobs.communication import COMMUNICATION_FOLD
from .flip_predictions import FlipPredictions
from .threads import OwnChanges
from .widgets import Ask, box, button, region, toggle
from .wording import critical_batch, field_error

if TYPE_CHECKING:
    from ..session import Session


_FOLD_ICONS = {COMMUNICATION_FOLD: "exchange"}
_AUTOTUNE = RULES["autotune"]
NOTHING_LOADED = "Load a workload first: %hvd_load digits-resnet"


class Controls:
    """Widgets that ask for a change and show what the session says.

    ``ask`` is called with an action to do, ``later`` with one that can wait; neither may block.

    Attributes:
        knobs, folds, buttons: the boxes to show; ``folds`` hold the knobs that are shown when the user asks for them.
        foreseen: what belongs to no single knob of what would come of flips.
    """

    def __init__(self, session: Session, ask: Ask, later: Ask) -> None:
        self._session = session
        self._ask = ask
        self._flip_predictions = FlipPredictions(session, later)
        self._doubted: tuple[str, str] | None = None  # the latest flip that was not made at once
        self._asked: dict[str, int] = dict.fromkeys((*KNOBS, _AUTOTUNE.name), 0)
        self._knobs = {name: knob for name, knob in KNOBS.items() if knob.in_front or knob.fold}
        self._own_changes = OwnChanges()
        self._about = session.settings, session.history, session.history.loaded_as  # what errors and doubts are about
        self._widgets = {name: self._control(knob) for name, knob in self._knobs.items()}
        self._errors = {name: region("gpumem-error", "alert", "") for name in (*self._knobs, _AUTOTUNE.name)}
        self._autotune = ipywidgets.Dropdown(
            description=_AUTOTUNE.name, tooltip=f"{_AUTOTUNE.name}: {_AUTOTUNE.help}", options=("off", "on")
        )
        self._autotune.observe(self._tune, names="value")
        self._critical = region("gpumem-critical", "group", "critical batch")
        self._play = button("Play", "play", "", lambda: ask(session.pause if session.playing else session.play))
        self._step = button("Step", "step-forward", "", lambda: ask(session.step))
        front = [name for name, knob in self._knobs.items() if knob.in_front]
        self.knobs = box([self._with_error(name) for name in front], "gpumem-knobs")
        self._shown_knobs = set(front)
        folds = dict.fromkeys(knob.fold for knob in self._knobs.values() if knob.fold and not knob.in_front)
        toggles, self.folds = zip(*(self._fold(name) for name in folds), strict=True)
        self.foreseen = box([self._flip_predictions.key, self._flip_predictions.lines], "gpumem-foreseen")
        self.buttons = box([self._play, self._step, self._flip_predictions.button, *toggles], "gpumem-buttons")

    def follow(self) -> None:
        """Show the session's settings, wherever they were changed, and switch off what cannot be used."""
        session = self._session
        ended = bool(session.ended)
        with self._own_changes:
            for knob in self._knobs.values():
                if knob.choices:
                    self._offer(knob)
            for name, widget in self._widgets.items():
                if not self._asked[name]:
                    widget.value = self._shown(name)
                widget.disabled = ended
            if not self._asked[_AUTOTUNE.name]:
                self._autotune.value = _AUTOTUNE.text(session.policy.autotune)
            self._autotune.disabled = ended
        about = session.settings, session.history, session.history.loaded_as
        if about != self._about:
            self._about, self._doubted = about, None
            for error in self._errors.values():
                error.html = ""
        self._critical.html = critical_batch(session)
        self._flip_predictions.follow([name for name in self._knobs if name in self._shown_knobs])
        why_not = session.ended or ("" if session.workload else NOTHING_LOADED)
        playing = session.playing and not why_not
        self._play.description, self._play.icon = ("Pause", "pause") if playing else ("Play", "play")
        self._play.button_style = "success" if playing else ""
        self._play.tooltip = why_not or ("stop after the steps under way" if playing else "train until paused")
        self._step.tooltip = why_not or "train one step"
        self._play.disabled, self._step.disabled = bool(why_not), bool(why_not) or playing

    def _fold(self, fold: str) -> tuple[Any, Any]:
        """Return the button that shows the knobs of a fold, and the box of these, which is closed at first."""
        names = [name for name, knob in self._knobs.items() if not knob.in_front and knob.fold == fold]
        icon = _FOLD_ICONS.get(fold, "sliders")
        shows = toggle(fold, icon, ", ".join(names))
        shows.add_class(f"gpumem-show-{fold}")
        controls = [self._with_error(name) for name in names]
        if fold == COMMUNICATION_FOLD:
            controls.append(self._with_error(_AUTOTUNE.name))
        inside = box(controls, "gpumem-knobs")
        inside.layout.display = "none"

        def open_or_close(change: dict[str, Any]) -> None:
            inside.layout.display = "" if change["new"] else "none"
            (self._shown_knobs.update if change["new"] else self._shown_knobs.difference_update)(names)

        shows.observe(open_or_close, names="value")
        return shows, inside

    def _with_error(self, name: str) -> Any:
        foreseen = self._flip_predictions.regions.get(name)
        parts = [self._widgets.get(name, self._autotune), self._errors[name], *([foreseen] if foreseen else [])]
        if name == "batch_size":
            parts.append(self._critical)
        return box(parts, "gpumem-knob")

    def _control(self, knob: Knob) -> Any:
        name = knob.name
        may = "may change the mathematics" if callable(knob.mathematics) else DOES[knob.mathematics]
        common = {"description": name, "tooltip": f"{name}: {knob.help} ({may})"}
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
            dropdown.options = choices  # which chooses the first of them; the user did not
            dropdown.value = self._shown(name)

    def _wanted(self, name: str, value: Any) -> None:
        """A person, or :meth:`follow`, changed a widget; what the session has, and keeps, needs no action."""
        if self._own_changes.under_way or (value == self._shown(name) and not self._asked[name]):
            return
        self._change(name, value.strip(), lambda: self._is_doubtful(name, value.strip()))

    def _tune(self, change: dict[str, Any]) -> None:
        """A person, or :meth:`follow`, switched autotune."""
        now, asked = _AUTOTUNE.text(self._session.policy.autotune), self._asked[_AUTOTUNE.name]
        if not self._own_changes.under_way and (change["new"] != now or asked):
            self._change(_AUTOTUNE.name, change["new"])

    def _change(self, name: str, value: str, doubtful: Callable[[], bool] = lambda: False) -> None:
        self._asked[name] += 1

        def change() -> None:
            try:
                if doubtful():
                    return
                self._session.set(**{name: value})
                self._errors[name].html = ""
            except GpumemError as refused:
                self._errors[name].html = field_error(value, str(refused))
            finally:
                self._asked[name] -= 1

        self._ask(change)

    def _is_doubtful(self, name: str, value: str) -> bool:
        """Return whether it will not fit; the panel says so once, and choosing it again makes the flip."""
        if (name, value) == self._doubted or not (refusal := self._flip_predictions.refusal(name, value)):
            self._doubted = None
            return False
        self._doubted = name, value
        self._errors[name].html = field_error(value, f"{refusal}. Choose it again to flip anyway.")
        return True


_AUTOTUNED_S = 60.0  # that it can be read what autotune found
_LOOK_EVERY_S = 2.0  # a sentence whose numbers change more often cannot be read


class BottleneckLine:
    """A line of the panel, :attr:`widget`: a sentence and a button; empty while there is nothing to say."""

    def __init__(self, session: Session, ask: Ask) -> None:
        self._session = session
        self._verdict: Bottleneck | None = None
        self._looked_s = -_LOOK_EVERY_S
        self._looked_at: tuple[object, ...] = ()
        self._sentence = region("gpumem-verdict", "status", "what time is lost to")
        self._button = button("", "", "change this now", lambda: ask(partial(self._apply, self._verdict)))
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
