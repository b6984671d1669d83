"""What was posted to the ranks is settled, wherever Ctrl-C comes: notebook and ranks agree on what is loaded."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb import Workload
from gpumem_nb.cluster import ranks as ranks_module
from gpumem_nb.cluster.ranks import Ranks
from gpumem_nb.kernel import compatibility
from gpumem_nb.kernel.foreground import Foreground
from gpumem_nb.kernel.loading import Loading
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import Interrupted
from tests.conftest import weights
from tests.internals import somebody_waits_for_ranks, wait_for_steps
from tests.tiers import every, first_tier
from tests.timing import until

pytestmark = pytest.mark.cluster


class CtrlC:
    """Presses it once, at a point of the notebook's code."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.pressed = False

    def at(self, point: str, function: str) -> None:
        """Before or after something is done for requests of this name; ``-`` for the first of any name."""
        owner, name, when = POINTS[point]
        usual = getattr(owner, name)

        @wraps(usual)
        def with_ctrl_c(*args: Any, **options: Any) -> Any:
            of_this = name != "_post" or function in ("-", *args[2:3])
            if when == "before" and of_this:
                self._press()
            answer = usual(*args, **options)
            if when == "after" and of_this:
                self._press()
            return answer

        self._patch.setattr(owner, name, with_ctrl_c)

    def _press(self) -> None:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


POINTS: dict[str, tuple[Any, str, str]] = {
    "before it is posted": (Ranks, "_post", "before"),
    "while it is posted": (ranks_module, "forget_sent", "before"),
    "once it is posted": (Ranks, "_post", "after"),
    "before it is waited for": (Foreground, "_wait_for", "before"),
    "once it is answered": (Foreground, "_wait_for", "after"),
    "once it is done": (Foreground, "finish", "after"),
}
POSTING = list(POINTS)[:3]
LOADING = {
    **POINTS,
    "as the notebook takes it in": (compatibility, "loaded", "before"),
    "once the notebook has taken it in": (Loading, "_train_from", "after"),
}
POINTS.update(LOADING)


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> CtrlC:
    return CtrlC(monkeypatch)


def agree(session: Session) -> None:
    """The notebook and the ranks hold the same for what is loaded, and it trains."""
    (loaded,) = set(session.run("type(model).__name__ if 'model' in globals() else ''"))
    name = session.workload.name if session.workload else ""
    assert (name, loaded) in {("digits-resnet", "ResNet"), ("text-gpt", "GPT"), ("", "ResNet"), ("", "GPT"), ("", "")}
    if not name:  # not known for certain, and said so: what is loaded next counts
        session.load("digits-resnet", width=8, depth=1, resolution=8)
    steps = session.status().steps
    assert session.train(2).steps == 2
    assert session.status().steps == steps + 2
    assert len(weights(session)) == 1
    assert {row.workload for row in session.runs.rows[-1:]} == {session.workload.name if session.workload else ""}


@pytest.mark.parametrize("point", first_tier(LOADING, every(2)))
def test_a_load_that_is_interrupted_leaves_the_same_here_and_there(
    two_ranks: Session, fresh: Callable[..., Session], ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    session = fresh(two_ranks)
    session.train(3)
    ctrl_c.at(point, "load")
    with pytest.raises(Interrupted):
        session.load("text-gpt")
    monkeypatch.undo()
    assert ctrl_c.pressed
    agree(session)


REQUESTS: dict[str, Callable[[Session, Path], object]] = {
    "seed": lambda session, folder: session.seed(5),
    "push": lambda session, folder: session.push({"pushed": 1}),
    "pull": lambda session, folder: session.pull("rank"),
    "sync": lambda session, folder: session.sync(),
    "look_closer": lambda session, folder: session.memory(),
    "record_step": lambda session, folder: session.timeline(),
    "save": lambda session, folder: session.save(folder / "a.state"),
    "resume_check": lambda session, folder: session.resume(session.save(folder / "b.state").path),
    "forecast": lambda session, folder: session.predict(batch_size=64),  # smaller ones are taken whole
    "set_stall_limit": lambda session, folder: session.set(stall_limit_s=20),
    "run_chunk": lambda session, folder: session.set(batch_size=16),
}


# The first tier has each request once, and the three points in turn.
@pytest.mark.parametrize(
    ("function", "point"),
    first_tier(itertools.product(REQUESTS, POSTING), lambda index, _: index // 3 % 3 == index % 3),
)
def test_any_request_that_is_interrupted_as_it_is_posted_is_settled(
    two_ranks: Session, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str, point: str
) -> None:
    session = two_ranks
    if session.workload is None or session.workload.name != "digits-resnet":
        session.load("digits-resnet", width=8, depth=1, resolution=8)
    session.train(1)
    ctrl_c.at(point, function)
    with suppress(Interrupted, KeyboardInterrupt):
        REQUESTS[function](session, tmp_path)
    monkeypatch.undo()
    assert ctrl_c.pressed
    agree(session)
    session.set(batch_size=32, stall_limit_s=30)
    assert session.run("1") == [1, 1]


def test_a_cell_that_is_interrupted_as_it_is_posted_is_kept_for_scripts(
    two_ranks: Session, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctrl_c.at("once it is posted", "-")
    with pytest.raises(Interrupted):
        two_ranks.run("posted = 1")
    monkeypatch.undo()
    assert two_ranks._life._origin.cells.since_load()[-1].source == "posted = 1"


@pytest.mark.full
def test_a_restart_loads_what_was_loaded_and_says_that_it_has_changed(two_ranks: Session) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "SCALE": 1.0}
    exec(
        """
import torch
from torch import nn
def model(): return nn.Linear(4, 1)
def data(): return torch.utils.data.TensorDataset(torch.ones(64, 4))
def loss(model, batch): return SCALE * model(batch[0]).square().mean() + SCALE
""",
        names,
    )
    session = two_ranks
    session.load(Workload("scaled", names["model"], names["data"], names["loss"]))
    session.set(batch_size=4, snapshot_steps=1)
    session.train(5)
    names["SCALE"] = 100.0
    session.restart()
    assert session.restored.startswith("step 5 restored")
    assert "what its functions use has changed in the notebook since" in session.restored
    assert max(session.train(1).frame().loss) < 10, "the loss of the workload that was loaded"
    names["SCALE"] = 1.0
    session.run("model.bias.data.zero_(); model.gain = 2")
    session.restart()
    assert session.restored == (
        "step 6 restored. 1 cell had run on the ranks since it was loaded: what it changed besides training state is "
        "gone. Run again what is needed"
    )
    session.set(snapshot_steps="auto")


def test_a_step_that_a_late_interrupt_discards_is_told(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session, over = fresh(two_ranks), threading.Event()

    def press() -> None:  # a signal counts inside of the model's code only
        wait_for_steps(session, 2)
        while not over.wait(0.01):
            os.kill(session.ranks[1].pid, signal.SIGINT)

    late = threading.Thread(target=press)
    late.start()
    try:
        said = str(session.train(10**6))
    finally:
        over.set()
        late.join()
    assert "An interrupt reached rank 1 late: a step was discarded. Train again." in said
    assert session.train(1).steps == 1


@pytest.mark.full
def test_training_that_played_goes_on_after_a_restart(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.play()
    wait_for_steps(session, 3)
    session.restart()
    assert session.restored.endswith("; training goes on")
    assert session.playing
    wait_for_steps(session, 3)
    session.pause()
    session.restart()
    assert not session.playing
    assert "goes on" not in session.restored


def _model_slowly(until: str) -> Callable[[], Any]:
    def model() -> Any:
        import time
        from pathlib import Path

        import torch

        while not Path(until).exists():
            time.sleep(0.01)
        return torch.nn.Linear(4, 4)

    return model


def test_steps_that_are_asked_for_while_something_loads_are_of_that(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(3)
    row, built = session.runs.rows[-1], tmp_path / "built"

    def rows() -> Any:
        import torch

        return torch.utils.data.TensorDataset(torch.ones(64, 4))

    def play() -> None:
        until(lambda: somebody_waits_for_ranks(session))
        session.play()
        built.touch()

    pressing = threading.Thread(target=play)
    pressing.start()
    session.load(
        Workload("slow", _model_slowly(str(built)), rows, lambda model, batch: model(batch[0]).square().mean())
    )
    pressing.join()
    wait_for_steps(session, 20)
    session.pause()
    before, *_, now = [one for one in session.runs.rows if one.number >= row.number]
    assert (before.workload, before.steps) == ("digits-resnet", 3)
    assert (now.workload, now.steps) == ("slow", session.history.steps)
