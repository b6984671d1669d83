"""``shard_gradients`` on real ranks: flipped, predicted, rescued, stored and taken up by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from gpumem_nb.shared.settings import Settings
from tests import exported
from tests.cluster.test_shards import FAILS, NO_ROOM, losses
from tests.conftest import ranks, weights
from tests.tiers import every, first_tier

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODEL = """
import torch
from torch import nn
torch.manual_seed(5)
net = nn.Sequential(*(nn.Linear(350, 350) for _ in range(16)), nn.Linear(350, 5))
net[0].unused = nn.Linear(9, 11)
net[3].requires_grad_(False)
rows = torch.utils.data.TensorDataset(torch.randn(96, 350), torch.randint(0, 5, (96,)))
cost = nn.CrossEntropyLoss()
"""
LAYER = 350 * 351 * 4 + 4096  # bytes of a bucket, of which Horovod's thread may let go a moment after it has arrived


def loaded(session: Session, **knobs: Any) -> Session:
    session.run(MODEL)
    session.attach(model="net", data="rows", loss="cost")
    small = {"batch_size": 4, "clip_norm": 0.5, "bucket_mib": 0.25, "optimizer_impl": "fused"}
    session.set(**Settings(**(small | knobs)).changed_from(session.settings))
    return session


def least_peak(run: Any) -> int:
    """Return the live peak of the step in which Horovod's thread let go of buckets soonest."""
    return int(run.frame().groupby("step").live_peak_bytes.max().min())


@pytest.mark.parametrize(
    "knobs",
    first_tier([{}, {"precision": "fp16", "checkpointing": "blocks"}, {"accumulation_steps": 2}], every(3)),
    ids=["fp32", "fp16", "twice"],
)
def test_a_live_model_is_flipped_both_ways_and_needs_what_was_predicted(
    two_ranks: Session, knobs: dict[str, Any]
) -> None:
    session = loaded(two_ranks, **knobs)
    expected, fingerprint = losses(session, 12), weights(session)
    assert len(fingerprint) == 1

    session = loaded(two_ranks, **knobs)
    found = losses(session, 3)
    peaks: dict[str, int] = {}
    for value in ("on", "off", "on"):
        predicted = session.predict(shard_gradients=value, shard_optimizer="on")
        session.set(shard_gradients=value, shard_optimizer="on")
        run = session.train(3)
        found += exported.mean_losses(run).values()
        came = least_peak(run)
        assert came == pytest.approx(predicted.live_peak_bytes, abs=LAYER)
        peaks[value] = predicted.live_peak_bytes
    assert found == expected
    assert weights(session) == fingerprint
    again = session.predict()
    assert again.live_peak_bytes == pytest.approx(came, abs=LAYER)
    if "accumulation_steps" not in knobs:
        assert peaks["off"] - peaks["on"] > 0.6 * 15 * LAYER / 2  # but for two buckets under way


@pytest.mark.full
def test_it_brings_shared_states_with_it_and_does_not_go_without(two_ranks: Session) -> None:
    session = loaded(two_ranks)
    session.set(shard_gradients="on")
    assert session.settings.shard_optimizer == "on"
    session.set(shard_optimizer="off")
    assert session.settings.shard_gradients == "off"
    with pytest.raises(InvalidInput, match="shard_gradients=on needs shard_optimizer=on"):
        session.set(shard_gradients="on", shard_optimizer="off")
    assert "shard_gradients" in str(session.what_if())


IN_CUT = "import gpumem_nb.engine.step.gradient_shares as it; holder, name = it, 'laid_as'"


def test_memory_that_runs_out_where_gradients_are_cut_leaves_no_trace(two_ranks: Session) -> None:
    session = loaded(two_ranks, shard_gradients="on", shard_optimizer="on")
    expected = losses(session, 6)
    session = loaded(two_ranks, shard_gradients="on", shard_optimizer="on")
    found = losses(session, 3)
    before = weights(session)
    session.run(FAILS.format(what=NO_ROOM, where=IN_CUT))
    with pytest.raises(TrainingFailed, match=r"rank 1 .* in the backward part of the step"):
        session.train(3)
    assert weights(session) == before
    assert found + losses(session, 3) == expected
    assert session.settings.shard_gradients == "on"


def test_a_gradient_that_is_not_finite_is_named_and_a_slow_rank_is_waited_for(two_ranks: Session) -> None:
    session = loaded(two_ranks, shard_gradients="on", shard_optimizer="on")
    session.train(2)
    before = weights(session)
    session.run("hook = net[5].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([300]), torch.inf))")
    with pytest.raises(TrainingFailed, match=r"the gradient of 5.weight became (inf|nan), though the loss is finite"):
        session.train(2)
    assert weights(session) == before
    session.run("hook.remove()")
    session.run(FAILS.format(what="import time; time.sleep(1)", where=IN_CUT))
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


@pytest.mark.full
def test_a_state_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    saved = {value: tmp_path / value for value in ("off", "on")}
    for value, path in saved.items():
        session = loaded(ranks(2), shard_gradients=value, shard_optimizer=value)
        session.train(3)
        session.save(path)
    for count in (1, 4):
        found = []
        for value, path in saved.items():
            session = loaded(ranks(count))
            session.resume(path)
            assert session.settings.shard_gradients == (value if count > 1 else "off")
            found.append((losses(session, 3), weights(session)))
        assert found[0] == found[1]
        assert len(found[0][1]) == 1


def test_a_script_does_without_and_says_so(two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path) -> None:
    session = fresh(two_ranks)
    session.set(shard_gradients="on")
    session.train(1)
    written = session.export(tmp_path / "train.py")
    assert "every rank of a script keeps whole gradients" in str(written)
