"""The tuner on real ranks: what it answers fits and is undone, whatever comes in between."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from gpumem_nb.planning.score import Scoreboard
from gpumem_nb.planning.tuning.record import Candidate, speed_of
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.ui import threads
from tests.cluster.stop_button import Stop
from tests.cluster.test_ledger import STATE
from tests.conftest import weights
from tests.internals import shown_widget, wait_for_steps, widgets_in
from tests.timing import HANG_S, slowness, until

pytestmark = pytest.mark.cluster
DIGITS = {"width": 8, "depth": 2, "resolution": 8}


def _losses(session: Session, steps: int) -> dict[tuple[int, int], float]:
    """By rank and step."""
    losses: dict[tuple[int, int], float] = session.train(steps).frame().set_index(["rank", "step"]).loss.to_dict()
    return losses


def _best(result: TuneResult) -> Candidate:
    assert result.best is not None
    return result.best


def _failures(session: Session) -> list[str]:
    return [event.text for event in session.history.events if event.kind in ("oom", "error", "stall")]


def test_tuning_finds_what_is_faster_and_changes_nothing(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=2, accumulation_steps=16, checkpointing="sqrt")
    session.train(2)
    before, failures = session.run(STATE), _failures(session)
    told: list[str] = []
    result = session.tune(seconds=10 * slowness(), progress=lambda what, done: told.append(what))
    assert [digest for digest, _ in session.run(STATE)] == [digest for digest, _ in before]
    assert session.settings == result.present
    assert _failures(session) == failures
    best, now = _best(result), result.now
    assert now is not None
    assert best is not now
    assert best.settings.batch_size > 2
    assert best.settings.samples_per_rank == 32
    assert speed_of(best) > 1.5 * speed_of(now)
    assert any("best so far" in what for what in told)


@pytest.mark.full
def test_losses_go_on_as_without_tuning(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=8)
    plain = _losses(session, 6)
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=8)
    losses = _losses(session, 3)
    session.tune(seconds=3, same_mathematics=False)
    assert losses | _losses(session, 3) == plain
    assert len(weights(session)) == 1


@pytest.mark.full
def test_what_trains_already_fits_whatever_is_predicted(
    two_ranks: Session, fresh: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)
    session.train(3)
    monkeypatch.setattr(Scoreboard, "missed", lambda board, version: (0.0, 5.0))
    result = session.tune(seconds=60, knobs=["optimizer_impl"])  # it ends when all was looked at
    assert result.now is not None
    assert "do not fit" not in result.why
    assert any(not one.fits for one in result.looked_at if one is not result.now)


def test_the_best_is_applied_and_foretold(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=2, accumulation_steps=16, checkpointing="blocks")
    result = session.tune(seconds=6 * slowness(), knobs=["batch_size"])
    result.apply()
    best = _best(result)
    assert session.settings == best.settings
    assert session.settings.checkpointing == "blocks"
    run = session.train(6).frame()
    assert run.reserved_peak_bytes.max() <= best.predicted.high_bytes
    foreseen = session.foreseen()
    assert foreseen is not None
    assert foreseen.samples_per_s == best.samples_per_s


@pytest.mark.full
def test_a_budget_is_kept_to(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, width=16, depth=2, resolution=16)
    session.set(batch_size=64)
    budget = session.predict(batch_size=16, accumulation_steps=4).high_bytes
    assert budget < session.predict().reserved_peak_bytes
    result = session.tune(budget=budget, seconds=8)
    assert result.now is None
    assert all(one.predicted.reserved_peak_bytes <= budget for one in result.measured)
    assert "the present settings do not fit" in result.why


SLOW_STEPS = """
import time
net = torch.nn.Linear(16, 4)
rows = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
def slow(model, batch):
    time.sleep(0.15)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
SLOW = """
import time, torch

class Slow(torch.nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            time.sleep(2.5)
        return super().forward(x)

net = torch.nn.Sequential(Slow(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
rows = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
criterion = torch.nn.functional.cross_entropy
"""


@pytest.mark.full
def test_a_precision_that_is_slow_is_left_after_its_first_step(two_ranks: Session) -> None:
    two_ranks.run(f"torch.manual_seed(0)\n{SLOW}")
    two_ranks.attach(model="net", data="rows", loss="criterion")
    two_ranks.set(batch_size=16, accumulation_steps=2)
    result = two_ranks.tune(seconds=60, knobs=["precision", "batch_size"], same_mathematics=False)
    slow = [why for one, why in result.refused.items() if one.precision == "fp16"]
    assert slow
    assert all("times as long as in another precision" in why for why in slow)
    assert {one.settings.precision for one in result.looked_at} == {"fp32", "bf16"}
    assert "times as long as in another precision" in str(result)
    found = two_ranks.what_fits()
    assert {cell.precision for cell in found.cells} == {"fp32", "bf16"}
    assert "times as long as in another precision" in str(found)


@pytest.mark.full
def test_where_nothing_fits_that_is_the_answer(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)
    result = session.tune(budget="1 MiB", seconds=120, knobs=["batch_size", "checkpointing"])
    assert result.best is None
    assert result.why.startswith("Nothing fits 1.0 MiB: the least is ")
    with pytest.raises(WorkloadError, match="nothing to apply"):
        result.apply()


@pytest.mark.full
def test_an_interrupt_gives_the_best_so_far(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)

    def stop(what: str, done: float) -> None:
        if what.startswith("2 of"):
            raise KeyboardInterrupt

    result = session.tune(seconds=60, progress=stop)
    assert len(result.measured) == 2
    assert result.best is not None
    assert "It was interrupted" in result.why
    session.train(1)


@pytest.mark.full
def test_training_goes_on_in_between(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)
    session.play()
    try:
        steps = session.history.steps
        result = session.tune(seconds=5)
        assert session.playing
        assert session.history.steps > steps
        assert result.measured
    finally:
        session.pause()
    assert len(weights(session)) == 1


def _set(event: threading.Event, what: str, done: float) -> None:
    event.set()


@pytest.mark.full
def test_stopping_it_does_not_pause_training(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    """The signal comes while its trial waits for the step under way: that is not what somebody stops."""
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)
    session.run(SLOW_STEPS)
    session.attach(model="net", data="rows", loss="slow")
    session.play()
    try:
        wait_for_steps(session, 3)
        for _ in range(3):
            steps = session.history.steps
            begun = threading.Event()
            stop = Stop(begun.is_set)
            result = session.tune(seconds=60, progress=functools.partial(_set, begun))
            assert "It was interrupted" in result.why
            assert stop.took_s() < HANG_S
            assert session.playing
            wait_for_steps(session, steps + 2)
    finally:
        session.pause()


@pytest.mark.full
def test_a_cell_in_between_ends_it(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)

    def cell(what: str, done: float) -> None:
        if what.startswith("1 of"):
            session.run("1")

    result = session.tune(seconds=60, progress=cell)
    assert "a cell ran on the ranks" in result.why
    assert len(result.measured) == 1


@pytest.mark.full
def test_settings_that_change_in_between_end_it_and_later_ones_are_not_overwritten(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)

    def flip(what: str, done: float) -> None:
        if what.startswith("1 of"):
            session.set(batch_size=64)

    result = session.tune(seconds=60, progress=flip)
    assert result.stopped == "It ended early, because settings were changed."
    found = session.tune(seconds=4, knobs=["checkpointing"])
    session.set(optimizer="sgd")
    with pytest.raises(InvalidInput, match=r"before optimizer changed, so it may not fit. Run it again"):
        found.apply()
    session.set(optimizer=found.present.optimizer)
    session.load("digits-resnet", **DIGITS)
    with pytest.raises(InvalidInput, match=r"another workload is loaded now"):
        found.apply()


@pytest.mark.full
def test_a_stop_that_comes_while_it_waits_for_a_cell_leaves_the_cell_alone(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks, **DIGITS)
    begun, go = tmp_path / "begun", tmp_path / "go"
    cell = (
        "import pathlib, time\npathlib.Path(begun).touch()\nwhile not pathlib.Path(go).exists(): time.sleep(0.02)\nrank"
    )
    session.push({"begun": str(begun), "go": str(go)})
    answers: list[list[Any]] = []
    runs = threading.Thread(target=lambda: answers.append(session.run(cell)))
    runs.start()
    until(begun.exists)

    def stop(what: str, done: float) -> None:
        raise KeyboardInterrupt

    try:
        with session.telling(stop), pytest.raises(KeyboardInterrupt, match="doing something else, which goes on"):
            session.predict(batch_size=16)
    finally:
        go.touch()
        runs.join(HANG_S)
    assert answers == [[0, 1]]
    session.train(1)


@pytest.mark.full
def test_a_restart_in_between_ends_it_and_is_told_as_one(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)

    def restart(what: str, done: float) -> None:
        if what.startswith("1 of"):
            session.restart()

    result = session.tune(seconds=60, progress=restart)
    assert result.stopped == (
        "It ended early: The ranks were started again meanwhile. Ask once more when they are ready."
    )
    assert len(result.measured) == 1
    assert not session.ended
    session.train(1)


@pytest.mark.full
def test_an_optimizer_without_a_fused_way_is_left_out(two_ranks: Session) -> None:
    two_ranks.run(
        "import torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))\n"
        "points = [(torch.randn(8), torch.tensor(i % 2)) for i in range(256)]\n"
        "entropy = torch.nn.CrossEntropyLoss()\n"
        "own = torch.optim.Rprop(net.parameters(), lr=1e-3)\n"
    )
    two_ranks.attach(model="net", data="points", loss="entropy", optimizer="own")
    two_ranks.set(batch_size=4, accumulation_steps=4)
    result = two_ranks.tune(seconds=5)
    assert result.best is not None
    assert all(one.settings.optimizer_impl != "fused" for one in result.measured)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0}, "write a number from 1"),
        ({"seconds": "long"}, "write a number from 1"),
        ({"budget": "much"}, "'much' is not a memory size"),
        ({"budget": "512"}, "budget='512' is 512 B, less than any rank holds: write a size such as 512MiB"),
        ({"knobs": ["batchsize"]}, "did you mean 'batch_size'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    two_ranks: Session, fresh: Callable[..., Session], options: dict[str, Any], said: str
) -> None:
    session = fresh(two_ranks, **DIGITS)
    with pytest.raises(InvalidInput, match=said):
        session.tune(**options)


@pytest.mark.full
def test_the_magics_say_the_same(two_ranks: Session, fresh: Callable[..., Session], shell: InteractiveShell) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=4, accumulation_steps=8)
    result = shell.run_line_magic("hvd_tune", "--seconds 3 --knobs batch_size,checkpointing --apply")
    assert session.settings == _best(result).settings
    assert set(result.space.knobs) <= {"batch_size", "accumulation_steps", "checkpointing"}
    with pytest.raises(UsageError, match="changes the mathematics"):
        shell.run_line_magic("hvd_tune", "--knobs precision")


@pytest.mark.full
def test_in_a_notebook_there_is_a_button_that_applies_it(
    two_ranks: Session, fresh: Callable[..., Session], shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=1, accumulation_steps=32)
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr(threads, "speak_for_no_request", lambda kernel: None)
    with capture_output() as output:
        result = shell.run_line_magic("hvd_tune", "--seconds 12 --knobs batch_size")
    assert session.settings == result.present, "nothing is changed before it is pressed"
    [bundle] = [one.data for one in output.outputs if "application/vnd.jupyter.widget-view+json" in one.data]
    [button] = [one for one in widgets_in(shown_widget(bundle)) if type(one).__name__ == "Button"]
    button.click()
    until(lambda: session.settings == _best(result).settings)


@pytest.mark.full
def test_knobs_that_were_not_tuned_stay_as_they_are(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=2, accumulation_steps=16)
    result = session.tune(seconds=4, knobs=["batch_size"])
    session.set(learning_rate=1e-4)
    result.apply()
    assert session.settings.learning_rate == 1e-4
    assert session.settings.batch_size == _best(result).settings.batch_size
