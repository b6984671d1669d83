"""What each flip would need is asked for one by one, when nobody waits, and what will not fit is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.policy import RULES, Policy
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.planning.score import Asked
from gpumem_nb.shared.errors import NotThisTime, WorkloadError
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import DataInfo, WorkloadInfo
from gpumem_nb.ui import flip_predictions
from gpumem_nb.ui.controls import Controls
from gpumem_nb.ui.flip_predictions import FlipPredictions
from tests.ledgers import sample
from tests.timing import HANG_S

MIB = 2**20
LIMIT = 100 * MIB
NAMES = ["precision", "batch_size"]
LINES: list[dict[str, Any]] = [{}, {"precision": "fp16"}, {"precision": "bf16"}]


class Session:
    """Predicts 1 MiB for each sample of a micro-batch, and counts what it was asked."""

    def __init__(self) -> None:
        self.history, self.settings, self.ended, self.busy, self.playing = History(2), Settings(), "", False, False
        self.workload = WorkloadInfo("mine", 1, 4, dataset_len=None, blocks=3)
        self.policy = Policy()
        self.size = 2
        self.asked: list[dict[str, Any]] = []
        self.fails: type[Exception] | None = None
        self.bytes_per_sample, self.cut_short = MIB, False

    def predict(self, **knobs: Any) -> Prediction:
        self.asked.append(knobs)
        if self.fails:
            raise self.fails("it cannot be said")
        wanted = self.settings.replace(**knobs)
        size = wanted.batch_size * self.bytes_per_sample
        verdict = FITS if size <= LIMIT else DOES_NOT_FIT
        one = Prediction(wanted, size, size, None, size, size, LIMIT, verdict, {}, "forward", "", "", 0.1)
        one = replace(one, cut_short=True) if self.cut_short else one.timed([[1.0]])
        self.history.predicted(Asked(one, self.history.model_version, self.settings, 0))
        return one

    def foreseen(self, settings: Settings) -> Prediction | None:
        return self.history.foreseen.get(settings)

    def largest_batch(self) -> int:
        self.asked.append({"largest": True})
        return 100

    def peaks_by_batch(self, **knobs: Any) -> dict[int, int]:
        self.asked.append({"line": knobs})
        return {size: size * MIB for size in (8, 32, 128)}

    def set(self, **changes: Any) -> Settings:
        self.policy = self.policy.replace(**{name: value for name, value in changes.items() if name in RULES})
        self.settings = self.settings.replace(**{name: value for name, value in changes.items() if name in KNOBS})
        return self.settings


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def predictions(session: Session) -> FlipPredictions:
    """Open, and what it asks for is done at once."""
    made = FlipPredictions(session, lambda action: action())  # type: ignore[arg-type]
    made.button.value = True
    return made


def load(session: Session) -> None:
    session.history.loaded_as += 1
    session.history.model_may_have_changed()


def look(predictions: FlipPredictions, times: int = 9) -> None:
    for _ in range(times):
        predictions.follow(NAMES)


def test_it_asks_for_every_flip_once_and_again_when_the_model_may_have_changed(
    session: Session, predictions: FlipPredictions
) -> None:
    look(predictions)
    first = [{"precision": "fp16"}, {"precision": "bf16"}, {"batch_size": 16}, {"batch_size": 64}, {"largest": True}]
    first += [{"line": knobs} for knobs in LINES]
    assert session.asked == first
    shown = predictions.regions["batch_size"].html
    assert "16.0 MiB" in shown
    assert "64.0 MiB" in shown
    assert "100 at most" in shown
    assert predictions.lines.html.count("<polyline") == 3
    assert "as it is" in predictions.lines.html
    assert "other mathematics" in predictions.key.html
    look(predictions)
    assert session.asked == first
    load(session)
    look(predictions)
    assert session.asked == first * 2


def test_an_answer_from_before_a_flip_is_not_kept(session: Session, predictions: FlipPredictions) -> None:
    before = session.settings
    for ask in (lambda: session.set(precision="bf16") and 200, session.largest_batch):
        session.settings, session.largest_batch = before, ask  # type: ignore[assignment, method-assign]
        look(predictions)
    assert "100 at most" in predictions.regions["batch_size"].html


def test_after_a_cell_it_asks_with_the_next_step_and_no_earlier(session: Session, predictions: FlipPredictions) -> None:
    look(predictions)
    session.asked = []
    session.history.model_may_have_changed()
    look(predictions)
    assert session.asked == []
    assert "after the next step" in predictions.key.html
    session.history.steps += 1
    look(predictions)
    assert len(session.asked) == 8
    session.history.model_may_have_changed()
    predictions.button.value = False
    predictions.button.value = True
    look(predictions)
    assert len(session.asked) == 16, "whoever opens it wants to know"


def test_a_prediction_of_the_model_as_it_was_is_not_kept(session: Session) -> None:
    old = session.history.model_version
    session.history.model_may_have_changed()
    one = session.predict(batch_size=64)
    session.history.model_may_have_changed()
    session.history.predicted(Asked(one, old, session.settings, 0))
    assert session.foreseen(one.settings) is None


def test_a_setting_that_was_changed_meanwhile_marks_no_flip_as_other_mathematics(
    session: Session, predictions: FlipPredictions
) -> None:
    look(predictions)
    session.set(learning_rate=0.5)
    predictions.follow(["checkpointing"])
    look(predictions)
    predictions.follow(["checkpointing"])
    assert "≠" not in predictions.regions["checkpointing"].html
    predictions.follow(["precision"])
    assert predictions.regions["precision"].html.count("≠") == 2
    assert predictions.regions["precision"].html.count("it changes the mathematics (precision)") == 2


def test_data_with_micro_batches_of_its_own_have_no_batch_size_to_flip(
    session: Session, predictions: FlipPredictions
) -> None:
    session.workload = replace(session.workload, data=DataInfo(batched=True))
    look(predictions)
    assert session.asked == [{"precision": "fp16"}, {"precision": "bf16"}]
    assert predictions.regions["batch_size"].html == ""


def test_a_flip_that_is_not_allowed_is_left_out(session: Session, predictions: FlipPredictions) -> None:
    session.settings = Settings(batch_size=2**31, accumulation_steps=1)
    for _ in range(9):
        predictions.follow(["batch_size", "accumulation_steps", "optimizer"])
    values = [value for knobs in session.asked for value in knobs.items()]
    assert ("batch_size", 2**30) in values
    assert ("batch_size", 2**32) not in values
    assert ("accumulation_steps", 2) in values
    assert ("accumulation_steps", 0) not in values
    assert ("optimizer", "sgd") in values
    assert ("optimizer", "own") not in values, "there is none"
    assert predictions.regions["batch_size"].html.count('class="gpumem-flip') == 2


def test_closed_it_asks_and_shows_nothing(session: Session, predictions: FlipPredictions) -> None:
    look(predictions)
    predictions.button.value, session.asked = False, []
    load(session)
    look(predictions)
    assert session.asked == []
    assert not any(region.html for region in (*predictions.regions.values(), predictions.key, predictions.lines))


def test_it_waits_while_somebody_waits_for_the_ranks(session: Session, predictions: FlipPredictions) -> None:
    session.busy = True
    look(predictions)
    assert session.asked == []
    assert "…" in predictions.regions["precision"].html
    session.busy = False
    look(predictions)
    assert len(session.asked) == 8


@pytest.mark.parametrize("fails", [WorkloadError, RuntimeError])
def test_what_cannot_be_said_is_not_asked_for_for_ever(session: Session, fails: type[Exception]) -> None:
    told: list[str] = []

    def submit(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:
            told.append(str(error))

    predictions = FlipPredictions(session, submit)  # type: ignore[arg-type]
    predictions.button.value, session.fails = True, fails
    look(predictions)
    assert len(session.asked) == 8, "each once"
    assert told == ["it cannot be said"] * 4 * (fails is RuntimeError)
    assert predictions.regions["precision"].html.count("n/a") == 2
    assert 'title="it cannot be said"' in predictions.regions["precision"].html
    session.fails = None
    predictions.button.value = False
    predictions.button.value = True
    look(predictions)
    assert "n/a" not in predictions.regions["precision"].html


def test_a_cell_that_ends_while_it_looks_is_not_overlooked(
    session: Session, predictions: FlipPredictions, monkeypatch: Any
) -> None:
    look(predictions)
    session.asked = []

    def ended_by_now(_: Session) -> bool:
        session.history.model_may_have_changed()
        monkeypatch.delattr(Session, "busy")
        return False

    del session.busy
    monkeypatch.setattr(Session, "busy", property(ended_by_now), raising=False)
    predictions.follow(NAMES)
    assert session.asked == []


@pytest.fixture
def slow(session: Session, monkeypatch: Any) -> Iterator[SimpleNamespace]:
    """A question that is under way on a thread of its own until it is told to end, and keeps the session busy."""
    predictions = FlipPredictions(session, lambda question: questions.append(Thread(target=question)))  # type: ignore[arg-type]
    questions: list[Thread] = []
    began, ends, looked, predict, foreseen = Event(), Event(), Event(), session.predict, session.foreseen

    def held(**knobs: Any) -> Prediction:
        session.busy = True
        began.set()
        ends.wait(HANG_S)
        session.busy = False
        return predict(**knobs)

    def looking(settings: Settings) -> Prediction | None:
        looked.set()
        return foreseen(settings)

    predictions.button.value = True
    monkeypatch.setattr(session, "predict", held)
    predictions.follow(NAMES)
    (question,) = questions
    question.start()
    assert began.wait(HANG_S)
    monkeypatch.setattr(session, "predict", predict)
    monkeypatch.setattr(session, "foreseen", looking)
    yield SimpleNamespace(predictions=predictions, questions=questions, ends=ends, looked=looked)
    ends.set()
    question.join()


def test_a_flip_that_is_chosen_during_a_question_of_its_own_is_predicted_too(
    session: Session, slow: SimpleNamespace, monkeypatch: Any
) -> None:
    said: list[str] = []
    chosen = Thread(target=lambda: said.append(slow.predictions.refusal("batch_size", "1024")))
    predict = session.predict

    def no_other_question_meanwhile(**knobs: Any) -> Prediction:
        if knobs.get("batch_size") == "1024":
            slow.predictions.follow(NAMES)
        return predict(**knobs)

    monkeypatch.setattr(session, "predict", no_other_question_meanwhile)
    chosen.start()
    assert slow.looked.wait(HANG_S)
    slow.ends.set()
    chosen.join()
    assert said == ["will not fit: 1.0 GiB of 100.0 MiB"]
    assert len(slow.questions) == 1
    slow.predictions.follow(NAMES)
    assert len(slow.questions) == 2, "it goes on afterwards"


def test_whoever_chooses_a_flip_waits_for_no_cell_and_not_for_ever(
    session: Session, slow: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.setattr(flip_predictions, "TIMEOUT_S", 0.0)
    assert slow.predictions.refusal("batch_size", "1024") == ""
    slow.ends.set()
    slow.questions[0].join()
    predictions = FlipPredictions(session, lambda question: None)  # type: ignore[arg-type]
    predictions.button.value, session.busy = True, True
    assert predictions.refusal("batch_size", "1024") == ""
    assert not any(knobs.get("batch_size") == "1024" for knobs in session.asked)


def test_what_could_not_be_said_this_time_is_asked_for_with_the_next_step(
    session: Session, predictions: FlipPredictions
) -> None:
    session.fails = NotThisTime
    look(predictions)
    assert predictions.regions["precision"].html.count("n/a") == 2
    session.fails, session.asked = None, []
    look(predictions)
    assert session.asked == []
    session.history.steps += 1
    look(predictions)
    assert "n/a" not in predictions.regions["precision"].html
    assert len(session.asked) == 4


def test_what_was_cut_short_is_asked_for_again(session: Session, predictions: FlipPredictions) -> None:
    session.cut_short = True
    look(predictions)
    assert session.asked[4:8] == [{"largest": True}, *({"line": knobs} for knobs in LINES)], "the others come first"
    assert "32.0 MiB" in predictions.regions["precision"].html
    assert "<u></u>" in predictions.regions["precision"].html
    session.cut_short, session.asked = False, []
    look(predictions)
    assert predictions.regions["precision"].html.count("<u>32/s</u>") == 2
    assert len(session.asked) == 4, "each once"


def test_a_later_prediction_of_the_same_flip_is_shown(session: Session, predictions: FlipPredictions) -> None:
    look(predictions)
    assert "16.0 MiB" in predictions.regions["batch_size"].html
    session.bytes_per_sample = 10 * MIB
    session.predict(batch_size=16)
    predictions.follow(NAMES)
    shown = predictions.regions["batch_size"].html
    assert "160.0 MiB" in shown
    assert DOES_NOT_FIT in shown


def test_beside_the_batch_stands_up_to_which_one_more_samples_pay(session: Session) -> None:
    controls = Controls(session, lambda action: None, lambda action: None)  # type: ignore[arg-type]
    beside = controls.knobs.children[2].children[-1]
    controls.follow()
    assert 'critical<span class="gpumem-wide"> batch</span> n/a' in beside.html
    session.history.add([sample(6, noise_scale=337.2), sample(7)], [])
    controls.follow()
    assert "critical batch about 340 samples; the global batch is 64" in beside.html
    session.size = 1
    session.history.mark("load", "another one")
    controls.follow()
    assert "critical batch not known: one rank alone does not show it" in beside.html


def test_every_knob_says_what_it_does_to_the_mathematics(session: Session) -> None:
    controls = Controls(session, lambda action: None, lambda action: None)  # type: ignore[arg-type]
    knobs = [knob.children[0] for box in (controls.knobs, *controls.folds) for knob in box.children]
    tips = {knob.description: knob.tooltip for knob in knobs}
    assert tips["checkpointing"].endswith("(keeps the mathematics)")
    assert tips["optimizer_impl"].endswith("(keeps the mathematics to rounding)")
    assert tips["precision"].endswith("(changes the mathematics)")
    assert tips["batch_size"].endswith("(may change the mathematics)")


def test_what_will_not_fit_is_said_once_and_then_done(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    widget, said = controls.knobs.children[2].children[:2]

    def choose(value: str) -> None:
        widget.value = value
        queue.pop()()
        controls.follow()
        queue.clear()

    choose("128")
    assert session.settings.batch_size == 128, "nothing was predicted for it, and nobody asked for that"
    session.set(batch_size=32)
    session.predict(batch_size=256)
    controls.follow()
    choose("256")
    assert session.settings.batch_size == 32
    assert "will not fit: 256.0 MiB of 100.0 MiB" in said.html
    assert widget.value == "32"
    choose("256")
    assert session.settings.batch_size == 256
    assert said.html == ""
