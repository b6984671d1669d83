"""What ended a process, from the words that Open MPI and the system have for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpumem_nb.cluster import exit_reason
from gpumem_nb.shared import processes

KILLED = """\
something the rank said
2026-01-01 00:00:00.000 [IPEngine.0.0] CRITICAL | received signal 15, stopping
RuntimeError: Event loop stopped before Future completed.
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 7327 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
EXITED = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-15800@1,12]
   Exit code:    3
--------------------------------------------------------------------------
"""
SILENT = """\
prterun has exited due to process rank 0 with PID 17164 on node vm exiting
improperly. There are three reasons this could occur:
"""
LEFT = """\
An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash or
otherwise exiting without calling MPI_FINALIZE first).

  Local host: a
  Local PID:  13317
  Peer host:  b
--------------------------------------------------------------------------
prterun has exited due to process rank 0 with PID 0 on node a calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
"""


GAVE_UP = """\
[a:00000] *** Unknown error
[a:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
[a:00000] ***    and MPI will try to terminate your MPI job as well)
"""


def test_a_rank_that_ends_because_another_did_is_not_blamed() -> None:
    assert exit_reason.verdict(LEFT) is None
    assert exit_reason.left_host(LEFT) == "b"
    assert exit_reason.left_host(KILLED) == ""
    assert exit_reason.hosts_that_gave_up(GAVE_UP) == {"a"}
    assert exit_reason.hosts_that_gave_up(KILLED) == set()


@pytest.mark.parametrize(
    ("log", "verdict"),
    [(KILLED, (1, -9)), (EXITED, (12, 3)), (SILENT, (0, 0)), ("nothing of the kind", None), ("", None)],
)
def test_mpiexec_names_the_rank_and_how_it_ended(log: str, verdict: tuple[int, int] | None) -> None:
    assert exit_reason.verdict(log) == verdict


def test_the_last_words_are_the_rank_s_own() -> None:
    assert exit_reason.last_words("", "step 1\nstep 2\n", KILLED) == "step 1 | step 2 | something the rank said"
    fault = (
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 1'
    )
    assert exit_reason.last_words(fault, "", KILLED) == 'Fatal Python error: Segmentation fault | File "a.py", line 1'


@pytest.mark.parametrize(
    ("oom_kills", "words"),
    [
        (1, "by the system's out-of-memory killer: this machine's memory is full"),
        (None, "perhaps by the system's out-of-memory killer"),
        (0, "signal 9 (SIGKILL)."),
    ],
)
def test_the_out_of_memory_killer_is_named_as_surely_as_it_is_known(oom_kills: int | None, words: str) -> None:
    assert words in exit_reason.explain("Rank 1", 7, -signal.SIGKILL, oom_kills, "")


@pytest.mark.parametrize(
    ("own", "counter", "text", "kills"),
    [
        ("0::/box\n", "box/memory.events", "low 0\noom 3\noom_kill 2\n", 2),
        ("0::/elsewhere\n", "memory.events", "oom_kill 1\n", 1),
        ("4:memory:/box\n0::/\n", "memory/box/memory.oom_control", "oom_kill_disable 0\noom_kill 5\n", 5),
        ("0::/\n", "memory.other", "oom_kill 5\n", None),
    ],
)
def test_the_control_group_counts_what_was_killed_for_memory(
    own: str, counter: str, text: str, kills: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(processes, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    (tmp_path / "cgroup" / counter).parent.mkdir(parents=True)
    (tmp_path / "cgroup" / counter).write_text(text)
    assert exit_reason.oom_kills() == kills


def test_other_signals_do_not_bring_up_memory() -> None:
    said = exit_reason.explain("Rank 1", 7, -signal.SIGTERM, 1, "bye")
    assert said == "Rank 1 (pid 7) was killed by signal 15 (SIGTERM). Its last lines: “bye”."
