"""What each other value of a knob would need, shown at the knob before anybody flips it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import ipywidgets

from ..planning.what_if import single_flips
from ..shared.errors import GpumemError
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from . import wording
from .region import Region
from .steered import Steered

_Key = tuple[int, Settings]  # the model's version, and what was asked about


class Foresight:
    """Asks for one prediction after the other while it is open and nobody waits for the ranks.

    A prediction holds until something may have changed the model. ``submit`` is called with an action to do; it must
    not wait for it.

    Attributes:
        button: opens and closes it.
        regions: what is shown at the knobs that move memory, by name.
        key: what the signs mean.
    """

    def __init__(self, session: Steered, submit: Callable[[Callable[[], object]], None]) -> None:
        self._session = session
        self._submit = submit
        self._asking = False
        self._of = session.history  # a restart begins another one
        self._failed: dict[_Key, str] = {}  # what nothing could be said of, and why
        self._largest: dict[_Key, int] = {}  # micro-batch that fits; 0 where none does
        self._shown: object = None
        self.button = ipywidgets.ToggleButton(
            description="what if", icon="question", tooltip="what each other value would need, from small undone steps"
        )
        self.regions = {
            name: Region(role="group", label=f"what other values of {name} would need")
            for name, knob in KNOBS.items()
            if knob.moves
        }
        self.button.observe(lambda _: self._failed.clear(), names="value")
        for region in self.regions.values():
            region.add_class("gpumem-what-if")
        self.key = Region(role="group", label="what the signs of what if mean")
        self.key.add_class("gpumem-what-if-key")

    def follow(self, names: Sequence[str]) -> None:
        """Show what is known of flips of these knobs, and ask for what is not."""
        session, history = self._session, self._session.history
        is_open = self.button.value and session.workload is not None and not session.ended
        if history is not self._of:
            self._of = history
            self._failed.clear()
            self._largest.clear()
        asked = history.asked[-1] if history.asked else None
        state = (is_open, session.settings, history.model_version, asked, len(self._failed), len(self._largest), names)
        if state != self._shown:
            self._shown = state
            self._show(names if is_open else ())
        if is_open and not self._asking and not session.busy and (question := self._question(names)):
            self._asking = True
            self._submit(question)

    def refusal(self, name: str, value: str) -> str:
        """Why nobody should give this value to this knob; empty where nothing speaks against it.

        While it is open, what is not known yet is predicted first.
        """
        session = self._session
        if name not in self.regions or session.workload is None:
            return ""
        try:
            settings = session.settings.replace(**{name: value})
            foreseen = session.foreseen(settings)
            if foreseen is None and self.button.value:
                foreseen = session.predict(**{name: value})
        except GpumemError:  # whoever sets it will hear of it
            return ""
        return foreseen.refusal if foreseen else ""

    def _show(self, names: Sequence[str]) -> None:
        session, now = self._session, self._session.settings
        for name, region in self.regions.items():
            rows = [
                wording.flip(KNOBS[name].text(getattr(flip, name)), session.foreseen(flip), self._why_not(flip), now)
                for flip in (self._flips([name]) if name in names else ())
            ]
            if name == "batch_size" and (largest := self._largest.get(self._key(now))) is not None and rows:
                rows.append(wording.largest(largest))
            region.html = "".join(rows)
        limits = [reading.limit_bytes for reading in session.history.readings if reading]
        self.key.html = wording.flip_key(limits) if names else ""

    def _question(self, names: Sequence[str]) -> Callable[[], object] | None:
        """The next thing to find out."""
        session, now = self._session, self._session.settings
        unknown = (flip for flip in self._flips(names) if session.foreseen(flip) is None and not self._why_not(flip))
        if flip := next(unknown, None):
            changes = flip.changed_from(now)
            return lambda: self._ask(flip, lambda: session.predict(**changes))
        batched = session.workload is None or session.workload.data.batched
        key = self._key(now)
        if "batch_size" in names and not batched and key not in self._largest and not self._why_not(now):
            return lambda: self._ask(now, self._find_largest)
        return None

    def _ask(self, about: Settings, question: Callable[[], object]) -> None:
        key = self._key(about)
        try:
            question()
        except Exception as error:
            self._failed[key] = str(error)  # and not asked for again
            if not isinstance(error, GpumemError):
                raise
        finally:
            self._asking = False

    def _find_largest(self) -> None:
        key = self._key(self._session.settings)
        self._largest[key] = self._session.largest_batch()

    def _flips(self, names: Sequence[str]) -> Iterator[Settings]:
        session = self._session
        for knobs in single_flips(session.settings):
            [(name, value)] = knobs.items()
            refuses = KNOBS[name].refuses
            if name in names and not (refuses and refuses(value, session.workload)):
                yield session.settings.replace(**knobs)

    def _why_not(self, about: Settings) -> str:
        return self._failed.get(self._key(about), "")

    def _key(self, about: Settings) -> _Key:
        return self._session.history.model_version, about
