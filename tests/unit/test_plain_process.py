"""Children that a rank forks end as those of a plain process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumem_nb.engine import plain_process

# A rank handles the signal by itself. It comes to a child before anything in it has run, as on a busy machine.
RANK = """
import os, signal, sys, time
from gpumem_nb.engine.plain_process import make_plain
number = signal.Signals[sys.argv[1]]
signal.signal(number, lambda *_: None)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), number))
make_plain({})
child = os.fork()
if not child:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_to_a_child_at_once_ends_it(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", RANK, name], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.Signals[name]), "set()"], "and the rank itself hears signals again"


CRASH = """
import faulthandler, os, sys
from gpumem_nb.engine.plain_process import make_plain
faulthandler.enable(open(sys.argv[1], "w"))
make_plain({})
child = os.fork()
if not child:
    os.abort()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), faulthandler.is_enabled())
"""


def test_a_crash_of_a_child_is_not_told_as_the_ranks(tmp_path: Path) -> None:
    told = tmp_path / "fault"
    done = subprocess.run([sys.executable, "-c", CRASH, told], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.SIGABRT), "True"]
    assert told.read_text() == ""


def test_half_a_surrogate_pair_is_printed_as_python_writes_it() -> None:
    shown: list[str] = []
    stream = SimpleNamespace(write=shown.append, flush=len)
    plain_process._look_after(stream)
    for text in ("a", "ü漢🎉", "\ud800 alone"):
        stream.write(text)
    assert shown == ["a", "ü漢🎉", "\\ud800 alone"]
