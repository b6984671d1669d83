"""What the doctor asks, and what it says of answers: with ranks that answer what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from gpumem_nb.kernel.doctoring import Doctoring
from gpumem_nb.kernel.history import History
from gpumem_nb.planning.doctor.diagnosis import Diagnosis
from gpumem_nb.planning.doctor.finding import Finding
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.report.verdict import Verdict
from gpumem_nb.shared.model_facts import ModelFacts
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB, info, reading
from tests.runs import history_of, train
from tests.unit.test_doctor import LIMIT, LOADED, prediction

Predict = Callable[[Settings], Prediction]


class Session:
    """Of two ranks that did 30 steps of 100 MiB and lose no time, but for what a test changes.

    Attributes:
        predicts: what is predicted of settings, or raised.
        verdicts: on the time of steps.
        failure: why training stopped by itself.
    """

    def __init__(self, steps: int = 30) -> None:
        self.history: History = history_of()
        self.predicts: Predict = prediction
        self.verdicts: list[Verdict] = []
        self.failure: Exception | None = None
        train(self.history, Settings(), [1.0] * steps, peak=100 * MIB)

    def examine(self) -> Diagnosis:
        """What the doctor finds."""
        return self._doctoring().examine(lambda what, done: None)

    def finding(self) -> Finding:
        """The only thing that it finds."""
        [found] = self.examine().findings
        return found

    def _doctoring(self) -> Doctoring:
        def call(function: str) -> list[Any]:
            assert function == "look"
            return [(reading(104 * MIB, LIMIT), None)] * 2

        def predict(changes: Mapping[str, Any]) -> Prediction:
            return self.predicts(Settings().replace(**changes))

        facts = SimpleNamespace(get=lambda: [ModelFacts()] * 2)
        answers: Any = SimpleNamespace(
            settings=Settings(),
            workload=LOADED,
            call=call,
            finish=lambda call: call,
            ask_alone=lambda function, *arguments: facts,
            check_loaded=lambda: None,
            check_alive=lambda: None,
            predict=predict,
            largest_batch=lambda changes: 999,
            verdicts=lambda: self.verdicts,
        )
        return Doctoring([info(0), info(1)], answers, answers, answers, answers, self.history)


def test_a_healthy_session_has_nothing_and_nothing_to_note() -> None:
    found = Session().examine()
    assert (found.findings, found.notes, found.came) == ((), (), "")


def test_time_is_judged_of_steps_since_a_cell_may_have_changed_what_is_trained() -> None:
    session = Session()
    session.history.model_may_have_changed()
    [note] = session.examine().notes
    assert note.startswith("Time is judged from 14 steps on, counted from the last flip or cell on the ranks")
    assert Session(13).examine().notes == (note,)
    assert Session(14).examine().notes == ()
