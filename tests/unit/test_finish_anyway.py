"""Work that an interrupt must not stop half way is waited for, however often the user presses stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from gpumem_nb.cluster.interrupts import finish_anyway, let_finish


def press(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_second_interrupt_does_not_make_unfinished_work_pass_for_finished() -> None:
    go_on, before = threading.Event(), signal.signal(signal.SIGINT, press)

    def work() -> None:
        go_on.wait()

    try:
        waits: list[Callable[[], None]] = [
            lambda: finish_anyway(work, "slow work"),
            lambda: let_finish("slow work"),
        ]
        for wait in waits:
            soon = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGINT))
            soon.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            soon.join()
        threading.Timer(0.3, go_on.set).start()
        let_finish("slow work")
        assert go_on.is_set()
        assert not [one for one in threading.enumerate() if one.name == "slow work"]
    finally:
        go_on.set()
        signal.signal(signal.SIGINT, before)
