"""A dry run in a process of its own: the notebook stays free of what it changes in torch, and survives it."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from typing import IO

from ..cluster.interrupts import shielded
from ..shared.answers import Progress
from ..shared.errors import InvalidInput, WorkloadError
from ..shared.forecast import SEARCH_S, DryAnswer, DryRun
from ..shared.units import format_bytes

MOST_BYTES = 4 * 2**30
"""Of data that the process may have; torch alone maps a part of them without using it."""
TIMEOUT_S = 600
_LOOKS_EVERY_S, _TELLS_EVERY_S = 0.01, 0.25
_FIRST = "a step without memory"
_MODULE = "gpumem_nb.engine.dry"


def ask(question: DryRun, progress: Progress = lambda what, done: None) -> DryAnswer:
    """Take dry steps in a new process, which is gone when this returns, however it returns, with all that it started.

    The last answer that is whole counts, whatever became of the process after it.

    Args:
        question: what is asked for.
        progress: told what is being looked for.

    Raises:
        InvalidInput: what was asked for cannot be used with this workload.
        WorkloadError: the workload cannot be run, or the process ended without an answer.
    """
    folder = _folder()
    command = [sys.executable, "-P", "-m", _MODULE, str(_most_bytes()), str(os.getpid()), *_paths(folder)]
    with tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=answered,  # which no process that the user's code starts can keep open
            stderr=said,
            env=_environment(folder),
            cwd=None if folder else os.sep,
            start_new_session=True,  # the interrupt is the parent's
            bufsize=0,
        )
        try:
            _tell(process, pickle.dumps(question))
            in_time = _ends_in_time(process, answered, progress)
        finally:
            with shielded():  # from a second interrupt
                _end(process)
        answer = _last_whole(answered.fileno())
        if answer is None and not in_time:
            raise WorkloadError(
                f"The dry run took longer than {TIMEOUT_S} s and was ended. Predict a smaller model, or start ranks "
                "(%hvd_start) and predict there."
            )
        if answer is None:
            said.seek(0)
            raise WorkloadError(_ended(process.returncode, said.read().decode(errors="replace")))
    if answer.problem:
        raise (InvalidInput if answer.of_input else WorkloadError)(answer.problem)
    return answer


def _tell(process: subprocess.Popen[bytes], question: bytes) -> None:
    """Send the question, as far as the process lives to read it."""
    assert process.stdin
    rest = memoryview(question)
    with process.stdin as stdin, suppress(BrokenPipeError):
        while rest:
            rest = rest[stdin.write(rest) :]


def _last_whole(answered: int) -> DryAnswer | None:
    """Return the last of the answers that is not cut off. The process writes on behind what is there."""
    answer: DryAnswer | None = None
    written = io.BytesIO(os.pread(answered, os.fstat(answered).st_size, 0))
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            answer = pickle.load(written)
    return answer


def _ends_in_time(process: subprocess.Popen[bytes], answered: IO[bytes], progress: Progress) -> bool:
    """Return whether the process ends in time, which is less once it has answered something.

    It is not waited for, so its number and its group stay its own.
    """
    until_s, seen, said, tell_s = time.monotonic() + TIMEOUT_S, 0, (_FIRST, 0.0), 0.0
    with suppress(ChildProcessError):  # other code has waited for it
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if (size := os.fstat(answered.fileno()).st_size) > seen:
                until_s = until_s if seen else min(until_s, time.monotonic() + SEARCH_S)
                seen = size
                if answer := _last_whole(answered.fileno()):
                    said = answer.next
            if time.monotonic() > tell_s:
                progress(*said)
                tell_s = time.monotonic() + _TELLS_EVERY_S
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOKS_EVERY_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and with it those that it has started, such as the user's own workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _most_bytes() -> int:
    """Return what the process may have, which is no more than this one may."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)


def _folder() -> str | None:
    """Return the working directory; ``None`` if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _paths(folder: str | None) -> list[str]:
    """Return where modules are looked for here.

    Python ignores entries that are not text, and relative paths lead nowhere from a folder that was deleted.
    """
    paths = (path for path in sys.path if isinstance(path, str))
    return [os.path.abspath(path) for path in paths if folder or os.path.isabs(path)]


def _environment(folder: str | None) -> dict[str, str]:
    """Return one thread, no GPU, and the modules that can be imported here, in the working directory of this process.

    Python's own come first until the process has what it needs of them: a notebook has imported them long before a
    file of such a name, such as random.py, could be meant.
    """
    own = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]
    own += [os.path.join(path, "lib-dynload") for path in own]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sorted(_paths(folder), key=lambda path: path not in own)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _ended(code: int, said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    lack = f" It may have at most {format_bytes(_most_bytes())} of data." if "memory" in last.lower() else ""
    return (
        f"The process that predicts {how}{last}.{lack} Start ranks (%hvd_start) and predict there, or try with a "
        "smaller model."
    )
