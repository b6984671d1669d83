"""The controls: one for each knob, the buttons, and the line that says what time is lost to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..kernel.lifecycle import RESTARTING
from ..kernel.policy import RULES
from ..report.bottleneck import Bottleneck
from ..report.differences import DOES
from ..report.tables import marked
from ..shared.errors import GpumemError
from ..shared.knobs import KNOBS, Knob
from ..shared.knobs.communication import COMMUNICATION_FOLD
from .knob_tip import CLASS, KnobTip
from .threads import OwnChanges
from .widgets import Ask, box, button, region
from .wording import field_error

if TYPE_CHECKING:
    from ..session import Session


_KNOBS = "gpumem-knobs"
_HEADINGS = {"more": "Loss, update, learning rate and data", COMMUNICATION_FOLD: "Communication"}
_AUTOTUNE = RULES["autotune"]
NOTHING_LOADED = "Load a workload first: %hvd_load digits-resnet"


class Controls:
    """Widgets that ask for a change and show what the session says.

    ``ask`` is called with an action to do, ``later`` with one that can wait; neither may block. ``restart`` starts the
    ranks of a session that has ended, away from the page's own thread.

    Attributes:
        play, step: buttons.
        knobs: the box of the knobs that are shown at once.
        further: the boxes of all others, each with a heading.
        tip: what explains the knob that has the focus.
    """

    def __init__(self, session: Session, ask: Ask, later: Ask, restart: Callable[[], object] = lambda: None) -> None:
        self._session = session
        self._ask = ask
        self._restart = restart
        self.tip = KnobTip(session, later, self._change)
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
        self.play = button("Play", "play", "", self._press_play)
        self.step = button("Step", "step-forward", "", lambda: ask(session.step))
        self.knobs = box([self._with_error(name) for name, knob in self._knobs.items() if knob.in_front], _KNOBS)
        folds = dict.fromkeys(knob.fold for knob in self._knobs.values() if knob.fold and not knob.in_front)
        self.further = [self._fold(fold) for fold in folds]

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
        self.tip.follow()
        why_not = session.ended or ("" if session.workload else NOTHING_LOADED)
        playing = session.playing and not why_not
        self.play.description, self.play.icon = ("Pause", "pause") if playing else ("Play", "play")
        self.play.tooltip = why_not or ("stop after the steps under way" if playing else "train until paused")
        self.play.disabled = bool(why_not)
        if self._can_restart:
            self.play.description, self.play.icon, self.play.disabled = "Restart", "refresh", False
            self.play.tooltip = "start the ranks again, with what was trained restored"
        self.play.button_style = "" if playing else "success"  # what is to be pressed next
        self.step.tooltip = why_not or "train one step"
        self.step.disabled = bool(why_not) or playing

    @property
    def _can_restart(self) -> bool:
        return self._session.ended not in ("", RESTARTING)

    def _press_play(self) -> None:
        if self._can_restart:
            self._restart()
        else:
            self._ask(self._session.pause if self._session.playing else self._session.play)

    def _fold(self, fold: str) -> Any:
        """Return the box with the knobs of a fold."""
        names = [name for name, knob in self._knobs.items() if not knob.in_front and knob.fold == fold]
        heading = region("gpumem-heading", "heading", "")
        heading.html = _HEADINGS.get(fold, fold.capitalize())
        controls = [self._with_error(name) for name in names]
        if fold == COMMUNICATION_FOLD:
            controls.append(self._with_error(_AUTOTUNE.name))
        return box([heading, box(controls, _KNOBS)], "gpumem-fold")

    def _with_error(self, name: str) -> Any:
        knob = box([self._widgets.get(name, self._autotune), self._errors[name]], "gpumem-knob")
        knob.add_class(f"{CLASS}{name}")
        return knob

    def _control(self, knob: Knob) -> Any:
        name = knob.name
        may = "may change the mathematics" if callable(knob.mathematics) else DOES[knob.mathematics]
        common = {"description": knob.label or name, "tooltip": f"{name}: {knob.help} ({may})"}
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
        name, dropdown = knob.name, self._widgets[knob.name]
        choices = knob.offered(getattr(self._session.settings, name), self._session.workload)
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
        if (name, value) == self._doubted or not (refusal := self.tip.refusal(name, value)):
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
            self._sentence.html = f"<p>{marked(said.text)}</p>"
        else:
            self._sentence.html = f"<p>{marked(verdict.sentence)}</p>" if verdict else ""
        self._button.layout.display = "" if verdict and verdict.changes else "none"
        self._button.description = f"Apply {verdict.typed}" if verdict else ""

    def _apply(self, verdict: Bottleneck | None) -> None:
        """As it was when the button was pressed: others may wait to be done before."""
        if verdict:
            self._session.set(**verdict.changes)
