"""Autotune: training looks for the fastest of Horovod's settings by itself, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from gpumem_nb.shared.state_file import verify
from gpumem_nb.ui.series import peaks
from tests.conftest import load_afresh, weights

pytestmark = pytest.mark.cluster

ASKED = {"cycle_time_ms": 50, "bucket_mib": 0.05}
ONE_LAYER = """
import torch
net = torch.nn.Linear(1024, {outputs}, bias=False)
rows = torch.utils.data.TensorDataset(torch.randn(64, 1024), torch.randn(64, {outputs}))
loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean() * {scale}
own = torch.optim.SGD(net.parameters(), lr=1e-30)  # what fails does so at any time
"""


@pytest.fixture
def session(two_ranks: Session) -> Iterator[Session]:
    """Two ranks that have trained under settings that are slow."""
    load_afresh(two_ranks)
    two_ranks.set(**ASKED)
    two_ranks.train(5)
    yield two_ranks
    two_ranks.set(autotune="off")
    two_ranks.pause()


def _events(session: Session, wanted: str = "Autotune ", most: int = 1200) -> list[str]:
    """Switch it on and train until it says so, but for so many steps at most; all that happened meanwhile."""
    since_s, began = session.history.now_s(), session.history.steps
    session.set(autotune="on")
    said: list[str] = []
    while session.history.steps - began < most and not any(wanted in text for text in said):
        session.train(20)
        said = _said(session, since_s)
    return said


def _said(session: Session, since_s: float) -> list[str]:
    """Only so many events are kept, so there is no place in them to count from."""
    return [event.text for event in list(session.history.events) if event.time_s >= since_s]


@pytest.mark.full
def test_it_finds_faster_settings_with_steps_that_count_and_ends(session: Session) -> None:
    before, tried, since_s = session.history.steps, len(session.history.tried), session.history.now_s()
    session.set(autotune="on")
    run = session.train(700)
    assert run.steps == 700
    assert session.history.steps == before + 700
    assert not session.policy.autotune
    assert session.settings.cycle_time_ms < 50
    (said,) = [note for note in run.notes if note.startswith("Autotune set ")]
    assert session.history.autotuned
    assert session.history.autotuned.text == said, "which the panel shows"
    assert f"cycle_time_ms={session.settings.cycle_time_ms}" in said
    assert len(session.history.tried) == tried + 1, "what was only tried is no configuration of its own"
    flips = [event.text for event in session.history.events if event.kind == "flip" and event.time_s >= since_s]
    assert len(flips) == 1, "what was found"
    assert run.frame()["cycle_time_ms"].nunique() > 3
    assert len(weights(session)) == 1
    assert session.check_sync().ok


def test_what_is_saved_meanwhile_is_what_was_asked_for(session: Session, tmp_path: Path) -> None:
    session.set(autotune="on")
    session.train(18)  # the first other settings take their turn
    others = session.run("hvd.size()")  # a cell meanwhile
    assert others == [2, 2]
    path = tmp_path / "meanwhile.state"
    session.save(path)
    saved = verify(path).settings
    assert {name: saved[name] for name in ASKED} == ASKED
    session.resume(path)
    assert {name: getattr(session.settings, name) for name in ASKED} == ASKED
    assert session.train(20).steps == 20


@pytest.mark.full
def test_a_flip_meanwhile_is_made_and_kept(session: Session) -> None:
    session.set(autotune="on")
    session.train(30)
    session.set(batch_size=2)
    said = _events(session)
    assert session.settings.batch_size == 2
    assert said.count("autotune: looking for the fastest of Horovod's settings") == 1, "anew, for the first time since"


@pytest.mark.full
def test_switched_off_it_leaves_what_was_asked_for(session: Session) -> None:
    session.set(autotune="on")
    session.play()
    session.set(autotune="off")
    session.pause()
    frame = session.train(5).frame()
    assert {name: getattr(session.settings, name) for name in ASKED} == ASKED
    assert set(frame["cycle_time_ms"]) == {50}
    assert set(frame["bucket_mib"]) == {0.05}


@pytest.mark.full
def test_an_error_of_the_model_is_none_of_the_settings(session: Session) -> None:
    since_s = session.history.now_s()
    session.set(autotune="on")
    session.train(30)
    session.run("failing = model.register_forward_pre_hook(lambda *_: 1 / 0)")
    with pytest.raises(TrainingFailed, match="division by zero"):
        session.train(20)
    session.run("failing.remove()")
    assert not [text for text in _said(session, since_s) if "not possible" in text]
    assert session.train(10).steps == 10


@pytest.mark.full
def test_cells_meanwhile_do_not_let_it_begin_anew(session: Session) -> None:
    since_s = session.history.now_s()
    session.set(autotune="on")
    for _ in range(60):
        session.train(20)
        session.run("1 + 1")
        if not session.policy.autotune:
            break
    said = _said(session, since_s)
    assert not session.policy.autotune
    assert sum("looking for" in text for text in said) == 1


@pytest.mark.full
def test_what_is_shown_meanwhile_is_of_what_was_asked_for(session: Session, tmp_path: Path) -> None:
    session.log_to(tmp_path / "run.jsonl")
    session.set(autotune="on")
    session.train(18)
    tried = [one.tried for one in session.history.of_loaded()[0]]
    assert any(tried)
    assert not all(tried)
    assert not any(one.tried for one in session.history.asked_for()[0])
    assert all(peak.ledger for peak in peaks(session.history.of_loaded(), session.history.readings))
    assert "n/a" not in str(session.train(5))
    session.stop_logging()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    named = {line["settings_id"] for line in lines if line["type"] == "settings"}
    assert {line["settings_id"] for line in lines if line["type"] == "step"} <= named


@pytest.mark.full
def test_what_does_not_fit_is_left_out_and_training_goes_on(two_ranks: Session) -> None:
    two_ranks.run(ONE_LAYER.format(scale=1, outputs=5000))  # gradients of 20 MB: the fusion buffer holds 16 MiB
    two_ranks.attach(model="net", data="rows", loss="loss", optimizer="own")
    two_ranks.set(batch_size=4)
    two_ranks.train(3)
    said = _events(two_ranks, "is not possible")
    assert any("fusion_threshold_mib=64" in text for text in said if "is not possible" in text), said
    two_ranks.train(3)
    two_ranks.set(autotune="off")
    assert two_ranks.history.rescue is None, "nobody had asked for that"
    assert two_ranks.settings.fusion_threshold_mib != 64
    assert len(weights(two_ranks)) == 1


@pytest.mark.full
def test_gradients_beyond_fp16_are_not_compressed(two_ranks: Session) -> None:
    two_ranks.run(ONE_LAYER.format(scale=1e9, outputs=200))
    two_ranks.attach(model="net", data="rows", loss="loss", optimizer="own")
    two_ranks.set(batch_size=4)
    two_ranks.train(3)
    said = _events(two_ranks)
    assert not two_ranks.policy.autotune
    assert two_ranks.settings.compression == "none"
    assert any("compression=fp16" in text and "is not possible" in text for text in said), said
    assert two_ranks.run("bool(torch.isfinite(net.weight).all())") == [True, True]


@pytest.mark.full
def test_one_rank_alone_has_nothing_to_tune() -> None:
    with gpumem_nb.start(1, device="cpu") as alone, pytest.raises(InvalidInput, match="at least two ranks"):
        alone.set(autotune="on")
