"""A launcher is one class and one line in a table: everything that names launchers reads it."""

from __future__ import annotations

import pytest

import gpumem_nb
from gpumem_nb.cluster.launchers import LAUNCHERS
from gpumem_nb.cluster.launchers.mpi import MpiLauncher
from gpumem_nb.magics import complete_hvd
from gpumem_nb.shared.errors import InvalidInput


class Marked(MpiLauncher):
    """mpiexec, through ``env``."""

    def command(self) -> list[str]:
        return ["env", "STARTED_BY=marked", *super().command()]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(LAUNCHERS, "marked", Marked)
    return "marked"


@pytest.mark.cluster
@pytest.mark.full
def test_ranks_start_under_a_launcher_of_ones_own(marked: str) -> None:
    with gpumem_nb.start(2, device="cpu", memory_limit="96MiB", launcher=marked) as session:
        assert session.run("import os; os.environ.get('STARTED_BY'), hvd.rank()") == [("marked", 0), ("marked", 1)]


def test_it_is_completed_and_suggested(marked: str) -> None:
    assert complete_hvd.offered("%hvd_start 2 --launcher m") == ["mpi", "marked"]
    with pytest.raises(InvalidInput, match=r"launcher='markd' is not known\. Did you mean 'marked'\? Allowed: mpi, ma"):
        gpumem_nb.start(2, launcher="markd")
    with pytest.raises(InvalidInput, match=r"launcher=None is not known\. Allowed: mpi, marked\."):
        gpumem_nb.start(2, launcher=None)  # type: ignore[arg-type]
