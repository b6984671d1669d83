"""What the knob under one's fingers does: a line of words, and for each value what a flip to it would bring."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..planning.prediction import Prediction
from ..planning.what_if import single_flips
from ..shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from . import wording
from .widgets import Ask, FocusedKnob, box, region

if TYPE_CHECKING:
    from ..session import Session

FLIP, LARGEST = "flip", "largest"  # kinds of questions
CLOSE, CLASS = "close", "gpumem-knob-"
_Question = tuple[str, Settings]


@dataclass
class _Answers:
    """Answers about a model at one version, besides the session's predictions."""

    history: object
    version: int = -1
    loaded_as: int = -1
    waits_at: int | None = None  # the step that must be left behind before anything is asked
    largest: dict[Settings, int] = field(default_factory=dict)  # micro-batch that fits; 0 where none does
    failed: dict[_Question, tuple[str, int | None]] = field(default_factory=dict)  # why; at which step, if it may pass


class KnobTip:
    """Explains the knob that has the focus, and predicts its flips one by one while no other work waits for the ranks.

    A prediction holds until something may have changed the model. After a cell nothing is asked before the next step:
    a question would put modes and gradients back that the next cell may look at.

    Attributes:
        widget: empty while no knob has had the focus, or after it was closed.

    Args:
        session: whom to ask.
        submit: is called with a question to be asked on another thread.
        flip: makes a flip of a knob to a value, away from the page's own thread.
    """

    def __init__(self, session: Session, submit: Ask, flip: Callable[[str, str], object]) -> None:
        self._session = session
        self._submit = submit
        self._flip = flip
        self._asking = threading.Semaphore()  # taken by the question under way
        self._rests_until_s = 0.0
        self._answers = _Answers(session.history)
        self._shown: object = None
        self._news = object()  # another one with all that becomes known or is forgotten here
        self._focused = FocusedKnob()
        self._focused.observe(lambda _: self._begin_anew(), names="knob")
        self._words = region("gpumem-tip", "status", "what this knob does")
        self._words.pressed = self._press
        self.widget = box([self._focused, self._words], "gpumem-tips")

    @property
    def knob(self) -> str:
        """The name of the knob that is explained; empty for none."""
        return str(self._focused.knob) if self._focused.knob in KNOBS else ""

    def explain(self, knob: str) -> None:
        """Explain a knob, as if it had got the focus."""
        self._focused.knob = knob

    def follow(self) -> None:
        """Show what is known of flips of the knob, and ask for what is not."""
        session, history = self._session, self._session.history
        busy = session.busy  # asked first: a cell that has ended by now has made another version of the model
        self._keep_up()
        answers, name = self._answers, self.knob
        asks = bool(name) and session.workload is not None and not session.ended
        state = (asks, name, session.settings, history, history.foreseen_version, self._news, wording.critical(session))
        if state != self._shown:
            self._shown = state
            self._words.html = self._tip(name) if name else ""
        rests = busy or answers.waits_at is not None or time.monotonic() < self._rests_until_s
        if asks and not rests and (question := self._question(name)) and self._asking.acquire(blocking=False):
            self._submit(partial(self._ask, answers, question))

    def refusal(self, name: str, value: str) -> str:
        """Return why you should not give this value to this knob, as far as that is known; empty without a reason."""
        try:
            foreseen = self._session.foreseen(self._session.settings.replace(**{name: value}))
        except GpumemError:  # setting it raises the same error
            return ""
        return foreseen.refusal if foreseen else ""

    def _press(self, what: str) -> None:
        if what == CLOSE:
            self.explain("")
        elif self.knob:
            self._flip(self.knob, what)

    def _begin_anew(self) -> None:
        """Handle that the user turned to another knob: ask for all again, also what failed and after a cell."""
        history, answers = self._session.history, self._answers
        known = answers.largest if (history, history.model_version) == (answers.history, answers.version) else {}
        self._answers = _Answers(history, history.model_version, history.loaded_as, largest=known)
        self._news = object()

    def _keep_up(self) -> None:
        """Forget what does not hold any more."""
        history, answers = self._session.history, self._answers
        if history is not answers.history or history.model_version != answers.version:
            of_a_cell = history is answers.history and history.loaded_as == answers.loaded_as
            waits_at = history.steps if of_a_cell and answers.version >= 0 else None
            self._answers = _Answers(history, history.model_version, history.loaded_as, waits_at)
            self._news = object()
        elif answers.waits_at not in (None, history.steps):
            answers.waits_at = None
            self._news = object()
        for question, (_, step) in list(answers.failed.items()):
            if step not in (None, history.steps):
                del answers.failed[question]
                self._news = object()

    def _tip(self, name: str) -> str:
        session, now, answers, knob = self._session, self._session.settings, self._answers, KNOBS[name]
        present = self._from_here(now)
        flips = {getattr(flip, name): flip for flip in self._flips(name)}
        values = knob.offered(getattr(now, name), session.workload)
        rows = []
        for value in values or sorted({getattr(now, name), *flips}, key=lambda one: (one is None, one)):
            text, means = knob.text(value), knob.means.get(value, "")
            if value == getattr(now, name):
                rows.append(wording.present(text, means, present))
                continue
            flip = now.replace(**{name: value}) if value not in flips else flips[value]
            why_not = knob.asked_alone if knob.moves else "-"
            why_not = why_not or answers.failed.get((FLIP, flip), ("", None))[0]
            rows.append(wording.flip(text, means, self._from_here(flip), present, why_not, flip.mathematics(now)))
        if name == "batch_size" and now in answers.largest:
            rows.append(wording.largest(answers.largest[now], self._samples, now.batch_size))
        about = [knob.help, wording.critical(session) if name == "batch_size" else ""]
        if answers.waits_at is not None and knob.moves:
            about.append("A cell ran: predictions come after the next step.")
        return wording.tip(name, about, rows)

    def _from_here(self, flip: Settings) -> Prediction | None:
        """Return what is foreseen of a flip, which may have been asked from elsewhere."""
        foreseen = self._session.foreseen(flip)
        return foreseen and replace(foreseen, before=self._session.settings)

    @property
    def _samples(self) -> int | None:
        """Return how many there are for a micro-batch, if that is known."""
        session, workload = self._session, self._session.workload
        if workload is None:
            return None
        return workload.samples_per_micro_batch(session.size, session.settings.accumulation_steps)

    def _question(self, name: str) -> _Question | None:
        """Return the next thing to find out. What is now comes first: the others are told as differences from it."""
        session, answers, now = self._session, self._answers, self._session.settings
        flips = [flip for flip in self._flips(name)]
        known = [(flip, session.foreseen(flip)) for flip in ([now] if flips else []) + flips]
        questions = [(FLIP, flip) for flip, foreseen in known if foreseen is None]
        if name == "batch_size" and session.workload and not session.workload.data.batched:
            questions += [(LARGEST, now)] if now not in answers.largest else []
        questions += [(FLIP, flip) for flip, foreseen in known if foreseen and foreseen.cut_short]
        return next((question for question in questions if question not in answers.failed), None)

    def _ask(self, answers: _Answers, question: _Question) -> None:
        session = self._session
        kind, about = question
        began_s, now = time.monotonic(), session.settings
        changes: dict[str, Any] = about.changed_from(now)
        try:
            if kind == FLIP:
                session.predict(**changes)
            else:
                largest = session.largest_batch(**changes)
                answers.largest |= {about: largest} if session.settings == now else {}
        except Exception as error:  # and is not asked for again, unless it may go well later
            may_pass = isinstance(error, NotThisTime) or not isinstance(error, InvalidInput | WorkloadError)
            if session.settings == now:  # after a flip meanwhile, this was said of something else
                answers.failed[question] = str(error), session.history.steps if may_pass else None
            if not isinstance(error, GpumemError):
                raise
        finally:
            ended_s = time.monotonic()
            if session.playing:  # which shall come to something between two questions
                self._rests_until_s = ended_s + (ended_s - began_s)
            self._news = object()
            self._asking.release()

    def _flips(self, name: str) -> Sequence[Settings]:
        """Return what the present settings may be flipped to, as far as that goes with what is loaded."""
        session, workload = self._session, self._session.workload
        flips = single_flips(session.settings, workload) if workload else ()
        return [flip for knob, flip in flips if knob == name]
