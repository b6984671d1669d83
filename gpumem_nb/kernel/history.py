"""The history of measurements: bounded samples of every rank, events, and every configuration tried."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..planning.prediction import Prediction
from ..planning.score import Asked
from ..report.configurations import Effect, Tried
from ..report.freed import leak_in_words
from ..report.instead import Instead
from ..report.rescue import Rescue
from ..report.run_summary import Evaluation
from ..shared.messages import ChunkReply, DeviceUse, Leak, Reading, Sample
from ..shared.settings import OWN, Settings
from ..shared.units import name_ranks
from .answers import Answers

T = TypeVar("T")

STEPS_KEPT = 2000
EVENTS_KEPT = 200
ASKED_KEPT = 2000
LEAKS_KEPT = 20
EVALUATIONS_KEPT = 2000
LATE_STEPS = 3  # configurations that steps under way may still belong to


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a mark on the charts.

    ``kind`` is ``load``, ``flip``, ``oom``, ``error``, ``stall``, ``leak``, ``eval`` or ``note``.
    """

    time_s: float
    step: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Something new in a history whose clock began at ``started_s``; both times are seconds since 1970."""

    started_s: float
    time_s: float
    what: Event | Evaluation | Tried | Sequence[Sample]

    @property
    def weight(self) -> int:
        """Return how many samples it holds, or 1."""
        return len(self.what) if isinstance(self.what, Sequence) else 1


class History:
    """Written by the thread that receives samples, read by panel and reports.

    ``told`` hears of all samples, events, evaluations and configurations at once, under the lock: it may not wait.

    Attributes:
        readings: the latest of each rank's memory.
        device_uses: what NVML last said of each rank's device; a virtual GPU has none.
        steps: optimizer steps done since the workload was loaded.
        pinned: the configuration that others are compared with; ``None``: each with the one before it.
        rescue: the latest step that was discarded, until something is flipped, loaded or synced.
        autotuned: what autotune said when it ended, until something is flipped or loaded.
        leaks: by its holder, what ranks found that they keep from step to step; since the workload was loaded.
        loaded_as: the ``settings_id`` with which it was loaded; older samples are of something else.
        changed_after: the step after which a cell may have changed what is trained for the last time.
        seen_before: samples that all ranks had seen when training was resumed.
        asked: what was predicted, to be held against what came.
        model_version: grows with whatever may change the model, such as a cell on the ranks.
        foreseen: the latest prediction for settings, since the model, or which optimizers hold state, may have changed.
        foreseen_version: grows with every change of that.
        answers: what was found in place of settings that do not fit, since the model may have changed.
        noise_scale: of the gradients of what is loaded, in samples, where it was measured last.
        evaluations: on the validation data, of all that was loaded so far.
        version: grows with every change.
    """

    def __init__(self, size: int, told: Callable[[Entry], None] = lambda entry: None) -> None:
        self.size = size
        self._told = told
        self.started_s = time.time()
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.tried: list[Tried] = []
        self.asked: deque[Asked] = deque(maxlen=ASKED_KEPT)
        self.version = self.model_version = self.foreseen_version = 0
        self.foreseen: dict[Settings, Prediction] = {}
        self.answers = Answers()
        self.pinned: Tried | None = None
        self.readings: list[Reading | None] = [None] * size
        self.device_uses: list[DeviceUse | None] = [None] * size
        self.steps = self.seen_before = self.loaded_as = self.changed_after = 0
        self.rescue: Rescue | None = None
        self.autotuned: Event | None = None
        self.leaks: dict[str, tuple[Leak, ...]] = {}
        self._changed_s = -math.inf
        self.noise_scale: float | None = None
        self.evaluations: deque[Evaluation] = deque(maxlen=EVALUATIONS_KEPT)
        self._by_rank: list[deque[Sample]] = [deque(maxlen=STEPS_KEPT) for _ in range(size)]
        self._lock = threading.Lock()

    def loaded_again(self, earlier: History, loaded_as: int) -> bool:
        """Return whether a workload was loaded since ``earlier`` was at ``loaded_as``; a restart does not count."""
        return self is earlier and self.loaded_as != loaded_as

    def now_s(self) -> float:
        """Seconds since the session started, on the samples' clock."""
        return time.time() - self.started_s

    def add(
        self, samples: Sequence[Sample], readings: Sequence[Reading], device_uses: Sequence[DeviceUse | None] = ()
    ) -> None:
        """Take in what the ranks sent with one chunk."""
        limits = [reading.limit_bytes for reading in readings]
        with self._lock:
            by_step: dict[int, list[Sample]] = defaultdict(list)
            for sample in samples:
                self._by_rank[sample.rank].append(sample)
                self.noise_scale = self.noise_scale if sample.noise_scale is None else sample.noise_scale
                if sample.done:
                    by_step[sample.step].append(sample)
            for step, of_step in sorted(by_step.items()):
                self.steps = step
                if of_step[0].time_s <= self._changed_s:  # it ended before the cell, and only its answer comes after
                    self.changed_after = step
                tried = self._of_step(step, of_step[0].settings_id)
                if tried and not tried.steps and tried.settings.optimizer == OWN:  # whose state stays beside others now
                    self.foreseen = {one: said for one, said in self.foreseen.items() if one.optimizer == OWN}
                    self.foreseen_version += 1
                if tried:
                    tried.add(of_step, limits)
                elif self.tried:
                    self.tried[-1].steps_beside += 1
            if samples:
                self._tell(samples)
        self.read(readings, device_uses)

    def _of_step(self, step: int, settings_id: int) -> Tried | None:
        """Return the configuration that a step belongs to: a new one if a cell may have changed the model before it."""
        tried = self.configuration(settings_id)
        latest = tried is not None and tried is self.tried[-1]
        if tried and latest and tried.steps and tried.model_version != self.model_version and step > self.changed_after:
            tried = tried.anew(self.model_version)
            self._append(tried)
        return tried

    def failed(self, settings_id: int, kind: str) -> None:
        """The next step under these settings could not be kept."""
        with self._lock:
            if tried := self._of_step(self.steps + 1, settings_id):
                tried.outcome = kind

    def read(self, readings: Sequence[Reading | None], device_uses: Sequence[DeviceUse | None] = ()) -> None:
        """Take in how each rank's device looks."""
        with self._lock:
            self.readings = list(readings)
            self.device_uses = list(device_uses) or [None] * self.size
            self.version += 1

    def mark(self, kind: str, text: str) -> None:
        """Put an event on the charts."""
        with self._lock:
            self._add(Event(self.now_s(), self.steps, kind, text))
            if kind in ("flip", "load"):
                self.rescue = self.autotuned = None
            if kind == "load":
                self.leaks, self.changed_after, self.noise_scale = {}, 0, None
                if self.tried:
                    self.loaded_as, self.pinned = self.tried[-1].settings_id, None
                self._forget_foreseen()
            self.version += 1

    def model_may_have_changed(self) -> None:
        """Ignore earlier predictions and measurements from now on: the next step begins a configuration."""
        with self._lock:
            self.changed_after, self._changed_s = self.steps, self.now_s()
            self._forget_foreseen()

    def predicted(self, asked: Asked) -> None:
        """Take in what was predicted of the model as it was at some version."""
        with self._lock:
            self.asked.append(asked)
            if asked.model_version == self.model_version:
                self.foreseen[asked.prediction.settings] = asked.prediction
                self.foreseen_version += 1

    def _forget_foreseen(self) -> None:
        self.model_version += 1
        self.foreseen = {}
        self.answers.forget()
        self.foreseen_version += 1
        if self.tried and not self.tried[-1].steps:
            self.tried[-1].model_version = self.model_version

    def rescued(self, rescue: Rescue) -> None:
        """A step was discarded."""
        self.mark(rescue.failure.kind, rescue.headline)
        self.rescue = rescue

    def settled(self, kind: str) -> None:
        """Forget the rescue of a failure of this kind: its cause is fixed."""
        with self._lock:
            if self.rescue and self.rescue.failure.kind == kind:
                self.rescue = None
                self.version += 1

    def evaluated(self, evaluation: Evaluation) -> None:
        """The ranks evaluated the model."""
        with self._lock:
            self.evaluations.append(evaluation)
            self._tell(evaluation)
            self._add(Event(self.now_s(), evaluation.step, "eval", str(evaluation)))
            self.version += 1

    def leaked(self, leaks: Sequence[Leak]) -> list[str]:
        """Take in what ranks found that they keep from step to step; returns what that says of holders new here."""
        known, found = self.leaks, dict(self.leaks)
        for leak in leaks:
            found[leak.name] = (*found.get(leak.name, ()), leak)
        self.leaks = dict(list(found.items())[-LEAKS_KEPT:])
        news = [leak_in_words(found[name]) for name in found if name not in known]
        for sentence in news:
            self.mark("leak", sentence)
        return news

    def noted(self, replies: Sequence[ChunkReply]) -> list[str]:
        """Take in what ranks have to say, and return it."""
        by = {note: [r.rank for r in replies if note in r.notes] for reply in replies for note in reply.notes}
        news = [note if len(by[note]) == len(replies) else f"{name_ranks(by[note])}: {note}" for note in by]
        for sentence in news:
            self.mark("note", sentence)
        return news

    def tried_out(self) -> None:
        """The ranks found out whether other settings would have let a discarded step fit."""
        with self._lock:
            if (one := self.rescue) and one.instead and not one.looking and one.model_version == self.model_version:
                self.answers.found(one.instead, one)
            self.version += 1

    def found_instead(self, found: Instead, model_version: int) -> None:
        """Give this answer from now on, on the card too, if the model is still as it was at that version."""
        with self._lock:
            if model_version == self.model_version:
                self.answers.found(found, self.rescue)
            self.version += 1

    def begin(
        self,
        settings_id: int,
        workload: str,
        settings: Settings,
        options: tuple[tuple[str, float], ...] = (),
        parameters: int | None = None,
        batch_norm: bool = False,
    ) -> None:
        """A configuration is about to be tried."""
        with self._lock:
            of_model: dict[str, Any] = {"options": options, "parameters": parameters, "batch_norm": batch_norm}
            tried = Tried(settings_id, workload, settings, self.model_version, **of_model)
            self._append(tried)
            self._tell(tried)
            self.version += 1

    def _append(self, tried: Tried) -> None:
        self.tried.append(tried)
        for old in self.tried[-LATE_STEPS - 1 : -LATE_STEPS]:
            old.settle()

    def autotune_ended(self, said: str) -> None:
        """It has set what it found, or nothing."""
        self.mark("note", said)
        self.autotuned = self.events[-1]
        self.tries_no_more()

    def tries_no_more(self) -> None:
        """Name the present configuration to logs again, which were told of those that autotune tried."""
        with self._lock:
            for latest in self.tried[-1:]:
                self._tell(latest)

    def tries(self, settings_id: int, workload: str, settings: Settings) -> None:
        """Autotune is about to take steps under these: no configuration of its own, but logs name it."""
        with self._lock:
            self._tell(Tried(settings_id, workload, settings, self.model_version))

    def _add(self, event: Event) -> None:
        self.events.append(event)
        self._tell(event)

    def _tell(self, what: Event | Evaluation | Tried | Sequence[Sample]) -> None:
        self._told(Entry(self.started_s, time.time(), what))

    def settings_now(self) -> Entry | None:
        """Return the latest configuration, for a log that begins now."""
        return Entry(self.started_s, time.time(), self.tried[-1]) if self.tried else None

    def of_tried(self, make: Callable[[Tried], T]) -> list[T]:
        """Apply ``make`` to every configuration under the lock; ``make`` must not block."""
        with self._lock:
            return [make(one) for one in self.tried if one.ran]

    @property
    def running(self) -> Tried | None:
        """The present configuration, if steps went well under it of the model as it is: it fits, whatever is said."""
        now = self.now()
        return now if now and now.outcome == "ok" and self.steps > self.changed_after else None

    @property
    def steps_since_load(self) -> int:
        """Those done here, without those of a state that was resumed."""
        with self._lock:
            return sum(one.steps + one.steps_beside for one in self.tried if one.settings_id >= self.loaded_as)

    @property
    def begun(self) -> int:
        """Return how many configurations have begun, one that waits for its first step left out."""
        return len(self.tried) - any(not one.ran for one in self.tried[-1:])

    def configuration(self, settings_id: int) -> Tried | None:
        """Return the configuration with this id, latest first."""
        return next((tried for tried in reversed(self.tried) if tried.settings_id == settings_id), None)

    def samples(self, last: int | None = None) -> list[list[Sample]]:
        """Return the latest samples of each rank, oldest first."""
        with self._lock:
            return [list(kept)[-last:] if last else list(kept) for kept in self._by_rank]

    def of_loaded(self, last: int | None = None) -> list[list[Sample]]:
        """Return the same of what is loaded now."""
        return [[one for one in of_rank if one.settings_id >= self.loaded_as] for of_rank in self.samples(last)]

    def asked_for(self, last: int | None = None) -> list[list[Sample]]:
        """Return those of them whose settings the user asked for, and autotune did not just try."""
        return [[one for one in of_rank if not one.tried] for of_rank in self.of_loaded(last)]

    def since_cell(self, rows: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Of these the steps since a cell may have changed the model; all of them while there are none."""
        found = [[one for one in of_rank if one.step > self.changed_after] for of_rank in rows]
        return found if any(found) else [list(of_rank) for of_rank in rows]

    def step_durations(self) -> tuple[list[float], list[float]]:
        """Return seconds of steps that were recorded, and of others.

        Of rank 0's steps under the latest settings, the first ones left out: those are special.
        """
        with self._lock:
            steps = [one for one in self._by_rank[0] if one.event == "" and one.step > self.changed_after]
        latest = steps[-1].settings_id if steps else None
        steps = [sample for sample in steps if sample.settings_id == latest][2:]
        return [one.step_s for one in steps if one.ledger], [one.step_s for one in steps if not one.ledger]

    def now(self) -> Tried | None:
        """Return the latest configuration; of several with the same settings in a row the last that has figures.

        After an interrupt, for example, the same settings go on under another number.
        """
        latest = self.tried[-1] if self.tried else None
        for earlier in reversed(self.tried):
            if latest is None or earlier.settings_id < self.loaded_as or earlier.settings != latest.settings:
                break
            if earlier.steps:
                return earlier
        return latest

    def pin(self, wanted: bool) -> bool:
        """Compare with the configuration of now from now on, or again with the one before each flip.

        Says whether that can be done: only what was measured can be compared with.
        """
        with self._lock:
            now = self.now() if wanted else None
            if wanted and (now is None or not now.steps):
                return False
            self.pinned = now
            self.version += 1
        return True

    def effect(self) -> Effect | None:
        """Return the latest configuration beside the pinned one, or beside the one before it, of what is loaded."""
        with self._lock:
            after = self.now()
            if after is None:
                return None
            own = [tried for tried in self.tried if tried.settings_id >= self.loaded_as]
            for before in [self.pinned] if self.pinned else own[::-1]:
                if before.steps and before.settings_id < after.settings_id:
                    same = not after.settings.changed_from(before.settings)
                    return None if same else Effect(before, after, pinned=before is self.pinned)
            return None
