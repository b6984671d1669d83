"""``offload_optimizer`` on ranks: flipped both ways, predicted, shared, rescued, synchronised, resumed and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.categories import OPTIMIZER_STATE
from gpumem_nb.shared.errors import GpumemError
from tests import exported
from tests.conftest import weights
from tests.tiers import every, first_tier

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TEXT = {"width": 128, "depth": 2, "heads": 2, "sequence_length": 32}
SHORT = """
from gpumem_nb.memory import host_pool
known = host_pool.available_bytes
if hvd.rank() == 1:
    host_pool.available_bytes = lambda: 2**18
"""


@pytest.mark.parametrize("shards", first_tier(["on", "off"], every(2)))
def test_a_live_model_is_flipped_both_ways_and_needs_what_was_predicted(
    two_ranks: Session, fresh: Callable[..., Session], shards: str
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=4, optimizer="adamw", shard_optimizer=shards)
    plain = session.train(4).frame()
    predicted = session.predict(offload_optimizer="on")
    session.set(offload_optimizer="on")
    on = session.train(3).frame()
    assert on.live_peak_bytes.max() < 0.95 * plain.live_peak_bytes.max()
    assert predicted.live_peak_bytes == pytest.approx(int(on.live_peak_bytes.max()), rel=1e-3)
    assert predicted.verdict == "fits"
    assert predicted.categories.get(OPTIMIZER_STATE, 0) < 2**16
    frame = session.memory().frame()
    assert (frame.host_peak_bytes == frame.host_state_bytes).all()
    assert frame.host_state_bytes.min() > 2**20
    assert "waited in host memory (offload_optimizer=on), of" in str(session.memory())
    back = session.predict(offload_optimizer="off")
    session.set(offload_optimizer="off")
    off = session.train(3).frame()
    assert off.live_peak_bytes.max() == pytest.approx(plain.live_peak_bytes.max(), abs=64)
    assert back.live_peak_bytes == pytest.approx(int(off.live_peak_bytes.max()), rel=1e-3)
    without = session.predict(optimizer="sgd")
    session.set(optimizer="sgd")
    session.train(2)
    said = str(session.predict(offload_optimizer="on"))
    assert "offload_optimizer=on frees nothing here: the peak lies elsewhere" in said
    assert "frees nothing" not in str(without)
    assert len(weights(session)) == 1


@pytest.mark.parametrize(
    "knobs",
    first_tier(
        [
            {"shard_optimizer": "on"},
            {"accumulation_steps": 2, "clip_norm": 0.5},
            {"shard_gradients": "on", "optimizer": "momentum"},
            {"precision": "bf16_weights"},
            {"precision": "fp16", "optimizer": "muon"},
            {"offload_activations": "on", "optimizer": "adamw8bit"},
        ],
        every(6),
    ),
    ids=str,
)
def test_losses_and_weights_are_those_without_it_to_the_bit(
    two_ranks: Session, fresh: Callable[..., Session], knobs: dict[str, Any]
) -> None:
    found = []
    for flips in (("off",) * 3, ("off", "on", "off"), ("on", "on", "off")):
        session = fresh(two_ranks, "text-gpt", **TEXT)
        session.set(batch_size=4, **knobs)
        losses: list[float] = []
        for value in flips:
            session.set(offload_optimizer=value)
            losses += exported.mean_losses(session.train(2)).values()
        found.append((losses, weights(session)))
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) == 1


@pytest.mark.parametrize("steps_before", first_tier([0, 2], every(2)))
def test_too_little_host_memory_on_one_rank_goes_back_and_training_goes_on(
    two_ranks: Session, fresh: Callable[..., Session], steps_before: int
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=4)
    if steps_before:
        session.train(steps_before)
    session.run(SHORT)

    def flip() -> None:
        session.set(offload_optimizer="on")
        session.train(2)

    try:
        with pytest.raises(GpumemError, match=r"Host memory is short.*Use offload_optimizer=off"):
            flip()
    finally:
        session.run("host_pool.available_bytes = known")
    if steps_before:
        assert session.settings.offload_optimizer == "off"
    session.set(offload_optimizer="off")
    assert session.train(2).steps == 2
    session.set(offload_optimizer="on")
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


def test_rank_zeros_state_is_given_to_all_and_cells_see_tensors(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=4, offload_optimizer="on")
    session.train(2)
    session.run(
        """
for kept in optimizer.state.values():
    assert type(kept["exp_avg"]) is torch.Tensor
    kept["exp_avg"].mul_(1 + hvd.rank())
"""
    )
    with pytest.raises(GpumemError, match="different weights"):
        session.train(45)
    session.sync()
    assert session.train(3).steps == 3
    assert len(weights(session)) == 1
    assert (session.memory().frame().host_state_bytes > 2**20).all()


@pytest.mark.full
@pytest.mark.parametrize("shards", first_tier(["on", "off"], every(2)))
def test_it_is_resumed_and_exported(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, shards: str
) -> None:
    session = fresh(two_ranks, "text-gpt", **TEXT)
    session.set(batch_size=4, shard_optimizer=shards, offload_optimizer="on")
    run = session.train(4)
    exported.scripts_train_alike(session, run, tmp_path)
    session.save(tmp_path / "state")
    expected = exported.mean_losses(session.train(2))
    session.resume(tmp_path / "state")
    assert session.settings.offload_optimizer == "on"
    assert exported.mean_losses(session.train(2)) == expected
    assert (session.memory().frame().host_state_bytes > 2**20).all()
    session.set(offload_optimizer="off")
    session.resume(tmp_path / "state")
    assert exported.mean_losses(session.train(2)) == expected
