"""What is brought back survives a second fault, and a file that vanishes or lies leaves kernel and ranks agreed."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from gpumem_nb.kernel.foreground import Foreground
from gpumem_nb.kernel.loading import Loading
from gpumem_nb.kernel.starting import Plan
from gpumem_nb.session import Session
from gpumem_nb.shared import snapshot_folder, state_file
from gpumem_nb.shared.errors import Interrupted, RankError, StartError, StateFileError
from tests.cluster.test_save import losses
from tests.cluster.test_snapshots import kill_a_rank, snapshots
from tests.conftest import about, weights
from tests.internals import COLLECT, LIVE, STEPS, snapshots_of
from tests.timing import in_time

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_a_restart_after_a_death_goes_on_from_the_last_snapshot_even_if_cut_short_again_and_again(
    two_ranks: Session, fresh: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh(two_ranks)
    session.train(5)
    session.set(optimizer="momentum", learning_rate=0.01)
    fingerprint = weights(session)
    session.train(3)
    assert snapshots(session) == [5]
    kill_a_rank(session)

    def cut_short(error: BaseException) -> Callable[..., Any]:
        def raises(*args: Any, **options: Any) -> Any:
            raise error

        return raises

    for owner, name, error in [
        (Plan, "start", StartError("no room")),
        (Loading, "_begin", Interrupted("while it was loaded")),
        (Loading, "resume_from", Interrupted("while it was read")),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cut_short(error))
            with pytest.raises(type(error), match=str(error)):
                session.restart()
    session.restart()
    assert session.restored.startswith("step 5 restored (3 steps after it were lost)")
    assert weights(session) == fingerprint
    assert session.settings.optimizer == "adamw", "the snapshot is from before the flip"
    assert "back to the later ones with: %hvd_set optimizer=momentum learning_rate=0.01)" in session.restored
    assert session.status().steps == 5
    session.train(2)
    session.set(learning_rate=0.02)
    assert snapshots(session) == [7]
    newest = snapshot_folder.newest_first(snapshots_of(session).folder)[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    kill_a_rank(session)
    session.restart()
    assert session.restored.startswith("step 5 restored (2 steps after it were lost)"), (
        "what cannot be read gives way to it"
    )
    assert weights(session) == fingerprint
    fresh(session)
    session.restart()
    assert session.restored.startswith("digits-resnet loaded afresh"), "all that is of what was loaded before"
    assert session.train(1).steps == 1


def test_a_file_that_goes_once_it_was_checked_is_resumed_all_the_same(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    source = tmp_path / "x.state"
    saved = session.save(source)
    session.set(batch_size=8)
    session.train(3)
    call = Foreground.call

    def rotated_away(self: Foreground, function: str, *arguments: Any, **options: Any) -> list[Any]:
        if function == "resume_apply":
            source.unlink()
        return call(self, function, *arguments, **options)

    monkeypatch.setattr(Foreground, "call", rotated_away)
    resumed = session.resume(source)
    assert (resumed.steps, resumed.bytes) == (2, saved.bytes)
    assert (session.status().steps, session.settings.batch_size) == (2, 32)
    assert losses(session, 1)[0][0] == 3


PICKY = """
import torch
class Picky(torch.nn.Linear):
    seen, refuses = 0, False
    def forward(self, x):
        self.seen += 1
        return super().forward(x)
    def get_extra_state(self): return {"seen": self.seen}
    def set_extra_state(self, state):
        if rank == 1 and self.refuses: raise KeyError("another form")
        self.seen = state["seen"]
net, rows, loss = Picky(4, 1), [(torch.ones(4), torch.ones(1)) for _ in range(64)], torch.nn.MSELoss()
"""


def test_a_state_that_one_ranks_own_code_refuses_is_put_in_place_on_none(two_ranks: Session, tmp_path: Path) -> None:
    two_ranks.run(PICKY)
    two_ranks.attach("net", "rows", "loss")
    two_ranks.train(3)
    two_ranks.save(tmp_path / "x.state")
    two_ranks.train(2)
    two_ranks.run("net.refuses = True")
    before = weights(two_ranks), two_ranks.run("net.seen")
    with pytest.raises(StateFileError, match="the module Picky of rank 1 does not take back its state"):
        two_ranks.resume(tmp_path / "x.state")
    assert (weights(two_ranks), two_ranks.run("net.seen")) == before
    assert two_ranks.train(1).steps == 1
    two_ranks.run("net.refuses = False")
    assert two_ranks.resume(tmp_path / "x.state").steps == 3
    assert two_ranks.run("net.seen")[0] < before[1][0]


def test_a_whole_file_of_the_wrong_content_changes_nothing(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    source, wrong = tmp_path / "x.state", tmp_path / "wrong.state"
    session.save(source)
    header, stream = state_file.read(source)
    payload = torch.load(stream, weights_only=True)
    own = torch.load(io.BytesIO(payload["ranks"][0].numpy().tobytes()), weights_only=True)

    def not_torchs(stream: IO[bytes]) -> None:
        stream.write(b"not torch's")

    def packed(value: Any) -> torch.Tensor:
        stream = io.BytesIO()
        torch.save(value, stream)
        return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)

    def without(values: dict[str, Any], key: str) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != key}

    later = {
        "scheduler",
        "schedule_steps_done",
        "rates",
        "extra",
        "frozen",
        "evaluating",
        "runs",
    }  # which files of earlier versions lack
    bad: list[Any] = [without(payload, key) for key in payload.keys() - later]
    bad += [payload | {"ranks": [packed(without(own, key))] * 2} for key in own.keys() - later]
    bad += [payload | {"ranks": [packed(own | {"random": without(own["random"], "numpy")})] * 2}]
    bad += [payload | {"ranks": [torch.zeros(9, dtype=torch.uint8)] * 2}]
    bad += [payload | {"scaler": without(payload["scaler"], "scale")}, [1, 2], {"parameters": {"x": io.StringIO}}]
    session.run(COLLECT)
    before, live = (weights(session), session.settings), session.run(LIVE)
    for content in bad:
        state_file.write(wrong, header, partial(torch.save, content))
        with pytest.raises(StateFileError, match="does not hold a training state") as caught:
            session.resume(wrong)
        assert "\n" not in str(caught.value)
    state_file.write(wrong, header, not_torchs)
    with pytest.raises(StateFileError, match="does not hold a training state"):
        session.resume(wrong)
    assert (weights(session), session.settings) == before
    assert session.run(LIVE) == about(live)
    assert session.train(1).steps == 1


RAISES_ONCE = """
import gpumem_nb.engine.rank as of_ranks
if rank == 1:
    usual = of_ranks.run_chunk
    def once(chunk):
        of_ranks.run_chunk = usual
        raise OSError("not this time")
    of_ranks.run_chunk = once
"""


@pytest.mark.full
def test_ranks_still_in_a_chunk_that_failed_on_another_are_waited_for(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.set(stall_limit_s=2)
    try:
        session.run(RAISES_ONCE)
        began = time.monotonic()
        with pytest.raises(RankError, match="not this time"):
            session.train(1)
        assert in_time(time.monotonic() - began, 2.0), "who asked is told at once"
        assert session.waiting_for == [0]
        assert session.train(1).steps == 1
        assert session.run(STEPS) == [session.status().steps] * 2
        assert len(weights(session)) == 1
        session.run(RAISES_ONCE)
        with pytest.raises(RankError, match="not this time"):
            session.train(1)
        session.pause()
        assert session.waiting_for == []
        assert session.run("rank") == [0, 1]
    finally:
        session.set(stall_limit_s=30)
