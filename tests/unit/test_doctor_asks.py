"""What the doctor asks, and what it says of answers: with ranks that answer what a test wants."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumem_nb.kernel.cluster import Cluster
from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.questions.doctoring import Doctoring
from gpumem_nb.kernel.record import Record
from gpumem_nb.planning.doctor.finding import STOPS, Diagnosis, Finding, Flip
from gpumem_nb.planning.doctor.rules import findings
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from gpumem_nb.planning.score import Asked
from gpumem_nb.report.bottleneck import Bottleneck
from gpumem_nb.report.instead import Fit
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.errors import NotThisTime, TrainingFailed, WorkloadError
from gpumem_nb.shared.questions import ModelFacts
from gpumem_nb.shared.readings import LiveBytes
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits
from tests.ledgers import MIB, info, reading
from tests.runs import history_of, train
from tests.unit.test_doctor import DEFAULT, LIMIT, LOADED, evidence, prediction, ran_out, rank

Predict = Callable[[Settings], Prediction]


class Session:
    """Of two ranks that did some steps of 100 MiB and lose no time, but for what a test changes.

    Args:
        steps: that were done.
        settings: under which.
        rate: samples/s of each rank.

    Attributes:
        predicts: what is predicted of settings, or raised.
        verdicts: on the time of steps.
        failure: why training stopped by itself.
        growing: what is predicted of segments that grow, on ranks with GPUs; ``None``: they have virtual ones.
    """

    def __init__(self, steps: int = 30, settings: Settings = DEFAULT, rate: float = 50.0) -> None:
        self.settings = settings
        self.history: History = history_of()
        self.predicts: Predict = prediction
        self.verdicts: list[Bottleneck] = []
        self.failure: Exception | None = None
        self.growing: list[tuple[str, Prediction]] | None = None
        train(self.history, settings, [1.0] * steps, peak=100 * MIB, rates=(rate,))

    def flip(self, settings: Settings) -> None:
        """Train under others."""
        self.settings = settings
        train(self.history, settings, [1.0] * 30, peak=100 * MIB, rates=(50.0,))

    def examine(self) -> Diagnosis:
        """What the doctor finds."""
        return self._doctoring().examine(lambda what, done: None)

    def finding(self) -> Finding:
        """The only thing that it finds."""
        [found] = self.examine().findings
        return found

    def _doctoring(self) -> Doctoring:
        def call(function: str) -> list[Any]:
            answers = {"look_closer": (reading(104 * MIB, LIMIT), None, LiveBytes({}))}
            return [answers[function]] * 2

        def predict(changes: Mapping[str, Any]) -> Prediction:
            return self.predicts(self.settings.replace(**changes))

        answers: Any = SimpleNamespace(
            settings=self.settings,
            workload=LOADED,
            call=call,
            call_alone=lambda function, *arguments, undone: [ModelFacts()] * 2,
            check_loaded=lambda: None,
            check_alive=lambda: None,
            predict=predict,
            by_whole_steps=lambda settings: self.predicts(settings),
            largest_fitting=lambda changes: SimpleNamespace(size=999),
            splits=lambda before, after: Splits(mean=True),
            known_splits=Splits(mean=True),
            allocators=lambda others: SimpleNamespace(others=self.growing),
            verdicts=lambda: self.verdicts,
            stopped_for=lambda: self.failure,
        )
        self.record = Record()
        self.record.follow(self.history, info(0))
        cluster = SimpleNamespace(
            ranks=SimpleNamespace(infos=[info(number, virtual=self.growing is None) for number in range(2)]),
            history=self.history,
            training=answers,
            foreground=answers,
            predicting=answers,
            inspection=answers,
            policy=None,
            origin=None,
            record=self.record,
            snapshots=None,
        )
        return Doctoring(cast(Cluster, cluster))


def test_a_healthy_session_has_nothing_and_nothing_to_note() -> None:
    found = Session().examine()
    assert (found.findings, found.notes, found.came) == ((), (), "")


def test_what_was_found_is_kept_with_its_step() -> None:
    session = Session(settings=Settings(num_workers=2))
    session.verdicts = [Bottleneck("data", 0.4, "Waits.", {"num_workers": 4})]
    session.examine()
    [kept] = session.record.answers
    said = "Training waits for data (%hvd_set num_workers=4)."
    assert (kept.who, kept.step, kept.workload, kept.said) == ("doctor", 30, LOADED.name, said)


@pytest.mark.parametrize("growing", [None, [], [("expandable_segments:True", prediction(live=110))]])
def test_where_memory_lies_in_pieces_segments_that_grow_are_predicted_on_gpus(growing: Any) -> None:
    session = Session()
    session.growing = growing
    session.predicts = lambda settings: prediction(settings, live=100, reserved=250)
    [found] = [one for one in session.examine().findings if one.cause == "fragmentation"]
    assert ("predicted to reserve 110.0 MiB" in found.do) is bool(growing)


def test_time_is_judged_of_steps_since_a_cell_may_have_changed_what_is_trained() -> None:
    session = Session()
    session.history.model_may_have_changed()
    [note] = session.examine().notes
    assert note.startswith("Time is judged from 14 steps on, counted from the last flip or cell on the ranks")
    assert Session(13).examine().notes == (note,)
    assert Session(14).examine().notes == ()


def test_a_flip_of_workers_is_offered_whatever_steps_on_trial_that_do_not_wait_for_them_bring() -> None:
    def bound(before: Settings, changes: dict[str, int]) -> Finding:
        session = Session(settings=before, rate=50.0)  # a rank
        session.verdicts = [Bottleneck("data", 0.4, "Waits.", changes)]
        session.predicts = lambda settings: prediction(settings, samples_per_s=160.0)
        return session.finding()

    more = bound(Settings(num_workers=2), {"num_workers": 4})
    assert more.flip, "by steps that do not wait it brings nothing"
    assert more.flip.gains_samples_per_s == 60, "beside what was measured, with the waiting"
    assert "160 samples/s (+60) if workers keep up" in more.helps
    assert bound(Settings(), {"num_workers": 2}).flip


def test_what_came_of_a_flip_stands_beside_the_speed_that_was_predicted_of_it_and_of_no_other() -> None:
    def came(foreseen: Settings) -> str:
        session = Session()
        now, history = session.settings, session.history
        said = prediction(foreseen, live=104, samples_per_s=150.0)
        history.predicted(Asked(said, history.model_version, now, history.begun))
        session.flip(Settings(num_workers=2))
        return session.examine().came

    same = came(Settings(num_workers=2))
    assert same.startswith("The latest flip, num_workers 0 → 2: predicted a live peak of 104.0 MiB and 150 samples/s;")
    assert "predicted a live peak of 104.0 MiB; measured" in came(Settings(num_workers=4))


def test_what_came_of_several_flips_since_a_pin_is_not_said_of_the_latest() -> None:
    session = Session()
    session.history.pin(True)
    session.flip(Settings(num_workers=2))
    session.flip(Settings(num_workers=4))
    history = session.history
    history.predicted(Asked(prediction(live=104), history.model_version, Settings(), 1))
    assert session.examine().came.startswith("What differs from the pinned settings, num_workers 0 → 4: predicted")


def test_of_what_barely_fits_a_flip_is_offered_that_leaves_room() -> None:
    def offered(after_mib: int, verdict: str = FITS) -> Finding:
        session = Session()
        now = prediction(live=960, verdict=TIGHT)
        session.predicts = lambda settings: (
            now if settings == DEFAULT else prediction(settings, live=after_mib, verdict=verdict)
        )
        return session.finding()

    for mib in (970, 960):  # what more accumulation takes may be more than what smaller micro-batches save
        found = offered(mib)
        assert found.flip is None
        assert "Predicted not to bring enough: " in found.do
    assert offered(900, TIGHT).flip is None
    flip = offered(900).flip
    assert flip
    assert flip.saves_bytes == 60 * MIB


@pytest.mark.parametrize("of", [{"verdict": TIGHT}, {"verdict": TIGHT, "measured": True}, {"verdict": DOES_NOT_FIT}])
def test_what_was_tried_out_after_memory_ran_out_is_offered_where_small_steps_cannot_say(of: dict[str, Any]) -> None:
    session = Session()
    smaller = DEFAULT.replace(checkpointing="blocks")
    session.predicts = lambda settings: prediction(settings, **of)

    def offered(barely: bool = False) -> Flip | None:
        session.history.rescue = ran_out(Fit(smaller, 100 * MIB, barely))
        session.history.rescue.model_version = version
        return next(one.flip for one in session.examine().findings if one.cause == "does not fit")

    version = session.history.model_version
    assert (offered() is not None) is (of == {"verdict": TIGHT})
    assert offered(barely=True) is None
    session.history.model_may_have_changed()
    assert offered() is None, "that was another model"


def test_a_flip_whose_step_fails_on_trial_is_not_offered_and_it_is_said_why() -> None:
    def offered(why: Exception) -> Finding:
        session = Session()
        session.verdicts = [Bottleneck("update", 0.3, "Long.", {"optimizer_impl": "fused"})]

        def predicts(settings: Settings) -> Prediction:
            if settings != DEFAULT:
                raise why
            return prediction()

        session.predicts = predicts
        return session.finding()

    found = offered(WorkloadError("A step failed: not this optimizer."))
    assert found.flip is None
    assert found.do == "Not possible: optimizer_impl=fused (A step failed: not this optimizer.)."
    passing = offered(NotThisTime("Interrupted.")).flip
    assert passing
    assert passing.will is None


def test_while_somebody_else_waits_for_the_ranks_no_speed_is_promised() -> None:
    session = Session()
    session.predicts = lambda settings: prediction(settings, cut_short=True, samples_per_s=None, step_s=None)
    session.verdicts = [Bottleneck("update", 0.3, "Long.", {"optimizer_impl": "fused"})]
    found = session.examine()
    assert found.findings[0].flip is None
    assert found.findings[0].do == "Not timed: optimizer_impl=fused."
    [note] = found.notes
    assert note.startswith("Other work waits for the ranks, such as a cell that trains")
    assert note.endswith("Run it again when that is over.")


@pytest.mark.parametrize("steps", [30, 0])
def test_what_paused_training_is_found_where_no_step_was_to_blame(steps: int) -> None:
    session = Session(steps)
    session.failure = TrainingFailed(
        "rank 1 waited for rank 0 (stall_limit_s=5).\nWhat was under way was discarded. Go on with %hvd_play."
    )
    found = session.finding()
    assert (found.cause, found.level) == ("training paused", STOPS)
    assert found.sentence == f"After step {steps}: rank 1 waited for rank 0 (stall_limit_s=5)."
    assert found.do == "What was under way was discarded. Go on with %hvd_play."
    session.failure = TrainingFailed("Training stopped, by a mistake.")
    assert (session.finding().sentence, session.finding().do) == (
        f"After step {steps}: Training stopped, by a mistake.",
        "",
    )


def in_turns(now_per_s: list[float], larger_per_s: list[float]) -> list[Finding]:
    """What is found where steps on trial come to these samples/s, one turn after the other."""
    session, turns = Session(), {DEFAULT: list(now_per_s)}

    def predicts(settings: Settings) -> Prediction:
        left = turns.setdefault(settings, list(larger_per_s))
        per_s = left.pop(0) if len(left) > 1 else left[0]
        return prediction(settings, samples_per_s=per_s, low_samples_per_s=per_s, high_samples_per_s=per_s)

    session.predicts = predicts
    return list(session.examine().findings)


def test_a_small_batch_is_said_by_what_several_turns_came_to_so_that_one_that_was_disturbed_decides_nothing() -> None:
    [found] = in_turns([100.0], [190.0, 200.0, 195.0, 205.0])
    assert found.cause == "a small batch"
    assert found.flip
    assert found.flip.will
    assert found.flip.will.samples_per_s == 197.5, "the button's figure is that of the finding"
    assert "it is 198 samples/s instead of 100" in found.sentence
    assert [one.cause for one in in_turns([100.0], [130.0, 200.0, 200.0, 200.0])] == ["a small batch"]
    assert in_turns([100.0], [200.0, 120.0, 120.0, 120.0]) == [], "the machine was busy for a moment"
    assert in_turns([60.0, 100.0, 130.0, 100.0], [200.0, 125.0, 200.0, 200.0]) == [], "turns differ as much"


def test_turns_that_cannot_be_taken_leave_what_was_measured() -> None:
    session, asked = Session(), Counter[Settings]()

    def predicts(settings: Settings) -> Prediction:
        asked[settings] += 1
        if asked[settings] > 2:
            raise NotThisTime("Interrupted.")
        fast = 200.0 if settings.batch_size == 4 * DEFAULT.batch_size else 100.0
        return prediction(settings, samples_per_s=fast, low_samples_per_s=fast, high_samples_per_s=fast)

    session.predicts = predicts
    assert session.finding().cause == "a small batch"


def test_what_was_timed_on_another_occasion_is_no_turn() -> None:
    session, speed = Session(), 0.5  # of the machine, while something else runs

    def predicts(settings: Settings) -> Prediction:
        per_s = speed * (200.0 if settings.batch_size == 4 * DEFAULT.batch_size else 100.0)
        return prediction(settings, samples_per_s=per_s, low_samples_per_s=per_s, high_samples_per_s=per_s)

    def predict(settings: Settings) -> None:
        version, begun = session.history.model_version, session.history.begun
        session.history.predicted(Asked(predicts(settings), version, DEFAULT, begun))

    session.predicts = predicts
    predict(DEFAULT.replace(batch_size=4 * DEFAULT.batch_size))
    speed = 1.0
    assert session.finding().cause == "a small batch"


def test_larger_micro_batches_that_run_out_of_memory_in_a_later_turn_do_not_fit() -> None:
    session, asked = Session(), Counter[Settings]()

    def predicts(settings: Settings) -> Prediction:
        asked[settings] += 1
        if settings == DEFAULT:
            return prediction()
        if asked[settings] < 3:
            return prediction(settings, live=900, samples_per_s=200.0, high_samples_per_s=210.0)
        out: dict[str, Any] = {"verdict": DOES_NOT_FIT, "lower_bound": True, "samples_per_s": None, "step_s": None}
        return prediction(settings, live=890, **out)  # with what it asked for, in memory that was in pieces

    session.predicts = predicts
    assert session.examine().findings == ()


def test_a_lower_bound_is_not_called_the_most_that_is_needed() -> None:
    blind = prediction(live=1200, verdict=DOES_NOT_FIT, categories={c.OTHER: 1200 * MIB}, lower_bound=True)
    [found] = findings(evidence(needs=blind))
    assert found.measured == "at least 1.2 GiB, limit 1000.0 MiB"


def test_larger_micro_batches_are_not_said_to_be_larger_than_what_fits() -> None:
    more = prediction(Settings(batch_size=128), live=990, samples_per_s=400.0, high_samples_per_s=420.0)
    for largest, told in ((126, False), (None, False), (130, True)):
        [found] = findings(evidence(larger=more, largest_batch=largest))
        assert ("up to 130 fit" in found.sentence, found.evidence["largest batch"]) == (told, largest if told else None)


def test_what_is_cached_is_given_back_by_the_command_for_that() -> None:
    held = dataclasses.replace(reading(100 * MIB, LIMIT), reserved_bytes=600 * MIB)
    [found] = findings(evidence(ranks=(rank(0, reading=held), rank(1))))
    assert found.cause == "free memory in the cache"
    assert found.do.endswith("To give it back: %hvd_memory --free.")
