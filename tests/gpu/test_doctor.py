"""What the doctor finds that only a real GPU shows: its allocator, its other processes, and its fp16."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator

import pytest

from gpumem_nb.session import Session
from tests.cluster.doctor_plants import MIB, PLANTS, planted
from tests.gpu.conftest import another_process
from tests.internals import DEVICE

pytestmark = pytest.mark.gpu
RANKS = 1
GROWING = """
def loss(model, batch):
    for mib in range(11, 25, 2):
        torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    return model(batch[0]).square().mean()
"""


@pytest.fixture
def patient(on_gpu: Session, fresh: Callable[..., Session]) -> Iterator[Session]:
    """A rank after a few steps, whose limit is put back."""
    fresh(on_gpu).train(5)
    yield on_gpu
    on_gpu.run(f"loss = net = rows = None; {DEVICE}.empty_cache(); {DEVICE}.set_limit(None)")


def causes(session: Session) -> list[str]:
    return [one.cause for one in session.doctor().findings]


def test_another_process_is_found_while_it_is_there(patient: Session) -> None:
    use = patient.memory().ranks[0].device_use
    if use is None or use.other_bytes is None or not use.total_bytes:
        pytest.skip("NVML does not tell here what other processes hold")
    if "other processes on the device" in causes(patient):
        pytest.skip("somebody else uses this GPU")
    size = int(use.total_bytes) // 10
    with another_process(size):
        [found] = [one for one in patient.doctor().findings if one.cause == "other processes on the device"]
        others = found.evidence["others_bytes"]
        assert isinstance(others, int)
        assert others >= size
    assert "other processes on the device" not in causes(patient)


def test_what_torch_has_cached_is_found_until_it_is_given_back(patient: Session) -> None:
    patient.run(f"{DEVICE}.empty_cache(); {DEVICE}.set_limit({2048 * MIB})")
    patient.run(f"held = torch.empty({1024 * MIB}, dtype=torch.uint8, device=device)")
    assert "free memory in the cache" not in causes(patient), "it is live"
    patient.run(f"held = None; held = torch.empty({1024 * MIB}, dtype=torch.uint8, device=device); held = None")
    [found] = [one for one in patient.doctor().findings if one.cause == "free memory in the cache"]
    assert "%hvd_memory --free" in found.do
    patient.free()
    assert "free memory in the cache" not in causes(patient)


@pytest.mark.skipif(
    bool(os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")),
    reason="torch's allocator is set otherwise, and may not fragment",
)
def test_tensors_that_fit_into_no_gap_fragment_torchs_own_allocator(patient: Session) -> None:
    planted(patient, dataclasses.replace(PLANTS["tensors that fit into no gap"], code=GROWING))
    [found] = [one for one in patient.doctor().findings if one.cause == "fragmentation"]
    reserved, live = found.evidence["reserved_peak_bytes"], found.evidence["live_peak_bytes"]
    assert isinstance(reserved, int)
    assert isinstance(live, int)
    assert reserved - live > 60 * MIB


def test_a_loss_too_large_for_fp16_is_found_and_bf16_mends_it(patient: Session) -> None:
    planted(patient, PLANTS["a loss too large for fp16"])
    [found] = [one for one in patient.doctor().findings if one.cause == "fp16 scale collapses"]
    assert found.flip
    assert found.flip.changes == {"precision": "bf16"}
    patient.set(**found.flip.changes, learning_rate=1e-15)  # or the planted loss sends the weights to infinity
    patient.train(4)
    assert "fp16 scale collapses" not in causes(patient)
