"""What tests share: sessions with real ranks, and the certainty that no other process that they started is left.

Starting ranks takes longer than most tests, so modules share them: those that live at a module's end are put back to
what they were when they started, and serve the next one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import gpumem_nb
from gpumem_nb.kernel.policy import Policy
from gpumem_nb.session import Session
from gpumem_nb.shared import snapshot_folder
from gpumem_nb.shared.errors import GpumemError
from gpumem_nb.shared.units import DEFAULT_SEED
from tests import internals
from tests.timing import HANG_S, PATIENCE

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

WEIGHTS = """
import hashlib
hashlib.sha1(
    b"".join(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())
).hexdigest()
"""
SMALL = {"width": 8, "depth": 1, "resolution": 8}


def pytest_configure(config: pytest.Config) -> None:
    """Promises in seconds are held to in ``make test-full``; the first tier is for any machine."""
    if "not full" in config.option.markexpr:
        os.environ.setdefault(PATIENCE, "4")


@pytest.fixture(autouse=True, scope="session")
def snapshots_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Automatic snapshots of tests stay out of the user's cache."""
    root = tmp_path_factory.mktemp("snapshots")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_folder, "root", lambda: root)
        yield root


@pytest.fixture(autouse=True, scope="session")
def nothing_left_at_the_end() -> Iterator[None]:
    """Neither is what modules share."""
    with nothing_left():
        yield
        internals.stop_running()


@pytest.fixture(autouse=True, scope="module")
def no_process_left() -> Iterator[None]:
    """After each module nothing runs that did not run before, but ranks for the next one."""
    with nothing_left():
        yield
        session = internals.running()
        if session is not None and not (session in _shared and put_back(session)):
            session.stop()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Processes that are started inside have ended, unless they belong to the session that runs."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    session = internals.running()
    if session is not None and not session.ended:
        before |= {who.pid for who in internals.processes_of(session)}
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    _, alive = psutil.wait_procs([process for process in left if not lives_with_the_runner(process)], timeout=HANG_S)
    running = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not running, [process.cmdline() for process in running]


def lives_with_the_runner(process: psutil.Process) -> bool:
    """Whether it is one of multiprocessing's own helpers."""
    with suppress(psutil.NoSuchProcess):
        command = " ".join(process.cmdline())
        return "resource_tracker" in command or "forkserver" in command
    return False


_shared: list[Session] = []  # those that ranks() started
_names: set[str] = set()  # what a rank that has just started defines


def ranks(n: int) -> Session:
    """``n`` virtual GPUs of 96 MiB: those that run already, or new ones."""
    running = internals.running()
    if running is not None and running.size == n and not running.ended:
        return running
    if running is not None:
        running.stop()
    session = gpumem_nb.start(n, device="cpu", memory_limit="96MiB")
    _shared[:] = [session]
    _names.update(session.run("sorted(globals())", ranks=0)[0])
    return session


def put_back(session: Session) -> bool:
    """Make ranks what they were when they started, but that something is loaded; says whether they can be used."""
    try:
        session.pause()
        session.set(**Policy().as_dict())
        session.run(internals.run_unrecorded, internals.put_back(_names), timeout=HANG_S)
        internals.forget_cells(session)
        session.seed(DEFAULT_SEED)
        load_afresh(session)
    except (GpumemError, TimeoutError):  # they have ended, or a test that failed has left them as they are
        return False
    return not session.waiting_for


@pytest.fixture
def two_ranks() -> Session:
    """A session with two ranks."""
    return ranks(2)


@pytest.fixture
def four_ranks() -> Session:
    """A session with four ranks."""
    return ranks(4)


@pytest.fixture
def fresh() -> Callable[..., Session]:
    """Load a small workload into a session, with default settings."""

    return load_afresh


def load_afresh(session: Session, name: str = "digits-resnet", **options: int) -> Session:
    """Load a small workload into a session, with default settings."""
    session.load(name, **(options or (SMALL if name.startswith("digits") else {})))
    default = gpumem_nb.Settings()
    session.set(**default.changed_from(session.settings))
    return session


def weights(session: Session) -> set[str]:
    """The distinct fingerprints of the ranks' weights: one when they are bit-identical."""
    return set(session.run(WEIGHTS))


def about(live: Any) -> Any:
    """The same live bytes, but for the 16 bytes of a step's votes, which Horovod's thread lets go of a moment later."""
    return pytest.approx(live, abs=64)
