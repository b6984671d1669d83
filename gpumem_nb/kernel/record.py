"""The record of a tuning session: what was tried on the ranks that run, before a restart, and in sessions before."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from ..cluster.interrupts import shielded
from ..planning.score import score
from ..report.answered import Answered
from ..report.configurations import Tried
from ..report.runs.row import Foretold, Row
from ..shared.messages import RankInfo
from .history import History

BEFORE_RESTART = "before a restart"
_ANSWERS_KEPT = 100
_LATE = 4  # configurations whose outcome may still change


class Record:
    """Outlives the ranks: a restart begins a new history, and what the one before had measured stays here.

    A row's number is given to it once, in the order in which rows come: people name rows by it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._history: History | None = None
        self._rank: RankInfo | None = None
        self._earlier: dict[str, Row] = {}  # of histories and sessions that are over, by key
        self._settled: dict[str, Row] = {}  # of the history that is written
        self._numbers: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._answers: deque[Answered] = deque(maxlen=_ANSWERS_KEPT)
        self._changes = 0  # of what is not in the history

    @property
    def version(self) -> tuple[object, ...]:
        """Another one whenever a row or a note may have changed; takes no time, unlike the rows."""
        history = self._history
        if history is None:
            return (self._changes,)
        outcomes = tuple(one.outcome for one in history.tried[-_LATE:])
        return self._changes, history.started_s, history.steps, len(history.tried), outcomes

    def follow(self, history: History, rank: RankInfo) -> None:
        """From now on the ranks' history is this one; the first of them is ``rank``, whose device stands for all."""
        with shielded(), self._lock:
            for row in self._own():
                self._earlier[row.key] = replace(row, came_from=BEFORE_RESTART, present=False)
            self._settled = {}
            self._history, self._rank = history, rank
            self._changes += 1

    def rows(self) -> list[Row]:
        """Every configuration that ran, by its number."""
        with shielded(), self._lock:
            rows = [*self._earlier.values(), *self._own()]
            noted = [replace(row, note=self._notes[row.key]) if row.key in self._notes else row for row in rows]
        return sorted(noted, key=lambda row: row.number)

    def note(self, key: str, text: str) -> None:
        """Keep the user's words about a row; an empty text takes away those that are there."""
        with shielded(), self._lock:
            self._notes[key] = text
            self._changes += 1

    def answered(self, who: str, said: str, step: int, workload: str) -> None:
        """Keep an answer of the doctor or the tuner about that workload, as it was after that step."""
        with shielded(), self._lock:
            self._answers.append(Answered(who, said, step, time.time(), workload))
            self._changes += 1

    @property
    def answers(self) -> tuple[Answered, ...]:
        """Return these answers, the earliest first."""
        with shielded(), self._lock:
            return tuple(self._answers)

    def bring(self, rows: Sequence[Row], came_from: str) -> int:
        """Take in rows of a session before; says how many were not there yet.

        Of a row that is known from another file that of more steps stays, and words of either where the other has none.
        """
        new = 0
        known = {row.key for row in self.rows()}  # all that are there get their numbers before those that come
        with shielded(), self._lock:
            self._changes += 1
            for row in rows:
                if row.key not in known:
                    number = self._number_of(row.key)
                    self._earlier[row.key] = replace(row, number=number, came_from=came_from, present=False)
                    known.add(row.key)
                    new += 1
                elif before := self._earlier.get(row.key):
                    goes_on = before.came_from != BEFORE_RESTART and row.steps > before.steps
                    more = replace(row, number=before.number, came_from=came_from, present=False)
                    first, other = (more, before) if goes_on else (before, more)
                    self._earlier[row.key] = replace(first, note=first.note or other.note)
        return new

    def _number_of(self, key: str) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def _own(self) -> list[Row]:
        """Those of the present history. Under the lock."""
        history = self._history
        if history is None:
            return []
        now = history.now()
        foretold = {
            _key(history, one.came): Foretold(
                one.predicted.live_peak_bytes,
                one.predicted.reserved_peak_bytes,
                one.samples_per_s,
                one.predicted.verdict,
                one.came.peak_bytes,
                one.predicted.lower_bound,
            )
            for one in score(history.asked, history.tried).scored
        }
        _hand_on(foretold, history)
        rows = history.of_tried(self._row_of(history, foretold.get))
        self._settled = {row.key: row for row, settled in rows if settled}
        present = now and _key(history, now)
        return [replace(row, present=True) if row.key == present else row for row, _ in rows]

    def _row_of(
        self, history: History, foretold: Callable[[str], Foretold | None]
    ) -> Callable[[Tried], tuple[Row, bool]]:
        """Return what makes a row of a configuration, and says whether it stays so; those that stay are made once."""

        def row_of(tried: Tried) -> tuple[Row, bool]:
            known = self._settled.get(_key(history, tried))
            if known and (known.steps, known.outcome) == (tried.steps, tried.outcome):
                return known, True
            return self._made(history, tried, foretold(_key(history, tried))), tried.settled

        return row_of

    def _made(self, history: History, tried: Tried, foretold: Foretold | None) -> Row:
        rank = self._rank
        assert rank is not None  # there is a history
        return Row(
            key=_key(history, tried),
            number=self._number_of(_key(history, tried)),
            workload=tried.workload,
            options=tried.options,
            parameters=tried.parameters,
            batch_norm=tried.batch_norm,
            model_version=tried.model_version,
            settings=tried.settings,
            ranks=history.size,
            device=rank.device_name,
            device_memory_bytes=rank.memory_limit,
            driver=rank.driver,
            began_s=tried.began_s,
            steps=tried.steps,
            outcome=tried.outcome,
            loss=tried.loss,
            peak_bytes=tried.peak_bytes,
            reserved_peak_bytes=tried.reserved_peak_bytes,
            headroom=tried.headroom,
            speed=tried.speed,
            curve=tried.curve if tried.settled else tried.curve.copy(),
            categories=dict(tried.categories),
            parts=tried.part_seconds,
            foretold=foretold,
        )


def _hand_on(foretold: dict[str, Foretold], history: History) -> None:
    """Keep predictions for settings that go on under another number after an interrupt or an error."""
    for before, after in pairwise(history.tried):
        known = foretold.get(_key(history, before))
        same = before.settings == after.settings and before.model_version == after.model_version
        if known and same and before.workload == after.workload:
            foretold.setdefault(_key(history, after), replace(known, came_bytes=after.peak_bytes))


def _key(history: History, tried: Tried) -> str:
    """Return what no other configuration of any session is called."""
    return f"{history.started_s:.6f}-{tried.settings_id}" + (f".{tried.part}" if tried.part else "")
