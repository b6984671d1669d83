"""The cell that starts ranks may be run twice: notebooks are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.magics import ranks
from gpumem_nb.magics.ranks import RanksMagics


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def start(n: int | None, **_: Any) -> Any:
        made.append(SimpleNamespace(size=n, chosen="", ended=""))
        return made[-1]

    monkeypatch.setattr(ranks, "start", start)
    return made


def test_the_same_command_again_returns_the_ranks_that_run_and_any_other_asks_for_new_ones(
    started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    magics = RanksMagics(InteractiveShell.instance())
    first = magics.hvd_start("2 --memory-limit 1GiB")
    assert "go on" not in capsys.readouterr().out
    assert magics.hvd_start("2 --memory-limit 1GiB") is first
    assert "are still there, and go on. For new ones: %hvd_stop first." in capsys.readouterr().out
    assert magics.hvd_start("2") is not first
    started[-1].ended = "the session was stopped"
    assert magics.hvd_start("2") is started[-1]
    assert len(started) == 3
