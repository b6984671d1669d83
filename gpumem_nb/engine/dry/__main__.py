"""The process that takes dry steps: a question comes on standard input, answers go to standard output.

``python -m gpumem_nb.engine.dry`` is started by ``planning/dry_process.py``. It never imports CUDA or Horovod, prints
nothing of its own, and ends when its parent does. Once it has answered, threads of the user's code do not keep
it for long.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
import threading
import time
import warnings

_LEAVES_AFTER_S = 1.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> int:
    """Answer one question, as often as more is known."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # which was gone before
        return 1
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the user's code prints is not an answer
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    warnings.simplefilter("ignore")
    question = pickle.load(sys.stdin.buffer)
    from .answer import answers

    # The notebook's order from here on: what the user's code imports may be the user's own.
    sys.path[:] = dict.fromkeys([*sys.argv[3:], *sys.path])
    for answer in answers(question):
        pickle.dump(answer, told)
        told.flush()
    told.close()
    threading.Thread(target=_leave, daemon=True).start()
    return 0


def _leave() -> None:
    time.sleep(_LEAVES_AFTER_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
