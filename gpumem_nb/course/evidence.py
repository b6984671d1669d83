"""The evidence that judges look at: the session, and figures that are measured for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..report.memory import MemoryReport
from ..report.run_summary import Run
from ..session import Session, current
from ..shared.errors import GpumemError, TrainingFailed
from ..shared.messages import Ledger, Timeline
from ..shared.settings import Settings
from ..workloads import catalog

STALL_S = 5.0
"""So long do ranks wait for each other in a student's code, before they are freed."""
MOST_S = 60.0
"""So long may a student's code take."""
_ON_RANKS = f"{__package__}.on_ranks"
STEPS = 3  # the first makes the optimizer's state, and the caching allocator settles


_known: WeakKeyDictionary[Any, dict[tuple[Any, ...], Measured]] = WeakKeyDictionary()  # by a start's history


class NotReady(GpumemError):
    """An exercise cannot be checked yet; the message says what to do first."""


class DoesNotFit(NotReady):
    """The ranks ran out of memory under the settings that were to be measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a few steps under some settings gave: the run, and one step more that was recorded and undone."""

    run: Run
    memory: MemoryReport

    @property
    def ledger(self) -> Ledger:
        """Return whose bytes they were in the recorded step, on the rank with the largest share of its limit."""
        return self._timeline.ledger

    @property
    def live_peak_bytes(self) -> int:
        """Return the live peak of that step."""
        return self.ledger.peak_bytes

    @property
    def highest(self) -> dict[str, int]:
        """Return the most that each category held in that step, at whatever moment."""
        return {name: max(sizes) for name, sizes in self._timeline.live_bytes.items()}

    @property
    def _timeline(self) -> Timeline:
        found = self.memory.worst_timeline
        assert found is not None
        return found


class Evidence:
    """Whatever a judge may ask for."""

    @property
    def session(self) -> Session:
        """Return the running session; raises ``NoSession`` when there is none."""
        return current()

    def needs(self, load: str) -> None:
        """Make sure that a workload is loaded, given as it is typed after ``%hvd_load``.

        Raises:
            NotReady: something else is loaded, or the same with other options.
        """
        name, *pairs = load.split()
        wanted = catalog.find(name).values(dict(pair.split("=", 1) for pair in pairs))
        loaded = self.session.workload
        known: Mapping[str, float] = dict(loaded.options) if loaded else {}
        if loaded is None or loaded.name != name or catalog.find(name).values(known) != wanted:
            raise NotReady(f"This exercise is about another workload than is loaded now. Type %hvd_load {load}")

    def needs_names(self, *names: str, cell: str) -> None:
        """Make sure that cells have defined these names on all ranks; ``cell`` says in words which one does.

        Raises:
            NotReady: some are not there, because the cell was not run, or not since the ranks were started.
        """
        for missing in self.session.run(f"[name for name in {names!r} if name not in globals()]"):
            if missing:
                raise NotReady(f"The ranks do not know {missing[0]!r} yet. Run {cell} first.")

    def of_function(self, name: str, harness: str, *given: int) -> list[Any]:
        """Have a function of ``course/on_ranks`` measure what a student's cell defined on the ranks.

        Args:
            name: of both, and of the exercise's cell.
            harness: the module in ``course/on_ranks``.
            given: what its function takes beside the names of the rank's cells.

        Returns:
            What was measured, in rank order.

        Raises:
            NotReady: no cell has defined it yet.
            RankError, TimeoutError: as for :meth:`of_module`.
        """
        self.needs_names(name, cell=f"the cell that defines {name}")
        return self.of_module(harness, f"{name}(globals(), *{given!r})")

    def of_module(self, harness: str, call: str) -> list[Any]:
        """Call a function of a module in ``course/on_ranks`` on all ranks, such as ``"rounded(0.001, 1000)"``.

        Where it takes the names of the rank's cells, they are ``globals()``.

        Raises:
            RankError: it failed; ``Stalled`` where ranks waited longer than ``STALL_S`` for ranks that did not come.
            TimeoutError: it did not come back within ``MOST_S``.
        """
        session = self.session
        limit_s = session.policy.stall_limit_s
        session.set(stall_limit_s=STALL_S)
        try:
            return session.run(f"__import__({f'{_ON_RANKS}.{harness}'!r}, fromlist=['*']).{call}", timeout=MOST_S)
        finally:
            session.set(stall_limit_s=limit_s)

    def measure(self, /, **knobs: Any) -> Measured:
        """Train a few steps as :meth:`trained` does, and record one more, which is undone.

        What was measured already under these settings is given again, until something is loaded or a cell runs on the
        ranks: another try takes no time, and is held against the same figure.

        Raises:
            NotReady: the ranks do not train under these settings; ``DoesNotFit`` if they ran out of memory.
        """
        return self._measure(Settings().replace(**knobs))

    def measure_now(self) -> Measured:
        """Do the same under the present settings, whatever they are; raises ``NotReady``."""
        return self._measure(self.session.settings)

    @contextmanager
    def trained(self, /, **knobs: Any) -> Iterator[Run]:
        """Train a few steps under these settings, and put the settings back when the block ends.

        Knobs that are not named are at their defaults, whatever was set before. Training in the background goes on
        afterwards.

        Raises:
            NotReady: the ranks do not train under these settings; ``DoesNotFit`` if they ran out of memory.
        """
        with self._trained(Settings().replace(**knobs)) as run:
            yield run

    def _measure(self, wanted: Settings) -> Measured:
        history = self.session.history
        known = _known.setdefault(history, {})
        about = history.loaded_as, history.model_version, wanted
        if about not in known:
            with self._trained(wanted) as run:
                known[about] = Measured(run, self.session.memory(timeline=True))
        return known[about]

    @contextmanager
    def _trained(self, wanted: Settings) -> Iterator[Run]:
        session = self.session
        before, playing = session.settings, session.playing
        session.pause()
        try:
            _settle(session, wanted)
            try:
                run = session.train(STEPS)
            except TrainingFailed as error:
                raise _why_not(session, str(error)) from None
            if session.settings != wanted:
                raise _why_not(session, " ".join(run.notes))
            yield run
        finally:
            _settle(session, before)
            if playing:
                session.play()


def _settle(session: Session, wanted: Settings) -> None:
    """Bring the session to these settings; a knob may switch another, such as activation_budget checkpointing."""
    for _ in range(2):
        if changes := wanted.changed_from(session.settings):
            session.set(**changes)


def _why_not(session: Session, said: str) -> NotReady:
    """Return what is to be raised where training under some settings ended otherwise."""
    rescue = session.history.rescue
    if rescue is not None and rescue.failure.kind == "oom":
        return DoesNotFit(rescue.headline)
    return NotReady(f"These settings could not be measured. {said}")
