"""Faults to inject, situations to inject them in, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from gpumem_nb.planning import instead
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from tests import internals
from tests.cluster import trouble
from tests.conftest import weights
from tests.internals import wait_for_steps
from tests.timing import HANG_S, until

STALL_LIMIT_S = 2.0
STEPS = 100_000  # more than are done before the fault strikes
NEW_RATE = 0.02


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        says: what the message must match.
        within_s: how long the message may take.
        plant: where in a step and what goes wrong there on rank 1, or
        act: something done from another thread, given the situation; what it returns is the message, ``None`` if others
            tell.
        after: how often that place is passed unharmed, or for how many hundredths of a second nothing is done.
        ends: ``stops`` training, is ``survived`` by it, or the ranks ``die``.
    """

    name: str
    says: str
    within_s: float
    plant: tuple[str, str] | None = None
    act: Callable[[Session, str], str | None] | None = None
    after: int = 0
    ends: str = "stops"

    @property
    def stalls(self) -> bool:
        """Whether ranks wait for one another until they are freed."""
        return "waited in" in self.says

    def at_a_random_moment(self, dice: random.Random) -> Fault:
        """The same fault a little later."""
        return replace(self, after=dice.randrange(20 if self.act else 6))


def _kill(victim: Callable[[Session], int]) -> Callable[[Session, str], None]:
    return lambda session, situation: os.kill(victim(session), signal.SIGKILL)


def _stop_and_continue(session: Session, situation: str) -> str:
    pid = session.ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        return until(lambda: session.doing if "stopped" in session.doing else "")
    finally:
        os.kill(pid, signal.SIGCONT)


_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"


def _save_to_a_full_disk(session: Session, situation: str) -> str:
    target = Path(session.run("import tempfile; tempfile.mkdtemp()", ranks="0")[0]) / "full.state"
    session.run(_LIMIT.format(100), ranks="0")
    try:
        session.save(target)
        return "it was saved"
    except GpumemError as error:
        assert not list(target.parent.iterdir()), "nothing may be left of it"
        return str(error)
    finally:
        session.run(_LIMIT.format("resource.RLIM_INFINITY"), ranks="0")
        target.parent.rmdir()


def _resume_from_a_truncated_file(session: Session, situation: str) -> str:
    target = Path(session.run("import tempfile; tempfile.mkdtemp()", ranks="0")[0]) / "short.state"
    session.save(target)
    target.write_bytes(target.read_bytes()[:-100])
    try:
        session.resume(target)
        return "it was resumed"
    except GpumemError as error:
        return str(error)
    finally:
        target.unlink()
        target.parent.rmdir()


def _interrupt(session: Session, situation: str) -> None:
    if situation in ("foreground", "cell"):  # the stop button, while the notebook waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        session.interrupt()


def controller(session: Session) -> int:
    """The pid of the controller that belongs to the session."""
    rank = psutil.Process(session.ranks[0].pid)
    kernel = psutil.Process()
    mpiexec = next(parent for parent in rank.parents() if parent.ppid() == kernel.pid)
    found = next(
        child
        for child in kernel.children()
        if child.pid != mpiexec.pid and "ipyparallel.controller" in " ".join(child.cmdline())
    )
    return int(found.pid)


def family(session: Session) -> list[psutil.Process]:
    """Every process of the session's cluster."""
    marks = ("ipyparallel", "mpiexec", "prte")
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, perhaps without having been waited for
            if any(mark in " ".join(child.cmdline()) for mark in marks):
                found.append(child)
    return found


STALLED = r"[Rr]ank 1 was in the data part of step \d+, ranks? 0\S* waited in the gradient reduction"
OOM_S = 3.0 + instead.TIMEOUT_S  # the sentence also names what would have fit
FAULTS = [
    Fault("OOM", "rank 1 ran out of memory in the forward part .* Tried to allocate", OOM_S, ("forward", "oom")),
    Fault("exception", "rank 1 failed in the backward part .* planted", 3.0, ("backward", "error")),
    Fault("wrong shapes", "rank 1 failed in the forward part .* shapes", 3.0, ("shapes", "shapes")),
    Fault("NaN loss", "rank 1 failed .* the loss became nan", 3.0, ("nan", "nan")),
    Fault("SIGKILL", "(?s)[Rr]ank 1 .*SIGKILL", 3.0, act=_kill(lambda s: s.ranks[1].pid), ends="dies"),
    Fault("SIGSTOP", "[Rr]ank 1 .*stopped", 5.0, act=_stop_and_continue, ends="survived"),
    Fault("hang in loader", STALLED, STALL_LIMIT_S + 4.0, ("data", "hang")),
    Fault("mismatched collective", r"(?s)waited in .*'alone'", STALL_LIMIT_S + 4.0, ("collate", "collective")),
    Fault("disk full while saving", "cannot be written", 3.0, act=_save_to_a_full_disk, ends="survived"),
    Fault(
        "truncated snapshot", "is cut off: its end is missing", 3.0, act=_resume_from_a_truncated_file, ends="survived"
    ),
    Fault(
        "controller death", r"controller \(pid \d+\) was killed by signal 9", 3.0, act=_kill(controller), ends="dies"
    ),
    Fault("interrupt", "(?i)interrupted|paused", 2.0, act=_interrupt),
]


class Incident:
    """One fault in one situation: strikes it and keeps what was said and how long that took.

    Attributes:
        steps_flipped: done under the settings of the flip when that was told.
    """

    def __init__(self, session: Session, fault: Fault) -> None:
        self.session = session
        self.fault = fault
        self.said: list[str] = []
        self.struck_s = 0.0
        self.heard_s = 0.0
        self.steps_flipped = 0
        self._begun: Path | None = None
        self._struck: Path | None = None
        self._began_s = session.history.now_s()
        self._first = session.history.steps

    @property
    def took_s(self) -> float:
        """From the fault to the message."""
        return self.heard_s - self.struck_s

    def foreground(self) -> None:
        """While the notebook waits for training."""
        self._plant()
        actor = self._actor("foreground")
        if actor and self.fault.ends == "survived":
            while actor.is_alive():
                self._hear(lambda: str(self.session.train(10)))
        else:
            self._hear(lambda: str(self.session.train(STEPS)))
        self._join(actor)

    def background(self) -> None:
        """While training plays and the panel is open."""
        self.session.panel()
        self.session.play()
        self._wait_for_steps()
        self._plant()
        self._join(self._actor("background"))
        self._listen()

    def flip(self) -> None:
        """While settings change: in the first step under the new ones."""
        self.session.play()
        self._wait_for_steps()
        with self._meeting() as waits:
            if self.fault.act:
                self.session.run(f"{waits}; plant('data', 'linger', flip=True)")
            self._plant(flip=True)
            actor, known = self._actor("flip"), len(self.session.history.tried)
            self._hear(lambda: str(self.session.set(checkpointing="blocks", learning_rate=NEW_RATE)))
            self._join(actor)
        self._listen()
        under_new = [tried for tried in self.session.history.tried[known:] if tried.settings.learning_rate == NEW_RATE]
        self.steps_flipped = sum(tried.steps for tried in under_new)

    def cell(self) -> None:
        """While a cell runs between steps of a training that plays."""
        self.session.play()
        self._wait_for_steps()
        with self._meeting() as waits:
            actor = self._actor("cell")
            cell = f"{self._planting()}\n{waits}\n" + ("linger()" if actor else "")
            self._hear(lambda: str(self.session.run(cell)))
            self._join(actor)
        self._listen()

    @contextmanager
    def _meeting(self) -> Iterator[str]:
        """Yield the code with which ranks say that they linger; they do until the fault has struck."""
        with TemporaryDirectory() as folder:
            self._begun, self._struck = Path(folder) / "begun", Path(folder) / "struck"
            yield f"begun, struck = {str(self._begun)!r}, {str(self._struck)!r}"

    def _planting(self, flip: bool = False) -> str:
        fault = self.fault
        return f"plant(*{fault.plant}, after={fault.after}, flip={flip})" if fault.plant else ""

    def _plant(self, flip: bool = False) -> None:
        self.struck_s = time.monotonic()
        if code := self._planting(flip):
            self.session.run(code)

    def _actor(self, situation: str) -> threading.Thread | None:
        self.struck_s = time.monotonic()
        if self.fault.act is None:
            return None

        def act() -> None:
            assert self.fault.act is not None
            if situation == "foreground":
                self._wait_for_steps()
            if self._begun and self._struck:
                until(self._begun.exists)
                if self.fault.ends == "survived":  # it asks the ranks, which answer when they linger no more
                    self._struck.touch()
            time.sleep(self.fault.after / 100)
            self.struck_s = time.monotonic()
            try:
                if said := self.fault.act(self.session, situation):
                    self._keep(said)
            finally:
                if self._struck:
                    self._struck.touch()

        actor = threading.Thread(target=act)
        actor.start()
        return actor

    def _join(self, actor: threading.Thread | None) -> None:
        if actor:
            actor.join(HANG_S)
            assert not actor.is_alive()

    def _wait_for_steps(self) -> None:
        wait_for_steps(self.session, self._first + 3)

    def _hear(self, work: Callable[[], str]) -> None:
        try:
            self._keep(work())
        except KeyboardInterrupt:
            self._keep("interrupted")
        except GpumemError as error:
            self._keep(str(error))

    def _listen(self) -> None:
        """Wait until what happened is told by the session."""
        if self.fault.ends != "survived" and not self.heard_s:
            self._keep(until(lambda: next(filter(self._fits, self._news()), ""), self._news))

    def _news(self) -> list[str]:
        events = [event.text for event in list(self.session.history.events) if event.time_s >= self._began_s]
        return [self.session.doing, *events]

    def _fits(self, text: str) -> bool:
        return bool(re.search(self.fault.says, text))

    def _keep(self, said: str) -> None:
        self.said.append(said)
        if self._fits(said) and not self.heard_s:
            self.heard_s = time.monotonic()


def endure(session: Session, fault: Fault, situation: str) -> tuple[Incident, int]:
    """A fault strikes, is told and leaves all well; returns the incident and how many steps were lost."""
    before, processes, steps = trouble.everything(session), family(session), session.history.steps
    files = [*internals.folders_of(session), internals.record_of(session)]
    incident = Incident(session, fault)
    getattr(incident, situation)()
    assert incident.heard_s, (fault, situation, incident.said)
    if fault.ends == "dies":
        with pytest.raises(GpumemError, match="%hvd_restart"):
            session.train(1)
        _ended_and_restored(session, processes, files)
    else:
        session.pause()
        assert {process.pid for process in family(session)} == {process.pid for process in processes}
        trouble.same_memory(before, session)
        assert session.history.steps >= steps
    lost = _as_it_was(session)
    assert fault.ends == "dies" or not lost, f"{lost} steps were lost"
    assert len(weights(session)) == 1
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1
    return incident, lost


def _ended_and_restored(session: Session, processes: list[psutil.Process], files: list[Path]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    until(lambda: not any(path.exists() for path in files), lambda: files)
    session.restart()
    assert re.match(r"step \d+ restored", session.restored), session.restored
    session.run(trouble.LOOK)


def _as_it_was(session: Session) -> int:
    """Each rank is, bit for bit, what it was after the step that the session is at; returns the steps done after it."""
    steps, noted = session.history.steps, trouble.noted(session)
    assert [digest for digest, _ in trouble.everything(session)] == [notes.get(steps) for notes in noted]
    return max(map(max, noted)) - steps
