"""``optimizer=adamw8bit`` on real ranks: predicted, stored and exported like the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from tests import exported
from tests.conftest import weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.full
def test_it_is_predicted_resumed_and_exported(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    session = fresh(two_ranks, "text-gpt", width=64, depth=3, heads=2, sequence_length=32)
    session.set(batch_size=8)
    session.train(3)
    session.save(tmp_path / "before")
    predicted = session.predict(optimizer="adamw8bit")
    assert predicted.categories["optimizer state"] < 0.4 * session.predict().categories["optimizer state"]
    assert "update was taken and undone" in predicted.basis  # its kernels are not torch's
    session.set(optimizer="adamw8bit")
    session.train(3)
    assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=0.05)
    assert len(weights(session)) == 1

    session.save(tmp_path / "state")
    run = session.train(4)
    expected = list(exported.mean_losses(run).values())
    session.resume(tmp_path / "before")
    session.resume(tmp_path / "state")
    assert session.settings.optimizer == "adamw8bit"
    assert list(exported.mean_losses(session.train(4)).values()) == expected

    session.load("text-gpt", width=64, depth=3, heads=2, sequence_length=32)
    session.set(optimizer="adamw8bit", batch_size=8)
    run = session.train(4)
    session.export(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=4)
    assert ran.losses == exported.mean_losses(run)
    assert not exported.differing(session, ran)
