"""Processes of long set-up steps: a line that shows they run, and the tree of processes to end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import psutil

from ..report.progress_bar import left_in_words, left_s, shown, text_bar

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 15.0
"""Between two lines where there is no terminal to rewrite one on."""

Fraction = Callable[[], float | None]
"""Called now and then; returns how much is done (0 to 1), or ``None`` while it cannot say."""


@contextmanager
def long_step(title: str, fraction: Fraction | None = None, estimate_s: float | None = None) -> Iterator[None]:
    """While the block runs, show on standard output for how long already, and for how long about to come.

    Args:
        title: what is being done.
        fraction: how much of it is done; ``None`` for a step that cannot tell.
        estimate_s: how long it usually takes, for as long as ``fraction`` cannot say.
    """
    finished = threading.Event()
    interval_s = TERMINAL_INTERVAL_S if sys.stdout.isatty() else LOG_INTERVAL_S
    with shown(text_bar(title, sys.stdout, measured=fraction is not None)) as bar:

        def keep_showing() -> None:
            while not finished.wait(interval_s):
                done = fraction() if fraction else None
                bar.draw(done or 0.0, left_in_words(left_s(done, bar.elapsed_s, estimate_s)))

        watcher = threading.Thread(target=keep_showing, name="gpumem_nb progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()


GRACE_S = 5.0
"""Between asking a process to end and ending it."""


def run_whole(command: Sequence[str], timeout_s: float, output: IO[bytes], **options: Any) -> int:
    """Run a command, and return its exit code; one that is interrupted or takes too long leaves no process running.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **options)
    try:
        return process.wait(timeout_s)
    finally:
        if process.poll() is None:
            stop_tree(process.pid)


def stop_tree(pid: int) -> None:
    """End a process of ours and everything it started."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        signal_quietly(member.terminate)
    for member in psutil.wait_procs(family, timeout=GRACE_S)[1]:
        signal_quietly(member.kill)
    psutil.wait_procs(family, timeout=GRACE_S)


def signal_quietly(send: Callable[[], None]) -> None:
    """Send a signal to a process that may have ended by itself meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send()
