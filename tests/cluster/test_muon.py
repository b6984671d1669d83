"""``optimizer=muon`` on real ranks: predicted, stored and exported like the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput
from tests import exported
from tests.conftest import weights

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on"),
]
TEXT = {"width": 64, "depth": 3, "heads": 2, "sequence_length": 32}


@pytest.mark.full
def test_it_is_predicted_resumed_and_exported(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=8)
    session.train(3)
    session.save(tmp_path / "before")
    predicted, plain = session.predict(optimizer="muon"), session.predict()
    assert predicted.categories["optimizer state"] < 0.7 * plain.categories["optimizer state"]
    assert "update was taken and undone" in predicted.basis  # whose products of 16-bit matrices take memory inside
    session.set(optimizer="muon")
    session.train(3)
    assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=0.001)
    assert len(weights(session)) == 1

    session.save(tmp_path / "state")
    run = session.train(4)
    expected = list(exported.mean_losses(run).values())
    session.resume(tmp_path / "before")
    session.resume(tmp_path / "state")
    assert session.settings.optimizer == "muon"
    assert list(exported.mean_losses(session.train(4)).values()) == expected

    session.load("text-gpt", **TEXT)
    session.set(optimizer="muon", batch_size=8, learning_rate=2e-3, lr_schedule="cosine", schedule_steps=6)
    run = session.train(4)
    exported.scripts_train_alike(session, run, tmp_path)

    session.load("digits-resnet")
    with pytest.raises(InvalidInput, match="for hidden matrices, and digits-resnet trains none"):
        session.set(optimizer="muon")
