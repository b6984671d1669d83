"""Ranks on a GPU that refuses memory where a real one would: rescues, returns and what stays reserved afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.conftest import load_afresh, weights
from tests.internals import COLLECT, DEVICE
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster
MIB = 2**20
# 40 MiB of weights, so 40 of gradients.
MODEL = """
import optparse, torch
from torch import nn
torch.manual_seed(3)
net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))
rows = torch.utils.data.TensorDataset(torch.randn(64, 1024))
plan = optparse.Values(dict(fault=None, left=0))
def strike():
    plan.fault, fault = None, plan.fault
    driver = _gpu.driver_of_device
    _gpu.empty_cache()
    driver.take(driver.mem_get_info()[0] - plan.left)
    if fault == "memory":
        torch.empty(2**30, dtype=torch.uint8)
    driver.take(2**30)
def loss(model, batch):
    output = model(batch[0])
    if plan.fault is not None and rank == 1 and model[0].weight.grad is not None:
        strike()
    return output.square().mean()
"""


@pytest.fixture
def gpu(two_ranks: Session) -> Iterator[Session]:
    """Ranks on GPUs of 512 MiB."""
    two_ranks.run("from tests import simulated_cuda; _gpu = simulated_cuda.put_in(512 * 2**20)")
    yield two_ranks
    two_ranks.run("simulated_cuda.take_out(); net = rows = None")
    load_afresh(two_ranks)


@pytest.fixture
def trained(gpu: Session) -> Session:
    gpu.run(MODEL)
    gpu.attach(model="net", data="rows", loss="loss")
    gpu.set(batch_size=4, accumulation_steps=2, optimizer="sgd", learning_rate=0.001, bucket_mib=4)
    gpu.train(3)
    gpu.run(COLLECT)
    return gpu


@pytest.mark.parametrize(
    ("fault", "left_mib"), first_tier([("memory", 0), ("library", 0), ("memory", 1), ("library", 1)], every(4))
)
def test_a_rescue_needs_no_more_than_the_gradients_that_it_lets_go(trained: Session, fault: str, left_mib: int) -> None:
    """As with gradients of 8 GB and 200 MB free: a fortieth of them is left.

    Those of the first micro-batch are there when the second one fails.
    """
    before = weights(trained)
    trained.run(f"plan.fault, plan.left = {fault!r}, {left_mib} * 2**20")
    began_s = trained.history.now_s()
    with pytest.raises(TrainingFailed, match="rank 1 ran out of memory in the forward part of the step"):
        trained.train(2)
    assert "stall" not in [event.kind for event in trained.history.events if event.time_s >= began_s]
    assert weights(trained) == before
    trained.run("_gpu.driver_of_device.give(_gpu.driver_of_device.taken)")
    assert trained.train(3).steps == 3
    assert len(weights(trained)) == 1


def test_the_cache_is_emptied_before_training_goes_back(trained: Session) -> None:
    """A library that asks the device itself finds the memory that the failed step has left in the cache."""
    trained.run(
        """
_handle = _gpu.driver_of_device
def loss(model, batch):
    output = model(batch[0])
    if len(batch[0]) > 4 and rank == 1:
        kept = torch.empty(_handle.mem_get_info()[0] // 2, dtype=torch.uint8)
        del kept  # cached now
        torch.empty(2**30, dtype=torch.uint8)
    if len(batch[0]) == 4:
        half = _handle.mem_get_info()[1] // 3
        _handle.take(half)
        _handle.give(half)
    return output.square().mean()
"""
    )
    trained.attach(model="net", data="rows", loss="loss")
    trained.set(batch_size=4, accumulation_steps=1, optimizer="sgd", learning_rate=0.001)
    assert trained.train(2).steps == 2
    trained.set(batch_size=8)
    run = trained.train(4)
    assert "rank 1 ran out of memory" in run.notes[0]
    assert (run.steps, trained.settings.batch_size) == (4, 4), run.notes
    assert len(weights(trained)) == 1


WORDS = {"width": 32, "depth": 2, "heads": 2, "sequence_length": 64}


@pytest.mark.full
def test_training_at_the_largest_batch_goes_on_whatever_comes(gpu: Session) -> None:
    session = load_afresh(gpu, "text-gpt", **WORDS)
    session.run("_gpu.set_limit(160 * 2**20)")
    session.set(batch_size=4, optimizer="adamw")
    session.train(3)
    largest = session.largest_batch()
    session.set(batch_size=largest)
    assert largest > 16
    run = session.train(20)
    assert (run.steps, session.settings.batch_size) == (20, largest), run.notes
    frame = run.frame()
    assert frame.reserved_peak_bytes.max() <= 160 * MIB
    assert frame.reserved_peak_bytes.max() > 120 * MIB, "it was near the limit"
    session.run("_cell = torch.empty(2**20, dtype=torch.uint8)")
    run = session.train(8)
    assert (run.steps, session.settings.batch_size) == (8, largest), run.notes
    session.run("del _cell")
    session.set(batch_size=largest + largest // 3)
    run = session.train(8)
    assert "ran out of memory" in run.notes[0]
    assert (run.steps, session.settings.batch_size) == (8, largest), run.notes
    assert session.train(8).steps == 8
    session.set(batch_size=4)
    session.train(2)
    reserved = session.run(f"{DEVICE}.reading().reserved_bytes")
    assert max(reserved) < 60 * MIB, "what the larger one needed went back to the device"
    assert session.free().bytes >= 0
    assert len(weights(session)) == 1


@pytest.mark.full
def test_predictions_are_right_though_steps_are_recorded_by_their_tensors(gpu: Session) -> None:
    session = load_afresh(gpu, "text-gpt", **WORDS)
    session.set(batch_size=8, optimizer="adamw")
    session.train(3)
    assert all(session.run("len(_gpu.event_log().begin([]).layout) > 0")), "it is known where everything lies"
    for flip in ({"batch_size": 16}, {"checkpointing": "blocks"}, {"optimizer": "sgd"}):
        predicted = session.predict(**flip)
        before = session.settings
        session.set(**flip)
        frame = session.train(3).frame()
        assert predicted.live_peak_bytes == pytest.approx(frame.live_peak_bytes.max(), rel=0.02)
        assert predicted.high_bytes >= frame.reserved_peak_bytes.max()
        assert predicted.reserved_peak_bytes == pytest.approx(frame.reserved_peak_bytes.max(), abs=2 * MIB)
        session.set(**{knob: getattr(before, knob) for knob in flip})
