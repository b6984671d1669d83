"""``offload_activations`` on ranks: flipped both ways, predicted, rescued, resumed and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from tests import exported
from tests.conftest import weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TEXT = {"width": 64, "depth": 4, "heads": 2, "sequence_length": 64}


def test_a_live_model_is_flipped_both_ways_and_needs_what_was_predicted(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=16, optimizer="adamw")
    plain = session.train(4).frame()
    for checkpointing, share in (("none", 0.8), ("blocks", 1.0)):  # of blocks' inputs, the peak lies elsewhere
        changed = {"checkpointing": checkpointing, "offload_activations": "on"}
        session.set(checkpointing=checkpointing, offload_activations="off")
        off = session.train(3).frame()
        predicted = session.predict(**changed)
        session.set(**changed)
        on = session.train(3).frame()
        peak = int(on.live_peak_bytes.max())
        assert peak < share * off.live_peak_bytes.max()
        assert predicted.live_peak_bytes == pytest.approx(peak, rel=1e-3)
        assert predicted.verdict == "fits"
    frame = session.memory().frame()
    assert (frame.host_peak_bytes > 0).all()
    assert "waited in host memory (offload_activations=on), of" in str(session.memory())
    session.set(checkpointing="none", offload_activations="off")
    back = session.train(2).frame()
    assert back.live_peak_bytes.max() == pytest.approx(plain.live_peak_bytes.max(), abs=64)
    assert len(weights(session)) == 1


@pytest.mark.full
def test_losses_are_those_without_it_to_the_bit(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    found = []
    for flips in (("off",) * 3, ("off", "on", "off"), ("on", "on", "off")):
        session = fresh(two_ranks, "text-gpt", **TEXT)
        session.set(batch_size=8, accumulation_steps=2)
        losses: list[float] = []
        for value in flips:
            session.set(offload_activations=value)
            losses += exported.mean_losses(session.train(2)).values()
        found.append(losses)
    assert found[0] == found[1] == found[2]


def test_a_micro_batch_for_which_host_memory_is_short_is_predicted_not_to_fit(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=16, offload_activations="on")
    session.train(2)
    each = int(session.memory().frame().host_peak_bytes.max()) / 16
    session.set(offload_activations="off")
    session.run(
        f"""
from gpumem_nb.memory import host_pool
known = host_pool.available_bytes
if hvd.rank() == 1:
    host_pool.available_bytes = lambda: int({24.5 * each} * 2 / 0.8)
"""
    )
    try:
        short = session.predict(batch_size=64, offload_activations="on")
        most = session.largest_batch(offload_activations="on")
        fits = session.predict(batch_size=most, offload_activations="on")
        session.set(batch_size=most, offload_activations="on")
        assert session.train(2).steps == 2
    finally:
        session.run("host_pool.available_bytes = known")
    assert short.verdict == "does not fit"
    assert "would wait in host memory, of which a rank may use" in str(short)
    assert "would wait in host memory" in short.refusal
    assert short.live_peak_bytes < (short.limit_bytes or 0)
    assert most == 24
    assert fits.verdict == "fits"


def test_too_little_host_memory_on_one_rank_goes_back_and_training_goes_on(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=16)
    session.train(2)
    session.run(
        """
from gpumem_nb.memory import host_pool
known = host_pool.available_bytes
if hvd.rank() == 1:
    host_pool.available_bytes = lambda: 2**20
"""
    )
    try:
        session.set(offload_activations="on")
        with pytest.raises(GpumemError, match=r"rank 1.*Host memory is short"):
            session.train(2)
    finally:
        session.run("host_pool.available_bytes = known")
    assert session.settings.offload_activations == "off"
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


@pytest.mark.full
def test_it_is_resumed_and_exported(two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=8, precision="bf16", offload_activations="on", checkpointing="blocks")
    run = session.train(4)
    exported.scripts_train_alike(session, run, tmp_path)
    session.save(tmp_path / "state")
    expected = exported.mean_losses(session.train(2))
    session.resume(tmp_path / "state")
    assert session.settings.offload_activations == "on"
    assert exported.mean_losses(session.train(2)) == expected
