"""What is tried out on two hosts; runs as a program on host a, because a process has one network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import ipyparallel
import psutil
import pytest

from gpumem_nb.session import Session, start
from gpumem_nb.shared.cluster_records import await_end, records_dir
from gpumem_nb.shared.errors import ClusterDied, Interrupted
from gpumem_nb.shared.processes import Identity
from tests import internals
from tests.cluster.stop_button import PROMPT_S, Stop, asked
from tests.cluster.two_hosts import ADDRESSES, left_on_b, on_b
from tests.conftest import SMALL, weights
from tests.internals import wait_for_steps
from tests.timing import HANG_S, in_time, patience

NOTICED_S = 3.0
GONE_S = 10.0
SILENT_S = 6.0
STEWARD = re.compile(r"^ *\d+ \S*python\S* -m gpumem_nb\.cluster\.\S*steward$")


def records_of_stewards() -> set[Path]:
    return set(records_dir().glob("*-steward.json"))


BEFORE = records_of_stewards()


def started() -> Session:
    return start(hosts="b:1,a:1", device="cpu", memory_limit="96MiB")


def loaded() -> Session:
    session = started()
    session.load("digits-resnet", **SMALL)
    return session


def traces(session: Session) -> tuple[tuple[Identity, ...], list[Path]]:
    return internals.processes_of(session), [*internals.folders_of(session), internals.record_of(session)]


def nothing_is_left(kept: tuple[tuple[Identity, ...], list[Path]], within_s: float) -> None:
    """On either host, within so many seconds."""
    processes, paths = kept
    began = time.monotonic()
    assert await_end(processes, HANG_S), [who for who in processes if who.runs]
    while left := [*(path for path in paths if path.exists()), *left_on_b(), *(records_of_stewards() - BEFORE)]:
        assert time.monotonic() - began < HANG_S, left
        time.sleep(0.1)
    assert in_time(time.monotonic() - began, within_s)


def trains_is_closed_to_others_and_can_be_interrupted() -> None:
    session = loaded()
    assert [info.host for info in session.ranks] == ["a", "b"], "this machine comes first"
    assert session.train(3).steps == 3
    assert len(weights(session)) == 1
    only_expected_doors_are_open(session)
    who_does_not_know_the_keys_gets_nothing(session)
    a_trace_has_both_hosts_side_by_side(session)
    for where in (None, "1"):  # on both, on the other host alone
        stop = Stop(asked(session))
        with pytest.raises(Interrupted, match="are ready"):
            session.run("while True: pass", ranks=where)
        took_s = stop.took_s()
        print(f"interrupted in {took_s:.2f} s")
        assert in_time(took_s, PROMPT_S)
    session.play()
    wait_for_steps(session, 6)
    session.set(batch_size=16)
    session.pause()
    assert len(weights(session)) == 1
    kept = traces(session)
    began = time.monotonic()
    session.stop()
    print(f"stopped in {time.monotonic() - began:.2f} s")
    nothing_is_left(kept, within_s=1)


def only_expected_doors_are_open(session: Session) -> None:
    # Open MPI binds its own ports to every interface and has no switch against it: mpiexec's, and those of ranks.
    mpi = {internals.mpiexec_of(session), session.ranks[0].pid}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    print("Open MPI listens at", [tuple(c.laddr) for c in listening if c.pid in mpi])
    reached = {c.laddr.ip for c in listening if c.pid not in mpi}
    assert reached == {"127.0.0.1", ADDRESSES["a"]}, listening


def who_does_not_know_the_keys_gets_nothing(session: Session) -> None:
    folder = internals.connection_files_of(session).parent
    info = json.loads(next((folder / "security").glob("*client.json")).read_text())
    assert info["interface"] == "tcp://127.0.0.1", "clients are on this host"
    assert info["key"]
    assert info["curve_serverkey"]
    assert {path.stat().st_mode & 0o077 for path in (folder, *(folder / "security").iterdir())} == {0}
    assert "700" in on_b("stat", "-c", "%a", str(folder))
    assert set(on_b("sh", "-c", f"stat -c %a {folder}/security/*.json").split()) == {"600"}
    other = ipyparallel.client.client.zmq.curve_keypair()[0].decode()
    for change in ({"curve_serverkey": None}, {"curve_serverkey": other}, {"key": "0" * len(info["key"])}):
        forged = folder / "forged.json"
        forged.write_text(json.dumps(info | change))
        with pytest.raises((TimeoutError, ipyparallel.error.TimeoutError, OSError)):
            ipyparallel.Client(str(forged), timeout=1)
        forged.unlink()
    assert session.run("rank") == [0, 1]


def a_trace_has_both_hosts_side_by_side(session: Session) -> None:
    with TemporaryDirectory() as folder:
        trace = session.trace(f"{folder}/trace.json", 2)
        events = json.loads(trace.path.read_text())["traceEvents"]
    titles = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert [title.partition(",")[0] for title in titles if title.startswith("rank")] == ["rank 0 (a", "rank 1 (b"]
    steps = [(one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") == "step"]
    for name, began, ended in steps[:2]:
        (other,) = [step for step in steps[2:] if step[0] == name]
        assert max(began, other[1]) < min(ended, other[2]), "both took it at the same time"
    left = on_b("find", str(internals.connection_files_of(session).parent), "-name", "trace.*")
    assert not left, "both hosts keep nothing"


def lives_on_when_processes_are_silent() -> None:
    session = loaded()
    here = internals.silent_ones_of(session)
    silent(session, lambda name: [who.signal(name) for who in here])
    (steward,) = (line.split()[0] for line in on_b("ps", "-eo", "pid,args").splitlines() if STEWARD.search(line))
    silent(session, lambda name: on_b("kill", f"-{int(name)}", steward))
    session.stop()


def silent(session: Session, send: Callable[[signal.Signals], object]) -> None:
    """Nothing ends while those who get these signals are stopped, and afterwards all is well."""
    send(signal.SIGSTOP)
    over_s = time.monotonic() + SILENT_S
    while time.monotonic() < over_s:
        assert not session.ended, session.doing
        time.sleep(0.1)
    send(signal.SIGCONT)
    assert session.run("rank", timeout=30) == [0, 1]
    assert session.train(2).steps == 2


def dies_with_a_rank_or_a_host_and_says_which() -> None:
    session = loaded()
    kept = traces(session)
    pid = session.ranks[1].pid
    # With one rank a host, rank 0 may notice first that the connection broke; then nobody knows how rank 1 ended.
    says(
        session,
        rf"Rank 1 \(pid {pid} on host b\) (was killed by signal 9|has ended)",
        lambda: on_b("kill", "-9", str(pid)),
    )
    nothing_is_left(kept, within_s=5)
    session.restart()
    kept, pid = traces(session), session.ranks[1].pid
    says(session, rf"Rank 1 \(pid {pid} on host b\) has ended", lambda: ends_unseen(session))
    nothing_is_left(kept, within_s=GONE_S)
    session.restart()
    kept = traces(session)
    says(session, r"Host b \(rank 1\) gave no sign of life", lambda: on_b("ip", "link", "set", "veth-b", "down"))
    nothing_is_left(kept, within_s=GONE_S)
    session.stop()


def ends_unseen(session: Session) -> None:
    """Rank 1 ends, and none of those who could say how gets to it."""
    os.kill(session.ranks[0].pid, signal.SIGSTOP)
    for line in on_b("ps", "-eo", "pid,comm").splitlines():
        if "prted" in line:
            on_b("kill", "-STOP", line.split()[0])
    on_b("kill", "-9", str(session.ranks[1].pid))


def says(session: Session, sentence: str, strike: Callable[[], object]) -> None:
    """Training ends with this sentence soon after the stroke."""
    struck_s: list[float] = []

    def act() -> None:
        wait_for_steps(session, session.history.steps + 3)
        struck_s.append(time.monotonic())
        strike()

    actor = threading.Thread(target=act)
    actor.start()
    with pytest.raises(ClusterDied) as caught:
        session.train(1_000_000)
    took_s = time.monotonic() - struck_s[0]
    actor.join()
    print(f"noticed in {took_s:.2f} s: {caught.value}")
    assert re.search(sentence, str(caught.value)), caught.value
    assert in_time(took_s, NOTICED_S)


ORPHANING = """
import json, os, signal
from tests.cluster.hosts_scenarios import started, traces
processes, paths = traces(started())
print(json.dumps([processes, [*map(str, paths)]]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def ends_with_its_kernel() -> None:
    kernel = subprocess.run([sys.executable, "-c", ORPHANING], stdout=subprocess.PIPE, text=True, timeout=HANG_S)
    processes, paths = json.loads(kernel.stdout)
    assert left_on_b() or len(processes) >= 4
    nothing_is_left((tuple(Identity(*who) for who in processes), [*map(Path, paths)]), within_s=GONE_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch_of_all:
        internals.give_time(patch_of_all, patience())
        globals()[sys.argv[1]]()
