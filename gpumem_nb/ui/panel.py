"""The live panel: controls, what is happening in words, and charts, all on one screen."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from ..internals.ipykernel_internals import shuts_down
from ..planning.score import foretold
from ..report.rescue import Rescue
from ..shared.errors import GpumemError
from ..shared.messages import Failure
from ..shared.workload import Handles
from . import legend, threads, wording
from .answers import Answers
from .charts import Charts, View
from .charts.view import LAST_STEPS, Attempt, Choice
from .controls import BottleneckLine, Controls
from .pictures import common_limit, picture
from .style import BIG
from .threads import Actions
from .widgets import Tab, box, button, family, region, style_sheet, text_of, toggle

if TYPE_CHECKING:
    from ..session import Session

REFRESH_S = 0.25
LARGEST_SHARE = 0.1  # of a core, for refreshing
_FITS = 3  # settings that are offered after memory ran out
_log = logging.getLogger(__name__)


class Panel:
    """Shows a session and steers it; made by ``session.panel()``, shown by being the last expression of a cell.

    It lives from :meth:`show` on: until then it shows nothing new and does nothing that its controls ask for.

    Attributes:
        big: whether type is so large that it can be read from the back of a room.
        view: the widget that holds everything.
    """

    def __init__(self, session: Session, big: bool = False) -> None:
        self._session = session
        self.big = big
        self._actions = Actions("actions", self._refused, self._refresh)
        self._questions = Actions("questions", _log.warning, self._refresh)
        self._searches = Actions("searches", self._refused, self._refresh)
        self._refreshing = threading.RLock()
        self._shown: tuple[Any, ...] = ()
        self._heard: Any = None
        self._dismissed: Failure | None = None
        self._sidecar: Any = None
        self._kept = Kept(session)
        self._own_changes = threads.OwnChanges()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self.view = threads.make(self._make)

    @property
    def closed(self) -> bool:
        """Return whether it was closed."""
        return self._closing.is_set()

    def dock(self) -> Panel:
        """Show it beside the notebook, once, and below the cell what a saved notebook keeps of it."""
        from sidecar import Sidecar

        before, self._sidecar = self._sidecar, Sidecar(title=wording.tab(self._session), anchor="split-right")
        if before is not None:  # its tab may have been closed by hand, without a message to the kernel
            before.close()
        with self._sidecar:
            display(self.view)
        self._kept.show()
        return self

    def show(self, session: Session) -> None:
        """Show and steer this session from now on, in the same place of the page; without effect once closed.

        What is shown is kept up to date until the panel is closed or the session ends, and controls do something.
        """
        with self._refreshing:
            if self.closed:
                return
            if session is not self._session:
                self._rest()
                self._session = self._kept.session = session
                before = self.view.children
                self.view.children = threads.make(self._content)
                for widget in before:
                    for one in family(widget):
                        one.close()
            for actions in (self._actions, self._questions, self._searches):
                actions.start()
            if self._watcher is None:
                self._draw_anew()
                self._watcher = threads.start(lambda: self._watch(session), "gpumem_nb panel")

    def close(self) -> None:
        """Take it off the page and stop updating it; the session goes on."""
        self._closing.set()
        with self._refreshing:
            self._kept.close()
            self._rest()
            for widget in (self._sidecar, *family(self.view)):
                if widget is not None:
                    widget.close()

    def _rest(self) -> None:
        """End all threads; what is under way is finished first."""
        self._watcher = None  # which notices
        self._answers.close()
        for actions in (self._actions, self._questions, self._searches):
            actions.close()

    def _ipython_display_(self) -> None:
        display(self.view)
        self._kept.show()

    def __repr__(self) -> str:
        return f"<Panel of {self._session!r}>"

    def _make(self) -> Any:
        view = ipywidgets.VBox(self._content())
        view.add_class("gpumem-panel")
        if self.big:
            view.add_class("gpumem-big")
        return view

    def _content(self) -> list[Any]:
        """Make what the panel shows of its session."""
        self._draw_anew()
        self._heard_s, self._heard = time.monotonic(), None
        self._refusal, self._dismissed = "", None
        self._seen_effect: object = None  # which is shown no more
        self._ranks = self._session.ranks
        self._charts = Charts(self._ranks, BIG if self.big else 1.0)
        self._controls = Controls(self._session, self._ask, self._questions.submit, self._restart)
        self._answers = Answers(self._session, self._searches.submit, self._ask, self._controls.tip)
        self._status = region("gpumem-status", "status", "what is happening")
        self._alert = region("gpumem-alert", "alert", "")
        self._alert.pressed = lambda _: self._close_message()
        self._effect = region("gpumem-effect", "status", "before and after the latest change")
        self._effect.pressed = lambda _: self._close_effect()
        self._tiles = region("gpumem-numbers", "group", "numbers now")
        self._filling = region("gpumem-filling", "group", "what fills the memory")
        self._strip = region("gpumem-strips", "group", "the peaks of all ranks")
        self._truths = region("gpumem-truths", "group", "what the numbers of memory mean")
        self._truths.html = wording.truths(self._ranks)
        self._fits = [
            button("", "", "train with these settings", partial(self._ask, partial(self._apply, place)))
            for place in range(_FITS)
        ]
        self._lost = BottleneckLine(self._session, self._ask)
        self._tab = Tab(label=wording.tab(self._session))
        css = style_sheet(text_of("panel.css") + self._charts.css)
        more, self._more = self._unfolding()
        top = box([self._status, self._controls.play, more], "gpumem-top")
        # Over the lower edge of the charts of memory, which they are about.
        message = box([self._alert, box(self._fits, "gpumem-fits")], "gpumem-message")
        charts = box([self._charts.figure, message], "gpumem-charts")
        seen = [css, top, self._tiles, charts, self._strip, self._controls.knobs, self._more, self._answers.buttons]
        asked = [self._effect, self._controls.tip.widget, self._answers.views]
        return [*seen, *asked, self._filling, self._lost.widget, self._tab]

    def _unfolding(self) -> tuple[Any, Any]:
        """Return a button, and what it shows: a step, how charts are drawn, all other knobs, and words."""
        self._pin = toggle("compare with this", "thumb-tack", "compare all further settings with those of now")
        self._latest = toggle(f"last {LAST_STEPS} steps", "search-plus", "of all steps, show the latest alone")
        self._smooth = toggle("smooth", "line-chart", "lines as moving averages")
        self._log_loss = toggle("log loss", "superscript", "the loss on a logarithmic axis")
        self._pin.observe(lambda change: self._wanted_pin(change["new"]), names="value")
        for choice in (self._latest, self._smooth, self._log_loss):
            choice.observe(lambda _: self._draw_anew(), names="value")
        choices = box([self._controls.step, self._pin, self._latest, self._smooth, self._log_loss], "gpumem-choices")
        inside = box([choices, *self._controls.further, self._truths], "gpumem-more")
        inside.layout.display = "none"
        shows = toggle("", "ellipsis-h", "a single step, more knobs, communication, how charts are drawn")
        shows.add_class("gpumem-show-more")
        shows.observe(lambda change: setattr(inside.layout, "display", "" if change["new"] else "none"), names="value")
        return shows, inside

    def _watch(self, session: Session) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            began = time.thread_time()
            with self._refreshing:  # no other thread shows a session meanwhile
                if self._watcher is not threading.current_thread():
                    return
                ended = bool(session.ended)
                self._refresh()
                if ended:
                    if shuts_down():  # JupyterLab sets this class when it starts a kernel again, not when it ends one
                        self.view.add_class("jupyter-widgets-disconnected")
                    self._rest()
                    return
            pause_s = max(REFRESH_S, (time.thread_time() - began) / LARGEST_SHARE)

    def _ask(self, action: Any) -> None:
        self._refusal = ""
        self._actions.submit(action)

    def _restart(self) -> None:
        """Start the ranks of a session that has ended: what serves it has ended, too, so on a thread of its own."""
        session = self._session

        def restart() -> None:
            try:
                session.restart(lambda what, done: setattr(self._status, "html", wording.starting(what)))
            except GpumemError as why:
                self._refusal = str(why)
                self._refresh()

        self._controls.play.disabled = True
        threads.start(restart, "gpumem_nb panel restart")

    def _refused(self, why: str) -> None:
        self._refusal = why

    def _close_message(self) -> None:
        """Close what was refused, or else the card about a discarded step."""
        if self._refusal:
            self._refusal = ""
        else:
            self._dismissed = self._failure
        self._draw_anew()

    def _close_effect(self) -> None:
        self._seen_effect = self._effect_of
        self._draw_anew()

    @property
    def _effect_of(self) -> object:
        """Return what the latest effect is one of."""
        effect = self._session.history.effect()
        return effect and (effect.flip, effect.after.settings_id)

    def _follow_pin(self) -> None:
        history = self._session.history
        now = history.now()
        self._pin.disabled = now is None or not now.steps
        with self._own_changes:
            self._pin.value = history.pinned is not None

    def _wanted_pin(self, wanted: bool) -> None:
        if not self._own_changes.under_way:
            self._ask(lambda: self._session.pin(wanted))

    def _apply(self, place: int) -> None:
        """Train with one of the settings that were tried out after memory ran out."""
        rescue = self._session.history.rescue
        if rescue is not None and place < len(rescue.fitting):
            wanted = rescue.fitting[place].settings
            self._session.set(**wanted.changed_from(self._session.settings))

    def _offer(self, rescue: Rescue | None) -> None:
        fits = rescue.fits if rescue else []
        for place, fit in enumerate(self._fits):
            fit.layout.display = "" if place < len(fits) else "none"
            fit.description = f"Apply {fits[place]}" if place < len(fits) else ""

    def _draw_anew(self) -> None:
        self._shown = ()

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
        self._answers.follow()
        self._status.html = status
        self._tab.label = wording.tab(session)
        rescue = self._rescue
        cards = wording.rescue(rescue) + "".join(map(wording.leak, history.leaks.values()))
        self._alert.html = wording.alert(self._refusal) or cards
        self._offer(None if self._refusal else rescue)
        if not session.playing:
            self._kept.follow()
        self._follow_pin()
        self._lost.follow()
        self._charts.look_after()
        state = (history, history.version, rescue)
        if state == self._shown:
            return
        self._shown = state
        effect = None if self._effect_of == self._seen_effect else history.effect()
        predicted = foretold(history.asked, history.tried, effect.after) if effect else None
        self._effect.html = wording.effect(effect, predicted)
        choice = Choice(self._latest.value, self._smooth.value, self._log_loss.value)
        view = View.of_session(session, self._ranks, choice, Attempt.of(self._rescue, history.readings))
        self._tiles.html = wording.tiles(session, history.readings, view.time)
        handles = session.workload.handles if session.workload else Handles()
        words = wording.filling(view.peaks, history, handles) if view.has_steps else ""
        self._filling.html = f"<p>{words}</p>" if words else ""
        self._strip.html = legend.strip(view.peaks)
        self._charts.update(view)

    @property
    def _rescue(self) -> Rescue | None:
        """Return the card about a discarded step, until the user has closed it."""
        history = self._session.history
        return None if self._session.ended or self._failure is self._dismissed else history.rescue

    @property
    def _failure(self) -> Failure | None:
        """Return what a card would be about; what is found out later about the same makes no other card."""
        rescue = self._session.history.rescue
        return rescue.failure if rescue else None


if TYPE_CHECKING:
    from ..session import Session

MOST_ROWS = 50  # the latest


class Kept:
    """What stays of a panel in a saved notebook, without widgets: a picture and a table of what was tried.

    It is an output below the panel, wherever that is shown, and changes when training has paused. Of another session it
    shows the runs once that has any.
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
