"""What is said before a steward on another host introduces itself is passed over."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from gpumem_nb.cluster.hosts.connection import RemoteHost
from gpumem_nb.shared.version import __version__
from tests.timing import HANG_S

HELLO = {"name": "b", "machine": "boot pids", "kernel_address": "127.0.0.1", "network": "127.0.0.0/8"}


def test_words_of_a_shells_startup_files_are_no_answer_of_a_steward() -> None:
    said = ["Welcome to b!", "7", "", json.dumps(HELLO | {"version": __version__, "horovod": True})]
    host: Any = RemoteHost.__new__(RemoteHost)
    host.name, host.names, host.lost, host._unread = "b", {"b"}, "", b""
    host._states, host._faults = {}, {}
    host._said = str
    host._ssh = subprocess.Popen(["printf", "%s\\n", *said], stdout=subprocess.PIPE, bufsize=0)
    host.meet(time.monotonic() + HANG_S)
    host._listener.join(HANG_S)
    host._ssh.wait()
    host._stdout.close()
    assert host.machine == "boot pids"
    assert host.lost.startswith("ended the connection"), "and nothing was lost of what it said then"
