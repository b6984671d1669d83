"""The diagnosis on the page: a card a finding, a button a flip, made on another thread and measured when taken."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.planning.doctor.finding import MEMORY, TIME, Diagnosis, Finding, Flip
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.report.tables import marked
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.messages import Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import WorkloadInfo
from gpumem_nb.ui import doctor_view, threads
from gpumem_nb.ui.doctor_view import DiagnosisView
from gpumem_nb.ui.widgets import Region
from tests.internals import widgets_in
from tests.ledgers import MIB, sample
from tests.timing import HANG_S, until
from tests.unit.test_doctor import LOADED, prediction

AFTER = Settings(precision="bf16")


class Session:
    """Changes settings, unless it refuses to."""

    def __init__(self) -> None:
        self.history, self.settings, self.ended, self.refuses = History(1), Settings(), "", ""
        self.workload: WorkloadInfo | None = None
        self.history.begin(1, "net", self.settings)

    def set(self, **knobs: Any) -> Settings:
        if self.refuses:
            raise InvalidInput(self.refuses)
        self.settings = self.settings.replace(**knobs)
        self.history.begin(2, "net", self.settings)
        return self.settings

    def step(self, number: int) -> None:
        self.history.add([sample(number, settings_id=2, live_peak_bytes=41 * MIB, samples_per_s=130.0)], [])


def diagnosis() -> Diagnosis:
    will = prediction(AFTER, live=40, samples_per_s=150.0)
    flip = Flip(Settings(), AFTER, {"precision": "bf16"}, prediction(), will, 100.0)
    with_flip = Finding(
        "activations dominate", "Activations fill it", MEMORY, 1, "Too <many>.", {"live_bytes": MIB}, flip=flip
    )
    return Diagnosis(
        (with_flip, Finding("no core", "Others compute", TIME, 0.5, "Others.", {"share": 0.5}, do="Look.")), ("Noted.",)
    )


@pytest.fixture
def session() -> Session:
    return Session()


def regions(view: DiagnosisView) -> str:
    return "\n".join(one.html for one in widgets_in(view.view) if isinstance(one, Region))


def buttons(view: DiagnosisView) -> list[Any]:
    return [one for one in widgets_in(view.view) if type(one).__name__ == "Button"]


def test_each_finding_has_a_card_and_each_flip_a_button_with_a_name(session: Session) -> None:
    view = DiagnosisView(session, diagnosis())  # type: ignore[arg-type]
    [button] = buttons(view)
    assert button.description == "Apply precision=bf16"
    shown = regions(view)
    for words in (
        "Too &lt;many&gt;.",
        "live 1.0 MiB",
        "≠ changes the mathematics",
        "Look.",
        "Noted.",
        "others-compute",
    ):
        assert words in shown
    assert all(one.label for one in widgets_in(view.view) if isinstance(one, Region))


@pytest.mark.parametrize("notes", [(), ("Inputs were not examined.",)])
def test_that_nothing_was_found_is_told_once_where_the_line_and_the_view_stand_together(
    session: Session, notes: tuple[str, ...]
) -> None:
    view = DiagnosisView(session, Diagnosis((), notes))  # type: ignore[arg-type]
    assert view.line in ("Doctor: nothing found.", "Doctor: nothing was found in what could be looked at.")
    assert regions(view).count("memory, time, mathematics") + regions(view).count("Inputs were not") == 1


def test_a_saved_page_keeps_it_without_buttons(session: Session) -> None:
    bundle = DiagnosisView(session, diagnosis())._repr_mimebundle_()  # type: ignore[arg-type]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "1. Activations fill it (memory)" in bundle["text/plain"]
    assert "Too &lt;many&gt;." in bundle["text/html"]


def test_a_flip_is_made_by_whoever_is_asked_and_measured_beside_what_was_predicted(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    view = DiagnosisView(session, diagnosis(), queue.append)  # type: ignore[arg-type]
    [button] = buttons(view)
    button.click()
    assert button.disabled
    assert session.settings == Settings(), "not on the page's own thread"
    queue.pop()()
    assert session.settings == AFTER
    assert "measured with the next steps" in regions(view)
    for number in range(1, 9):
        session.step(number)
    assert not view.follow(), "that is all"
    assert "live peak 41.0 MiB (predicted 40.0 MiB), 130 samples/s (predicted 150)" in regions(view)


def test_what_is_refused_is_said_and_may_be_tried_again(session: Session) -> None:
    view = DiagnosisView(session, diagnosis(), lambda action: action())  # type: ignore[arg-type]
    session.refuses = "It cannot be <so>."
    [button] = buttons(view)
    button.click()
    assert "It cannot be &lt;so&gt;." in regions(view)
    assert not button.disabled
    assert not view.follow()


@pytest.mark.parametrize("what", ["taken back", "another knob", "another workload"])
def test_another_change_ends_the_waiting_and_nothing_else_is_told_as_what_came(session: Session, what: str) -> None:
    view = DiagnosisView(session, diagnosis(), lambda action: action())  # type: ignore[arg-type]
    buttons(view)[0].click()
    if what == "taken back":
        session.settings = Settings()
    elif what == "another knob":
        session.set(batch_size=64)
    else:
        session.workload = LOADED
    for number in range(1, 9):
        session.step(number)
    assert not view.follow()
    assert "Changed since." in regions(view)
    assert "measured: live peak" not in regions(view)


def test_a_flip_whose_first_step_failed_says_so(session: Session) -> None:
    view = DiagnosisView(session, diagnosis(), lambda action: action())  # type: ignore[arg-type]
    buttons(view)[0].click()
    rescue = Rescue(Failure(1, "oom", "forward", "no memory", asked_bytes=MIB, free_bytes=0), 1, AFTER)
    session.history.rescued(rescue)
    rescue.did, session.settings = "training went back to precision=fp32", Settings()
    assert not view.follow()
    assert "rank 1 ran out of memory in the forward part of the step" in regions(view)
    assert marked("Training went back to precision=fp32.") in regions(view)


def test_where_nothing_is_trained_it_says_what_to_do(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_view, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(doctor_view, "WATCHED_S", 0.003)
    view = DiagnosisView(session, diagnosis())  # type: ignore[arg-type]
    buttons(view)[0].click()
    until(lambda: "Train some steps and examine again" in regions(view))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Thread]:
    """Threads that the page has started."""
    kept: list[Thread] = []
    usual = threads.start

    def start(work: Callable[[], None], name: str) -> Thread:
        kept.append(usual(work, name))
        return kept[-1]

    monkeypatch.setattr(threads, "start", start)
    return kept


def test_figures_of_a_few_steps_stay(session: Session, started: list[Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_view, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(doctor_view, "WATCHED_S", 1.0)
    session.set(precision="bf16")
    session.step(1)
    session.settings = Settings()
    view = DiagnosisView(session, diagnosis())  # type: ignore[arg-type]
    monkeypatch.setattr(session, "set", lambda **knobs: setattr(session, "settings", AFTER))
    started.clear()
    buttons(view)[0].click()
    started[0].join(HANG_S)
    assert "Changed, measured: live peak 41.0 MiB" in regions(view)


def test_by_itself_it_uses_a_thread_that_ends(
    session: Session, started: list[Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_view, "LOOK_EVERY_S", 0.001)
    view = DiagnosisView(session, diagnosis())  # type: ignore[arg-type]
    started.clear()  # that made the widgets
    buttons(view)[0].click()
    until(lambda: session.settings == AFTER)
    for number in range(1, 9):
        session.step(number)
    started[0].join(HANG_S)
    assert not started[0].is_alive()
    assert "130 samples/s" in regions(view)


def test_a_flip_is_not_made_of_settings_that_were_not_examined(session: Session) -> None:
    view = DiagnosisView(session, diagnosis(), lambda action: action())  # type: ignore[arg-type]
    session.settings = session.settings.replace(batch_size=64)
    buttons(view)[0].click()
    assert "changed since this was found" in regions(view)
    assert session.settings.precision == "fp32"
