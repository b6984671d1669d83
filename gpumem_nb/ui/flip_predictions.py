"""Predictions for each other value of a knob, shown at the knob before you flip it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..planning.prediction import Prediction
from ..planning.what_if import single_flips
from ..report.differences import short
from ..shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ..shared.knobs import KNOBS
from ..shared.messages import least_limit
from ..shared.settings import Settings
from . import wording
from .pictures import batch_lines
from .widgets import Ask, region, toggle

if TYPE_CHECKING:
    from ..session import Session

LINES_OF = ("precision", "checkpointing")  # knobs with a line of their own for each value
TIMEOUT_S = 10.0  # how long a flip waits for the question under way
FLIP, LARGEST, LINE = "flip", "largest", "line"  # kinds of questions
_Question = tuple[str, Settings]


@dataclass
class _Answers:
    """Answers about a model at one version, besides the session's predictions."""

    history: object
    version: int = -1
    loaded_as: int = -1
    waits_at: int | None = None  # the step that must be left behind before anything is asked
    largest: dict[Settings, int] = field(default_factory=dict)  # micro-batch that fits; 0 where none does
    peaks: dict[Settings, dict[int, int]] = field(default_factory=dict)  # reserved bytes by batch size
    failed: dict[_Question, tuple[str, int | None]] = field(default_factory=dict)  # why; at which step, if it may pass


class FlipPredictions:
    """Asks for one prediction after the other while it is open and no other work waits for the ranks.

    A prediction holds until something may have changed the model. After a cell nothing is asked before the next step:
    a question would put modes and gradients back that the next cell may look at. ``submit`` is called with a question
    to be asked on another thread.

    Attributes:
        button: opens and closes it.
        regions: what is shown at the knobs that move memory, by name.
        key: what the signs mean.
        lines: peaks against the batch size.
    """

    def __init__(self, session: Session, submit: Ask) -> None:
        self._session = session
        self._submit = submit
        self._turn = threading.Semaphore()  # taken by the question under way, or by a flip that is predicted first
        self._rests_until_s = 0.0
        self._answers = _Answers(session.history)
        self._shown: object = None
        self._news = object()  # another one with all that becomes known or is forgotten here
        self.button = toggle("what if", "question", "what each other value would need, from undone steps")
        self.button.observe(lambda _: self._begin_anew(), names="value")
        self.regions = {
            name: region("gpumem-what-if", "group", f"what other values of {name} would need")
            for name, knob in KNOBS.items()
            if knob.moves
        }
        self.key = region("gpumem-what-if-key", "group", "what the signs of what if mean")
        self.lines = region("gpumem-batch-lines", "group", "reserved memory against the batch size")

    def follow(self, names: Sequence[str]) -> None:
        """Show what is known of flips of these knobs, and ask for what is not."""
        session, history = self._session, self._session.history
        busy = session.busy  # asked first: a cell that has ended by now has made another version of the model
        self._keep_up()
        answers = self._answers
        is_open = self.button.value and session.workload is not None and not session.ended
        state = (is_open, session.settings, history, history.foreseen_version, self._news, names)
        if state != self._shown:
            self._shown = state
            self._show(names if is_open else ())
        rests = busy or answers.waits_at is not None or time.monotonic() < self._rests_until_s
        if is_open and not rests and (question := self._question(names)) and self._turn.acquire(blocking=False):
            self._submit(partial(self._ask, answers, question))

    def refusal(self, name: str, value: str) -> str:
        """Return why you should not give this value to this knob; empty if there is no reason.

        While it is open, what is not known yet is predicted first, unless other work waits for the ranks. This waits
        for the question under way, so it is not for the page's own thread.
        """
        session = self._session
        if name not in self.regions or session.workload is None:
            return ""
        try:
            wanted = session.settings.replace(**{name: value})
            foreseen = session.foreseen(wanted)
            if foreseen is None and self.button.value:
                is_taken = self._turn.acquire(timeout=TIMEOUT_S)
                try:
                    foreseen = session.foreseen(wanted)
                    if foreseen is None and not session.busy:
                        foreseen = session.predict(**{name: value})
                finally:
                    if is_taken:
                        self._turn.release()
        except GpumemError:  # setting it raises the same error
            return ""
        return foreseen.refusal if foreseen else ""

    def _begin_anew(self) -> None:
        """Handle that the user opened or closed it: ask for all again, also what failed and after a cell."""
        history = self._session.history
        self._answers = _Answers(history, history.model_version, history.loaded_as)
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

    def _show(self, names: Sequence[str]) -> None:
        session, now, answers = self._session, self._session.settings, self._answers
        for name, shown in self.regions.items():
            rows = [
                wording.flip(
                    KNOBS[name].text(getattr(flip, name)),
                    self._from_here(flip),
                    answers.failed.get((FLIP, flip), ("", None))[0],
                    flip.mathematics(now),
                )
                for flip in (self._flips([name]) if name in names else ())
            ]
            if name == "batch_size" and now in answers.largest and rows:
                rows.append(wording.largest(answers.largest[now], self._samples))
            shown.html = "".join(rows)
        limit = least_limit(session.history.readings)
        self.key.html = wording.flip_key(limit, answers.waits_at is not None) if names else ""
        lines = {name: answers.peaks[about] for name, about in self._lines(names) if about in answers.peaks}
        self.lines.html = batch_lines(lines, now.batch_size, limit)

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

    def _question(self, names: Sequence[str]) -> _Question | None:
        """Return the next thing to find out."""
        session, answers, now = self._session, self._answers, self._session.settings
        known = [(flip, session.foreseen(flip)) for flip in self._flips(names)]
        questions = [(FLIP, flip) for flip, foreseen in known if foreseen is None]
        if "batch_size" in names and session.workload and not session.workload.data.batched:
            questions += [(LARGEST, now)] if now not in answers.largest else []
            questions += [(LINE, about) for _, about in self._lines(names) if about not in answers.peaks]
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
            elif kind == LARGEST:
                largest = session.largest_batch(**changes)
                answers.largest |= {about: largest} if session.settings == now else {}
            else:
                peaks = session.peaks_by_batch(**changes)
                answers.peaks |= {about: peaks} if session.settings == now else {}
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
            self._turn.release()

    def _lines(self, names: Sequence[str]) -> Iterator[tuple[str, Settings]]:
        """Yield the present settings and what changes how peaks grow with the batch, with names."""
        if names:
            yield "as it is", self._session.settings
        for flip in self._flips([name for name in LINES_OF if name in names]):
            yield short(self._session.settings, flip), flip

    def _flips(self, names: Sequence[str]) -> Iterator[Settings]:
        """Yield what the present settings may be flipped to, as far as that goes with what is loaded."""
        session, workload = self._session, self._session.workload
        flips = single_flips(session.settings, workload) if workload else ()
        return (flip for name, flip in flips if name in names)
