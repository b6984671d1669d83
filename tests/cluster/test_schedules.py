"""Learning rates on real ranks: by global batch and step, through failures, files and restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from tests.cluster.test_anybodys_model import SCHEDULED, rates
from tests.conftest import weights

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_a_schedule_goes_on_through_flips_failures_saving_and_a_restart(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(SCHEDULED)
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    with pytest.raises(InvalidInput, match="set schedule_steps"):
        session.set(lr_schedule="linear")
    session.set(batch_size=4, warmup_steps=3, lr_schedule="linear", schedule_steps=11)
    found = rates(session, 2)
    session.set(checkpointing="blocks")
    found += rates(session, 2)
    session.run("broken = True", ranks=[1])
    with pytest.raises(TrainingFailed, match="broken"):
        session.train(1)
    session.run("broken = False")
    session.predict(lr_schedule="cosine", batch_size=8)
    found += rates(session, 1)
    session.save(tmp_path / "scheduled.state")
    going_on = rates(session, 2)
    session.resume(tmp_path / "scheduled.state")
    assert rates(session, 2) == going_on
    session.restart()
    found += going_on + rates(session, 2)
    expected = [0.025, 0.05, 0.075, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.full
def test_the_rate_follows_the_global_batch_and_a_restart_keeps_what_it_was_meant_for(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.run(SCHEDULED)
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    session.set(batch_size=4)
    session.set(lr_scaling="linear", batch_size=8)
    assert session.settings.reference_batch == 8
    assert rates(session, 2) == pytest.approx([0.2] * 2)
    session.set(lr_scaling="sqrt")
    session.set(learning_rate=0.05, reference_batch=4)
    assert rates(session, 1) == pytest.approx([0.1])
    fingerprint, settings = weights(session), session.settings
    session.restart()
    assert (weights(session), session.settings) == (fingerprint, settings)
    session.set(batch_size=16)
    assert rates(session, 1) == pytest.approx([0.05 * 8**0.5])
    session.set(lr_scaling="none")
    assert rates(session, 1) == pytest.approx([0.05])
    assert session.settings.reference_batch is None
    session.set(precision="fp16", learning_rate=0.01)
    frame = session.train(3).frame()
    assert frame.groupby("step")[["loss_scale", "skipped"]].nunique().max().max() == 1, "the ranks agree"
    first, scale = frame[frame["rank"] == 0], 65536.0
    for used, skipped in zip(first.loss_scale, first.skipped, strict=True):
        assert used == scale
        scale /= 1 + skipped
