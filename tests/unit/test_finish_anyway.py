"""Work that an interrupt must not stop half way is waited for, however often the user presses stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from gpumem_nb.cluster.interrupts import finish_anyway, let_finish
from gpumem_nb.kernel import compatibility, loading
from gpumem_nb.kernel.foreground import RESUMING, Foreground
from gpumem_nb.kernel.loading import Loading
from gpumem_nb.kernel.origin import Origin
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import Interrupted, RankError
from tests.timing import HANG_S, stop_pressed_in


def press(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_second_interrupt_does_not_make_unfinished_work_pass_for_finished() -> None:
    go_on, before = threading.Event(), signal.signal(signal.SIGINT, press)

    def work() -> None:
        go_on.wait()

    try:
        waits: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (finish_anyway, (work, "slow work")),
            (let_finish, ("slow work",)),
        ]
        for wait, arguments in waits:
            with pytest.raises(KeyboardInterrupt), stop_pressed_in(wait.__code__):
                wait(*arguments)
        threading.Timer(0.3, go_on.set).start()
        let_finish("slow work")
        assert go_on.is_set()
        assert not [one for one in threading.enumerate() if one.name == "slow work"]
    finally:
        go_on.set()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_does_not_wait_for_a_resume_that_goes_on() -> None:
    ranks, life, go_on = MagicMock(), MagicMock(), threading.Event()
    nothing: Any = lambda *_: ""  # noqa: E731
    life.foreground = Foreground(ranks, MagicMock(), MagicMock(), nothing, nothing, nothing)
    session = Session.__new__(Session)
    session._life = life
    resuming = threading.Thread(target=go_on.wait, name=RESUMING)
    resuming.start()
    try:
        asked = threading.Thread(target=session.interrupt, daemon=True)
        asked.start()
        asked.join(HANG_S)
        assert not asked.is_alive()
        life.training.interrupt.assert_called_once()
    finally:
        go_on.set()
        resuming.join()


@pytest.mark.parametrize("fails", [True, False])
def test_what_came_of_a_resume_is_told_though_an_interrupt_came_too_late(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, header, before = MagicMock(), MagicMock(workload="net", steps=7), signal.signal(signal.SIGINT, press)
    monkeypatch.setattr(loading, "Settings", MagicMock())
    monkeypatch.setattr(loading, "readable", lambda runs: ([], ""))
    monkeypatch.setattr(Loading, "_train_from", MagicMock())
    monkeypatch.setattr(compatibility, "resumed", MagicMock())
    monkeypatch.setattr(loading, "SOON_S", HANG_S)

    def call(function: str, *_: object, **__: object) -> Any:
        if function == "resume_check":
            return [(header, b"")]
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        if fails:
            raise RankError(1, "KeyError", "another form")
        return [MagicMock()]

    cluster.foreground.call = call
    try:
        said = "another form" if fails else "too late: net was already resumed at step 7"
        with pytest.raises(RankError if fails else Interrupted, match=said):
            Loading(cluster).resume_from(Path("net.state"))
    finally:
        signal.signal(signal.SIGINT, before)


def test_attached_objects_that_were_kept_come_back_however_late_an_interrupt_came(tmp_path: Path) -> None:
    cluster, call = MagicMock(), MagicMock()
    cluster.origin, cluster.snapshots.folder = Origin(not_kept="writing them was cut short"), tmp_path / "kept"
    call.get.return_value = [""]

    def interrupted(*_: object, then: Callable[[Any], None], **__: object) -> None:
        then(call)
        raise Interrupted("Interrupted, but the ranks had come to the end of it by then.")

    cluster.foreground.call = interrupted
    with pytest.raises(Interrupted):
        Loading(cluster)._keep_attached({"model": "net"})
    assert cluster.origin.not_kept == ""
