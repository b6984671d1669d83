"""The reason why a process of the cluster ended: one sentence from mpiexec's words, the system's and the rank's own."""

from __future__ import annotations

import re
import signal
from contextlib import suppress

from ..shared.processes import control_groups

LAST_LINES = 3
_BY_SIGNAL = re.compile(r"process rank (\d+) .*?exited on\s+signal (\d+)", re.DOTALL)
_IN_SILENCE = re.compile(r"process rank (\d+) .*?exiting\s+improperly", re.DOTALL)  # with exit code 0, that is
_BY_CODE = re.compile(r"Process name: \[\S+?,(\d+)\]\s+Exit code:\s+(\d+)")
# Ranks that talk to it over TCP end themselves, and mpiexec may take one of them for the first.
_LEFT = re.compile(r"peer process has unexpectedly disconnected.*?Peer host:\s+(\S+)", re.DOTALL)
# The same, of a call in which it lost the connection: it says where it was itself, and not whom it missed.
_GAVE_UP = re.compile(r"^\[(\S+?):\d+\] \*\*\* (?:Unknown error|MPI_ERR_PROC_FAILED)", re.MULTILINE)
_OF_MPI = re.compile(r"^\[\S+?:\d+\] .*$", re.MULTILINE)
# From here on the other ranks, or mpiexec, talk about the end of one of them.
_END_OF_OTHERS = re.compile(r"^.*received signal 15, stopping.*$|^-{40,}$", re.MULTILINE)


def verdict(log: str) -> tuple[int, int] | None:
    """Return the rank that mpiexec names as the first that ended, and how: its exit code, negative for a signal.

    ``None`` before it has said so.
    """
    if said := _BY_SIGNAL.search(log):
        return int(said[1]), -int(said[2])
    if said := _BY_CODE.search(log):
        return int(said[1]), int(said[2])
    return (int(said[1]), 0) if (said := _IN_SILENCE.search(log)) else None


def left_host(log: str) -> str:
    """Return the host on which a rank ended, as ranks on other hosts noticed it; empty when they did not."""
    said = _LEFT.search(log)
    return said[1] if said else ""


def hosts_that_gave_up(log: str) -> set[str]:
    """Hosts with ranks that MPI ended because they lost a connection: what they missed had ended before."""
    return set(_GAVE_UP.findall(log))


def without_mpi(log: str) -> str:
    """Return the log without what MPI says of single ranks."""
    return _OF_MPI.sub("", log)


def explain(who: str, pid: int, exit_code: int | None, oom_kills: int | None, words: str, host: str = "") -> str:
    """Return what ended, how, perhaps why, and what it said last.

    Args:
        who: such as ``Rank 2``.
        exit_code: when it is known; negative for a signal.
        oom_kills: processes that the out-of-memory killer ended since the cluster started; ``None`` if unknown.
        words: what it said last, perhaps nothing.
        host: where, if not on this machine, whose logs then say nothing about it.
    """
    place = f" on host {host}" if host else ""
    how = _how(exit_code, None if host else oom_kills)
    return f"{who} (pid {pid}{place}) {how}." + (f" Its last lines: “{words}”." if words else "")


def last_words(fault: str, output: str, log: str) -> str:
    """Return the lines that say most, on one line.

    Args:
        fault: what Python left of a crash, with the latest call first.
        output: what the rank printed.
        log: what mpiexec and the ranks wrote past all capturing.
    """
    if fault:
        said = [line for line in _lines_of(fault) if "most recent call first" not in line]
        return " | ".join(said[: LAST_LINES + 1])
    return " | ".join(_lines_of(output + _END_OF_OTHERS.split(log)[0])[-LAST_LINES:])


def _lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def oom_kills() -> int | None:
    """Return how many processes of this control group the system's out-of-memory killer has ended so far."""
    for group in control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                counts = dict(line.split() for line in (group / name).read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return None


def _how(exit_code: int | None, oom_kills: int | None) -> str:
    if exit_code is None:
        return "has ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    how = f"was killed by signal {-exit_code} ({_name(-exit_code)})"
    if exit_code != -signal.SIGKILL:
        return how
    if oom_kills:
        return f"{how} by the system's out-of-memory killer: this machine's memory is full"
    return how if oom_kills == 0 else f"{how}, perhaps by the system's out-of-memory killer"


def _name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return "unknown"
