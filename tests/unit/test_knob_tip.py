"""The knob that has the focus is explained: what its values mean, and what flips would bring, asked for one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from gpumem_nb.ui.controls import Controls
from gpumem_nb.ui.knob_tip import KnobTip
from gpumem_nb.ui.widgets import Region
from tests.ledgers import sample

MIB = 2**20
LIMIT = 100 * MIB
OF_PRECISION: list[dict[str, Any]] = [{}, *({"precision": value} for value in ("fp16", "bf16", "bf16_weights"))]


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

    def set(self, **changes: Any) -> Settings:
        self.policy = self.policy.replace(**{name: value for name, value in changes.items() if name in RULES})
        self.settings = self.settings.replace(**{name: value for name, value in changes.items() if name in KNOBS})
        return self.settings


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def tip(session: Session) -> KnobTip:
    """Of precision, and what it asks for is done at once."""
    made = KnobTip(session, lambda action: action(), lambda name, value: session.set(**{name: value}))  # type: ignore[arg-type]
    made.explain("precision")
    return made


def load(session: Session) -> None:
    session.history.loaded_as += 1
    session.history.model_may_have_changed()


def look(tip: KnobTip, times: int = 9) -> str:
    for _ in range(times):
        tip.follow()
    return said(tip)


def said(tip: KnobTip) -> str:
    [words] = [one for one in tip.widget.children if isinstance(one, Region)]
    return str(words.html)


def press(tip: KnobTip, what: str) -> None:
    [words] = [one for one in tip.widget.children if isinstance(one, Region)]
    words.pressed(what)


def test_every_value_that_can_be_chosen_is_explained() -> None:
    shown = [knob for knob in KNOBS.values() if knob.choices and (knob.in_front or knob.fold)]
    assert len(shown) >= 7
    for knob in shown:
        assert set(knob.means) == set(knob.choices), knob.name


def test_it_asks_for_the_knobs_flips_once_and_again_when_the_model_may_have_changed(
    session: Session, tip: KnobTip
) -> None:
    shown = look(tip)
    assert session.asked == OF_PRECISION, "what is now first: the others are told as differences from it"
    assert "arithmetic of forward and backward" in shown.lower()
    assert "fewer digits" in shown
    assert "32.0 MiB" in shown
    assert shown.count("± 0") == len(OF_PRECISION) - 1
    assert shown.count("≈ as fast") == len(OF_PRECISION) - 1
    assert shown.count("results differ") >= 2
    look(tip)
    assert session.asked == OF_PRECISION
    load(session)
    look(tip)
    assert session.asked == OF_PRECISION * 2


def test_flips_are_told_as_differences_from_now(session: Session, tip: KnobTip, monkeypatch: Any) -> None:
    steps_s = {16: 0.25, 32: 1.0, 64: 4.0}
    predict = session.predict

    def timed(**knobs: Any) -> Prediction:
        one = predict(**knobs)
        one = one.timed([[steps_s[one.settings.batch_size]]])
        session.history.predicted(Asked(one, session.history.model_version, session.settings, 0))
        return one

    monkeypatch.setattr(session, "predict", timed)
    tip.explain("batch_size")
    shown = look(tip)
    assert "−16.0 MiB" in shown
    assert "+32.0 MiB" in shown
    assert "+100 %" in shown, "half the samples in a quarter of the time"
    assert "−50 %" in shown
    assert "100 is the largest that fits" in shown
    assert "Critical batch" in shown


def test_a_press_flips_and_the_next_rows_are_from_there(session: Session, tip: KnobTip) -> None:
    look(tip)
    press(tip, "bf16")
    assert session.settings.precision == "bf16"
    shown = look(tip)
    assert shown.index("gpumem-present") > shown.index("fp16"), "bf16 is what is now"
    press(tip, "close")
    assert look(tip) == ""


def test_a_knob_that_moves_no_memory_is_explained_without_questions(session: Session, tip: KnobTip) -> None:
    tip.explain("lr_schedule")
    shown = look(tip)
    assert session.asked == []
    assert "falls evenly to 0" in shown
    assert "…" not in shown
    assert 'data-press="cosine"' in shown
    tip.explain("learning_rate")
    assert "learning_rate" in look(tip)
    assert session.asked == []


def test_what_must_be_compiled_first_is_not_asked_by_itself_and_shown_once_it_was(
    session: Session, tip: KnobTip
) -> None:
    tip.explain("compile")
    assert "known only once it is compiled: %hvd_predict compile=blocks" in look(tip)
    assert not session.asked
    session.predict(compile="blocks")
    assert "known only once" not in look(tip)


def test_an_answer_from_before_a_flip_is_not_kept(session: Session, tip: KnobTip) -> None:
    before = session.settings
    tip.explain("batch_size")
    for ask in (lambda: session.set(precision="bf16") and 200, session.largest_batch):
        session.settings, session.largest_batch = before, ask  # type: ignore[assignment, method-assign]
        shown = look(tip)
    assert "100 is the largest" in shown


def test_after_a_cell_it_asks_with_the_next_step_and_no_earlier(session: Session, tip: KnobTip) -> None:
    look(tip)
    session.asked = []
    session.history.model_may_have_changed()
    assert "after the next step" in look(tip)
    assert session.asked == []
    session.history.steps += 1
    look(tip)
    assert session.asked == OF_PRECISION
    session.history.model_may_have_changed()
    tip.explain("checkpointing")
    look(tip)
    assert len(session.asked) == len(OF_PRECISION) + 4, "predictions follow when a knob gets the focus"


def test_a_prediction_of_the_model_as_it_was_is_not_kept(session: Session) -> None:
    old = session.history.model_version
    session.history.model_may_have_changed()
    one = session.predict(batch_size=64)
    session.history.model_may_have_changed()
    session.history.predicted(Asked(one, old, session.settings, 0))
    assert session.foreseen(one.settings) is None


def test_a_setting_that_was_changed_meanwhile_marks_no_flip_as_other_mathematics(
    session: Session, tip: KnobTip
) -> None:
    look(tip)
    session.set(learning_rate=0.5)
    tip.explain("checkpointing")
    shown = look(tip)
    assert "results differ" not in shown
    assert "same results" in shown
    tip.explain("precision")
    assert look(tip).count("it changes the mathematics (precision)") == len(OF_PRECISION) - 1


def test_data_with_micro_batches_of_its_own_have_no_batch_size_to_flip(session: Session, tip: KnobTip) -> None:
    session.workload = replace(session.workload, data=DataInfo(batched=True))
    tip.explain("batch_size")
    shown = look(tip)
    assert session.asked == []
    assert "<button data-press=" not in shown


def test_a_flip_that_is_not_allowed_is_left_out(session: Session, tip: KnobTip) -> None:
    session.settings = Settings(batch_size=2**31, accumulation_steps=1)
    for name in ("batch_size", "accumulation_steps", "optimizer"):
        tip.explain(name)
        look(tip)
    values = [value for knobs in session.asked for value in knobs.items()]
    assert ("batch_size", 2**30) in values
    assert ("batch_size", 2**32) not in values
    assert ("accumulation_steps", 2) in values
    assert ("accumulation_steps", 0) not in values
    assert ("optimizer", "sgd") in values
    assert ("optimizer", "own") not in values, "there is none"


def test_it_waits_while_somebody_waits_for_the_ranks(session: Session, tip: KnobTip) -> None:
    session.busy = True
    assert "…" in look(tip)
    assert session.asked == []
    session.busy = False
    look(tip)
    assert session.asked == OF_PRECISION


@pytest.mark.parametrize("fails", [WorkloadError, RuntimeError])
def test_what_cannot_be_said_is_not_asked_for_for_ever(session: Session, fails: type[Exception]) -> None:
    told: list[str] = []

    def submit(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:
            told.append(str(error))

    tip = KnobTip(session, submit, lambda name, value: None)  # type: ignore[arg-type]
    tip.explain("precision")
    session.fails = fails
    shown = look(tip)
    assert len(session.asked) == len(OF_PRECISION), "each once"
    assert told == ["it cannot be said"] * len(OF_PRECISION) * (fails is RuntimeError)
    assert shown.count("n/a") == len(OF_PRECISION) - 1
    assert 'title="it cannot be said"' in shown
    session.fails = None
    tip.explain("")
    tip.explain("precision")
    assert "n/a" not in look(tip)


def test_a_cell_that_ends_while_it_looks_is_not_overlooked(session: Session, tip: KnobTip, monkeypatch: Any) -> None:
    look(tip)
    session.asked = []

    def ended_by_now(_: Session) -> bool:
        session.history.model_may_have_changed()
        monkeypatch.delattr(Session, "busy")
        return False

    del session.busy
    monkeypatch.setattr(Session, "busy", property(ended_by_now), raising=False)
    tip.follow()
    assert session.asked == []


def test_one_question_at_a_time_and_a_flip_waits_for_none(session: Session) -> None:
    questions: list[Callable[[], object]] = []
    tip = KnobTip(session, questions.append, lambda name, value: None)  # type: ignore[arg-type]
    tip.explain("precision")
    look(tip)
    assert len(questions) == 1
    assert tip.refusal("batch_size", "1024") == "", "what is not known yet refuses nothing"
    questions[0]()
    look(tip)
    assert len(questions) == 2
    session.predict(batch_size="1024")
    assert tip.refusal("batch_size", "1024") == "will not fit: 1.0 GiB of 100.0 MiB"
    assert tip.refusal("batch_size", "none") == "", "setting it says why"


def test_what_could_not_be_said_this_time_is_asked_for_with_the_next_step(session: Session, tip: KnobTip) -> None:
    session.fails = NotThisTime
    assert look(tip).count("n/a") == len(OF_PRECISION) - 1
    session.fails, session.asked = None, []
    look(tip)
    assert session.asked == []
    session.history.steps += 1
    assert "n/a" not in look(tip)
    assert session.asked == OF_PRECISION


def test_what_was_cut_short_is_asked_for_again(session: Session, tip: KnobTip) -> None:
    tip.explain("batch_size")
    session.cut_short = True
    look(tip, 4)
    assert session.asked[3:] == [{"largest": True}], "the others come first"
    assert "<u></u>" in said(tip)
    session.cut_short, session.asked = False, []
    look(tip)
    assert said(tip).count("<u>≈ as fast</u>") == 0, "half the samples in the same time are half as fast"
    assert len(session.asked) == 3, "each once"


def test_a_later_prediction_of_the_same_flip_is_shown(session: Session, tip: KnobTip) -> None:
    tip.explain("batch_size")
    assert "−16.0 MiB" in look(tip)
    session.bytes_per_sample = 10 * MIB
    session.predict(batch_size=16)
    shown = look(tip, 1)
    assert "+128.0 MiB" in shown
    assert DOES_NOT_FIT in shown


def test_at_the_batch_size_stands_up_to_which_batch_more_samples_pay(session: Session, tip: KnobTip) -> None:
    tip.explain("batch_size")
    assert "Critical batch not known: it is measured every 20 steps" in look(tip)
    session.history.add([sample(6, noise_scale=337.2), sample(7)], [])
    assert "Critical batch about 340 samples; the global batch is 64" in look(tip)
    assert look(tip).index("halve the steps") < look(tip).index("McCandlish"), "advice first"
    session.size = 1
    session.history.mark("load", "another one")
    assert "Critical batch not known: one rank alone does not show it" in look(tip)


def test_every_knob_says_what_it_does_to_the_mathematics(session: Session) -> None:
    controls = Controls(session, lambda action: None, lambda action: None)  # type: ignore[arg-type]
    boxes = (controls.knobs, *(fold.children[1] for fold in controls.further))
    tips = [knob.children[0].tooltip for box in boxes for knob in box.children]
    tip_of = {tip.split(":")[0]: tip for tip in tips}
    assert tip_of["checkpointing"].endswith("(keeps the mathematics)")
    assert tip_of["optimizer_impl"].endswith("(keeps the mathematics to rounding)")
    assert tip_of["precision"].endswith("(changes the mathematics)")
    assert tip_of["batch_size"].endswith("(may change the mathematics)")


def test_what_will_not_fit_is_said_once_and_then_done(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    widget, said = controls.knobs.children[2].children

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
