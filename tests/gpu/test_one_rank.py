"""One rank on a real GPU: what is read of it, its limit, and torch's own snapshot."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from gpumem_nb.session import Session
from gpumem_nb.shared.readings import METRICS
from tests.internals import DEVICE

pytestmark = pytest.mark.gpu
RANKS = 1
MIB = 2**20


def test_live_is_within_reserved_and_reserved_within_the_device(trained: Session) -> None:
    reading = trained.memory().ranks[0].reading
    assert not trained.ranks[0].virtual
    assert reading.live_peak_bytes is not None
    assert reading.reserved_bytes is not None
    assert 0 < reading.live_bytes <= reading.live_peak_bytes
    assert reading.live_bytes <= reading.reserved_bytes
    assert reading.device_used_bytes is None or reading.reserved_bytes < reading.device_used_bytes


def test_live_is_what_tensors_asked_for(trained: Session) -> None:
    ((asked, allocated),) = trained.run(
        "(torch.cuda.memory_stats()['requested_bytes.all.current'], torch.cuda.memory_allocated())"
    )
    reading = trained.memory().ranks[0].reading
    assert reading.live_bytes == asked <= allocated
    trained.run("_held = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)")
    assert trained.memory().ranks[0].reading.live_bytes == asked + 64 * MIB
    trained.run("del _held")


def test_what_lies_on_the_gpu_comes_back_on_the_cpu(trained: Session) -> None:
    trained.run("""
import torch.nn as nn
_far = torch.arange(3.0, device=device)
_layer, _parameter = nn.Linear(2, 1).to(device), nn.Parameter(torch.ones(2, device=device))
""")
    ((tensor, nested, parameter, layer),) = trained.run("(_far, [{'a': _far * 2}], _parameter, _layer)")
    assert tensor.tolist() == [0, 1, 2]
    assert nested[0]["a"].tolist() == [0, 2, 4]
    assert isinstance(parameter, torch.nn.Parameter)
    assert {t.device.type for t in (tensor, nested[0]["a"], parameter, *layer.parameters())} == {"cpu"}
    assert trained.pull("_far")[0].device.type == "cpu"
    assert not torch.cuda.is_initialized(), "CUDA was opened in the notebook's process"
    trained.run("del _far, _layer, _parameter")


def test_nvml_tells_of_the_whole_device_or_why_not(trained: Session) -> None:
    use = trained.memory().ranks[0].device_use
    assert use is not None
    for name in METRICS:
        assert (getattr(use, name) is None) == (name in use.missing), name
    if use.own_bytes is not None:
        (reserved,) = trained.run("torch.cuda.memory_reserved()")
        assert use.own_bytes > reserved, "context and libraries take something"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_every_precision_trains_with_and_without_checkpointing(
    trained: Session, precision: str, checkpointing: str
) -> None:
    trained.set(precision=precision, checkpointing=checkpointing)
    run = trained.train(5)
    assert (run.steps, run.notes) == (5, [])
    assert run.frame()["loss"].notna().all()


def test_the_ledger_adds_up_to_the_peak(trained: Session) -> None:
    trained.train(45)
    recorded = [(sample, sample.ledger) for sample in trained.history.samples()[0] if sample.ledger]
    assert recorded
    for sample, ledger in recorded:
        assert ledger.peak_bytes == sample.live_peak_bytes
        assert 0 <= ledger.peak_bytes - sum(ledger.at_peak.values()) < 0.1 * ledger.peak_bytes, "rounding"
        assert not ledger.virtual


def test_what_an_update_by_torchs_default_takes_is_predicted(trained: Session) -> None:
    """By default an optimizer takes ``foreach`` on CUDA, whose temporary tensors are as large as all weights."""
    trained.load("text-gpt", width=512, depth=6, heads=8, sequence_length=32)
    trained.set(batch_size=1, checkpointing="blocks")
    trained.train(3)
    predicted = trained.predict()
    assert predicted.phase == "update"
    frame = trained.train(4).frame()
    assert predicted.live_peak_bytes == pytest.approx(frame.live_peak_bytes.max(), rel=0.001)
    assert predicted.reserved_peak_bytes == pytest.approx(frame.reserved_peak_bytes.max(), rel=0.005)


def test_a_batch_that_does_not_fit_is_survived(trained: Session) -> None:
    trained.run(f"{DEVICE}.empty_cache()")
    needed = int(trained.train(2).frame().reserved_peak_bytes.max())
    trained.run(f"{DEVICE}.set_limit({needed + 2 * MIB})")
    try:
        trained.set(batch_size=1024)
        run = trained.train(3)
    finally:
        trained.run(f"{DEVICE}.set_limit(None)")
    assert "memory" in run.notes[0]
    assert (run.steps, trained.settings.batch_size) == (3, 32)


def test_a_snapshot_for_torchs_visualiser_holds_a_step(trained: Session, tmp_path: Path) -> None:
    before = trained.history.steps
    path = trained.memory_snapshot(tmp_path / "step.pickle")
    assert trained.history.steps == before, "the step was undone"
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"]
    assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)


def test_what_was_made_before_the_model_moved_moves_with_it(on_gpu: Session) -> None:
    on_gpu.run("""
import torch
from torch import nn
net, temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(4))
own = torch.optim.Adagrad([*net.parameters(), temperature])
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]) * temperature, batch[1])
""")
    on_gpu.attach(model="net", data="data", loss="loss_of", optimizer="own")
    assert on_gpu.train(3).steps == 3
    assert on_gpu.run("sorted({value.device.type for kept in own.state.values() for value in kept.values()})") == [
        ["cpu", "cuda"]  # a counter stays where torch keeps it
    ]
    assert on_gpu.run("(temperature.device.type, bool((temperature != 1).any()))") == [("cuda", True)]
