"""What long questions found is returned by their magics, though somebody presses stop once more when it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.magics import planning
from gpumem_nb.magics.planning import PlanningMagics
from gpumem_nb.planning.instead import instead_of
from gpumem_nb.planning.prediction import DOES_NOT_FIT
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.report.instead import Fit
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui import doctor_view
from gpumem_nb.ui import figures as tune_figure
from tests.unit.test_doctor import prediction
from tests.unit.test_doctor_view import diagnosis
from tests.unit.tuned_machine import tuned


def _pressed(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def found() -> TuneResult:
    result: TuneResult = tuned(Settings(batch_size=8, accumulation_steps=8), 600)[0]
    return result


@pytest.fixture
def session(found: TuneResult, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers at once."""
    asked = SimpleNamespace(
        tune=lambda **_: found,
        what_fits=lambda **_: "a map",
        doctor=lambda _: diagnosis(),
        checklist=lambda _: "a list",
    )
    asked.settings = found.present
    monkeypatch.setattr(planning, "current", lambda: asked)
    return asked


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InteractiveShell.instance(), "kernel", object(), raising=False)
    monkeypatch.setattr(planning, "progress_bar", lambda title: _bar(lambda: None))
    monkeypatch.setattr(tune_figure, "show_tuned", lambda result: None)
    monkeypatch.setattr("gpumem_nb.ui.tune_view.ApplyView", lambda result: "a button")
    monkeypatch.setattr(doctor_view, "DiagnosisView", lambda session, found: "cards")


@contextmanager
def _bar(at_its_end: Callable[[], None]) -> Iterator[Any]:
    yield lambda what, done: None
    at_its_end()


def _run(magic: str, line: str = "") -> Any:
    return getattr(PlanningMagics(InteractiveShell.instance()), magic)(line)


@pytest.mark.usefixtures("session", "in_a_notebook")
@pytest.mark.parametrize("where", [(tune_figure, "show_tuned"), (planning, "display")])
def test_stop_at_the_chart_or_the_button_loses_nothing(
    where: tuple[Any, str], found: TuneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*where, _pressed)
    assert _run("hvd_tune") is found


@pytest.mark.usefixtures("in_a_notebook")
def test_where_it_was_to_be_applied_it_is_said_that_it_was_not(
    session: Any, found: TuneResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_figure, "show_tuned", _pressed)
    assert _run("hvd_tune", "--apply") is found
    assert capsys.readouterr().out == (
        f"Nothing was applied: It was interrupted. To apply it: %hvd_set {found.typed}\n"
    )
    assert found.best is not None
    session.settings = found.best.settings  # it came when that was done
    assert _run("hvd_tune", "--apply") is found
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("in_a_notebook")
def test_stop_at_the_button_repeats_nothing(
    session: Any, found: TuneResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session.tune = lambda **_: replace(found, stopped="It was interrupted.")
    monkeypatch.setattr(planning, "display", _pressed)
    assert _run("hvd_tune", "--apply").best is not None
    assert capsys.readouterr().out.count("Nothing was applied: Tuning ended early. To apply it: %hvd_set") == 1


@pytest.mark.usefixtures("session", "in_a_notebook")
@pytest.mark.parametrize(
    ("magic", "line"), [("hvd_tune", ""), ("hvd_what_fits", ""), ("hvd_doctor", "--checklist"), ("hvd_doctor", "")]
)
def test_stop_at_the_end_of_the_bar_loses_nothing(magic: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(planning, "display", shown.append)
    monkeypatch.setattr(planning, "progress_bar", lambda title: _bar(_pressed))
    assert _run(magic, line) is not None or shown


@pytest.mark.usefixtures("session", "in_a_notebook")
def test_a_diagnosis_that_cannot_be_shown_with_buttons_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "display", _pressed)
    assert _run("hvd_doctor") == diagnosis()


@pytest.mark.usefixtures("in_a_notebook")
def test_stop_before_anything_was_found_ends_it(session: Any) -> None:
    session.what_fits = _pressed
    with pytest.raises(KeyboardInterrupt):
        _run("hvd_what_fits")


@pytest.mark.usefixtures("in_a_notebook")
def test_of_what_does_not_fit_predict_says_what_would(session: Any) -> None:
    too_large = prediction(live=1200, verdict=DOES_NOT_FIT)
    half = Settings(batch_size=16, accumulation_steps=2)
    would = instead_of(too_large.settings, 2, [Fit(half, 100)])
    session.predict = lambda **knobs: prediction() if knobs else too_large
    session.instead = lambda said, progress: replace(said, instead=would)
    session.telling = lambda progress: nullcontext()
    assert str(_run("hvd_predict")).endswith("Type %hvd_set batch_size=16 accumulation_steps=2")
    session.instead = _pressed
    assert "Type" not in str(_run("hvd_predict", "batch_size=4")), "what fits needs nothing else"
