"""What each rank's main thread did in the last seconds before a soak failed, and where this process was held up.

A thread of each rank sends it as datagrams, because a fault of the soak limits the size of files; a debugger would stop
ranks for seconds, which is a fault by itself. Where this process is held up, because something holds Python's lock or
the system does not let it run, faulthandler writes what all its threads were at, which needs no lock.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
import threading
import time
from collections import defaultdict, deque

from gpumem_nb.session import Session

KEPT_S = 20.0
_WATCH = """
import socket, sys, threading, time, traceback
from gpumem_nb.engine import rank as _engine

def _doing():
    trainer = _engine._loaded_trainer()
    phase, began_s = trainer.doing()
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    calls = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in stack[-7:]]
    return f"{trainer.stream.rank}|{time.monotonic() - began_s:.1f} s in {phase}: {' > '.join(calls)}"

def _tell(port):
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    while True:
        try:
            out.sendto(_doing().encode()[:8000], ("127.0.0.1", port))
        except Exception:
            pass
        time.sleep(PERIOD_S)

if not any(thread.name == "time line" for thread in threading.enumerate()):
    threading.Thread(target=_tell, args=(PORT,), name="time line", daemon=True).start()
"""
PERIOD_S = 0.3
HELD_UP_S = 1.5


class Timeline:
    """Hears what ranks do, and keeps the latest."""

    def __init__(self) -> None:
        self._heard: dict[str, deque[tuple[float, str]]] = defaultdict(deque)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        threading.Thread(target=self._hear, daemon=True).start()
        threading.Thread(target=_notice, daemon=True).start()

    def watch(self, session: Session) -> None:
        """Let the ranks tell, if they do not do so yet."""
        _, port = self._socket.getsockname()
        session.run(_WATCH.replace("PERIOD_S", str(PERIOD_S)).replace("PORT", str(port)))

    def __str__(self) -> str:
        lines = []
        for rank, heard in sorted(self._heard.items()):
            before = ""
            for at_s, what in list(heard):
                if what.partition(" s in ")[2] != before:
                    clock, part = time.strftime("%X", time.localtime(at_s)), f"{at_s % 1:.2f}"[1:]
                    lines.append(f"{clock}{part} rank {rank}: {what}")
                before = what.partition(" s in ")[2]
        return "\n".join(lines)

    def _hear(self) -> None:
        while True:
            rank, _, what = self._socket.recv(65536).decode().partition("|")
            heard = self._heard[rank]
            heard.append((time.time(), what))
            while heard[0][0] < time.time() - KEPT_S:
                heard.popleft()


def _notice() -> None:
    """Tell where this process was held up."""
    while True:
        before_s = time.monotonic()
        faulthandler.dump_traceback_later(HELD_UP_S)
        time.sleep(PERIOD_S)
        faulthandler.cancel_dump_traceback_later()
        if (took_s := time.monotonic() - before_s) > HELD_UP_S:
            print(f"{time.strftime('%X')}: this process was held up for {took_s:.1f} s", file=sys.stderr, flush=True)
