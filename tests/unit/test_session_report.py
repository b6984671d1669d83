"""What a report says of findings where the ranks could not be asked."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_nb.session import reports
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.ui.report_page import without_home
from tests.runs import history_of


class Session:
    """One whose doctor fails."""

    def __init__(self, error: BaseException) -> None:
        self.history = history_of()
        self.error = error
        self.told: list[str] = []

    def doctor(self, progress: Any) -> Any:
        progress("the ranks", 0.0)
        raise self.error

    def score(self) -> None:
        return None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyboardInterrupt(), "Not examined: interrupted."),
        (WorkloadError("Nothing <was> trained."), "Could not be examined: Nothing &lt;was&gt; trained."),
    ],
)
def test_the_page_is_written_and_says_why_nothing_was_examined(
    error: BaseException, sentence: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = Session(error)
    monkeypatch.setattr(
        "gpumem_nb.ui.report_page.report_page", lambda session, findings, *_: f"<!DOCTYPE html>{findings}"
    )
    reports.write_report(session, tmp_path / "x.html", lambda what, done: session.told.append(what))
    page = (tmp_path / "x.html").read_text()
    assert sentence in page
    assert "Nothing was found" not in page
    assert session.told == ["the ranks"]
    with pytest.raises(InvalidInput):
        reports.write_report(session, tmp_path / "x.pdf", lambda what, done: session.told.append(what))
    (tmp_path / "theirs.html").write_text("something else")
    for theirs in ("theirs.html", "no_folder", "no_folder/x.html"):
        with pytest.raises(InvalidInput):
            reports.write_report(session, tmp_path / theirs, lambda what, done: session.told.append(what))
    assert session.told == ["the ranks"], "nobody is asked for what cannot be written"
    assert (tmp_path / "theirs.html").read_text() == "something else"


def test_a_home_folder_is_written_as_people_do_and_no_other_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "jo").symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path / "jo"))
    assert without_home(f"{tmp_path}/jo/a.csv {tmp_path}/real/b.csv") == "~/a.csv ~/b.csv"
    assert without_home(f"gcc -I{tmp_path}/jo/inc /mnt{tmp_path}/jo/x") == f"gcc -I~/inc /mnt{tmp_path}/jo/x"
    for other in (f"{tmp_path}/john/a.csv", f"{tmp_path}/real-2"):
        assert without_home(other) == other
