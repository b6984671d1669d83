"""Where the time of a step goes on real GPUs, what moves it, and a trace: two ranks, on one GPU or on two."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from gpumem_nb.session import Session
from gpumem_nb.shared.questions import SWEEP_BYTES
from gpumem_nb.shared.step_times import PARTS
from tests.conftest import weights

pytestmark = pytest.mark.gpu
RANKS = 2
RMS_NORM = """
norm = torch.nn.RMSNorm(1024, device=device)
rows = torch.randn(4096, 1024, device=device, requires_grad=True)
before = torch.cuda.memory_allocated()
normed = norm(rows)
held_bytes = torch.cuda.memory_allocated() - before
del norm, rows, normed
"""


def test_the_parts_of_a_step_sum_to_it(trained: Session) -> None:
    frame = trained.train(20).frame()
    parts = sum(frame[f"{part}_s"] for part in PARTS)
    assert (parts / frame.step_s).between(0.99, 1.01).all()
    assert (frame.forward_s > 0).all()
    assert (frame.backward_s > 0).all()
    assert (frame.hidden_s <= frame.backward_s).all(), "known on a GPU, too"
    assert (frame.hidden_s >= 0).all()


def test_small_buckets_travel_while_the_device_is_at_backward(trained: Session) -> None:
    trained.load("text-gpt", width=512, depth=8, heads=8, sequence_length=256)
    trained.set(batch_size=16, bucket_mib=1)
    trained.train(3)
    frame = trained.train(6).frame()
    assert (frame.hidden_s > 0.05 * frame.backward_s).all(), "the last layers' gradients leave long before the first's"


def test_gradients_travel_alike_under_every_knob(trained: Session) -> None:
    knobs: list[dict[str, object]] = [{"compression": "fp16"}, {"bucket_mib": 0.25}, {"fusion_threshold_mib": 2}]
    knobs += [{"cycle_time_ms": 5}, {"cache_capacity": 0}]
    for changes in knobs:
        trained.set(**changes)
        assert trained.train(3).steps == 3
        assert len(weights(trained)) == 1


def test_autotune_ends_and_leaves_all_ranks_alike(trained: Session) -> None:
    trained.set(autotune="on")
    for _ in range(60):
        trained.train(20)
        if not trained.policy.autotune:
            break
    assert trained.history.autotuned
    assert len(weights(trained)) == 1


def test_some_ranks_take_steps_alone_and_all_join_again(trained: Session) -> None:
    report = trained.scaling(steps=8)
    assert [one.ranks for one in report.measured] == [1, 2]
    assert trained.run("hvd.size()") == [RANKS] * RANKS
    assert trained.train(2).steps == 2


def test_the_network_is_timed(trained: Session) -> None:
    seconds = trained.check_network().seconds
    assert list(seconds) == list(SWEEP_BYTES[: len(seconds)])
    assert all(took > 0 for took in seconds.values())


def test_a_trace_has_kernels_of_every_rank(trained: Session, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    trained.trace(path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = {event["pid"] for event in events if event.get("cat") == "kernel"}
    assert len(kernels) == RANKS


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="by its formula before torch 2.9")
def test_rms_norm_keeps_one_number_a_row(trained: Session) -> None:
    trained.run(RMS_NORM)
    assert trained.pull("held_bytes") == [4096 * 1024 * 4 + 4096 * 4] * RANKS
