"""Evaluation on a rank: exact over all of them, and everything afterwards as it was."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gpumem_nb.engine.attach import attached
from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import Device, opened
from gpumem_nb.report.run_summary import Evaluation
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.knobs import KNOBS, Knob, LiveModel, register
from gpumem_nb.shared.messages import Chunk, ChunkReply
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard, overheard


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    """Every rank is asked by itself, and hears that no other has failed."""
    link = overheard(monkeypatch)
    link.keeps = False
    return link


@pytest.fixture
def device() -> Device:
    return opened()


MODES = SimpleQueue[bool]()
"""Whether modules were in training mode when they were called; a list would be put back with all else."""


def modes() -> set[bool]:
    """Those since the last time."""
    return {MODES.get() for _ in range(MODES.qsize())}


class Net(nn.Module):
    """Has whatever evaluation could leave changed: dropout, statistics, a counter, a frozen part in eval mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(6).eval()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        MODES.put(self.training)
        noise = 0.0 * torch.rand(1) * random.random() * float(np.random.rand())
        result: Tensor = self.out(self.drop(self.norm(self.frozen(x))))
        return result + noise.to(result.dtype)


def samples(count: int, seed: int = 1) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=numbers), torch.randint(0, 3, (count,), generator=numbers))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    right: Tensor = model(batch[0]).argmax(1) == batch[1]
    return right.double().mean()


def trainer(
    device: Device,
    held_out: Any = None,
    metric: Callable[..., Any] | None = None,
    rank: int = 0,
    size: int = 1,
    loss: Callable[..., Any] = loss,
) -> Trainer:
    workload = Workload("w", Net, lambda: samples(64), loss, metric=metric)
    stream = stream_of(samples(64), rank, size)
    return Trainer(workload, stream, device, time.time(), None if held_out is None else as_held_out(held_out))


def evaluated(one: Trainer, **settings: Any) -> ChunkReply:
    return one.run(Chunk(Settings(**({"batch_size": 4} | settings)), 1, 0, evaluate=True))


@pytest.mark.parametrize(("count", "ranks"), [(23, 1), (23, 2), (23, 3), (1, 2), (2, 4)])
def test_the_mean_over_all_ranks_is_that_of_the_whole_dataset(count: int, ranks: int, device: Device) -> None:
    data = samples(count)
    replies = [evaluated(trainer(device, data, accuracy, rank, ranks)) for rank in range(ranks)]
    found = Evaluation.of_ranks(replies)
    assert found is not None
    torch.manual_seed(0)
    plain = Net().eval()
    with torch.no_grad():
        inputs, labels = data.tensors
        whole_loss = cross_entropy(plain(inputs).double(), labels).item()
        right = (plain(inputs).argmax(1) == labels).double().mean().item()
    assert found.samples == count
    assert found.loss == pytest.approx(whole_loss, rel=1e-6)
    assert found.metrics == {"accuracy": pytest.approx(right, abs=1e-12)}


def state(one: Trainer) -> list[Any]:
    model = one.live.model
    return [
        [tensor.clone() for tensor in model.state_dict().values()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    ]


def test_everything_is_as_it_was_before(device: Device) -> None:
    one = trainer(device, samples(23), accuracy)
    one.run(Chunk(Settings(batch_size=4), 1, 2))
    model: Any = one.live.model
    model.frozen.eval()
    modes()
    weights, *others = state(one)
    assert evaluated(one).failure is None
    weights_after, *others_after = state(one)
    assert all(map(torch.equal, weights, weights_after))
    assert torch.equal(others[1], others_after[1])
    assert others[0] == others_after[0]
    assert others[2:] == others_after[2:]
    assert modes() == {False}
    assert all(param.grad is None for param in model.parameters())
    assert one.evaluator is not None
    assert one.evaluator.changed == "a buffer"


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"checkpointing": "blocks"}])
def test_training_goes_on_as_without_an_evaluation(settings: dict[str, Any], device: Device) -> None:
    def losses(**chunk: Any) -> list[float | None]:
        one = trainer(device, samples(23), accuracy)
        found: list[float | None] = []
        while len(found) < 6:
            reply = one.run(Chunk(Settings(batch_size=4, **settings), 1, 6 - len(found), **chunk))
            assert reply.failure is None
            found += [sample.loss for sample in reply.samples]
        return found

    assert losses(eval_every=2) == losses()


def test_automatic_evaluations_end_their_chunks_at_their_steps(device: Device) -> None:
    one = trainer(device, samples(5))
    settings = Settings(batch_size=4)
    replies = [one.run(Chunk(settings, 1, 5, eval_every=3)) for _ in range(3)]
    assert [len(reply.samples) for reply in replies] == [3, 3, 3]
    assert [reply.evaluated.step for reply in replies if reply.evaluated] == [3, 6, 9]
    without = trainer(device).run(Chunk(settings, 1, 5, eval_every=3))
    assert (len(without.samples), without.evaluated) == (5, None)


def test_evaluation_runs_under_the_precision_of_the_moment(device: Device) -> None:
    kinds: list[torch.dtype] = []

    def noting(model: nn.Module, batch: list[Tensor]) -> dict[str, float]:
        output = model(batch[0])
        kinds.append(output.dtype)
        assert not torch.is_grad_enabled()
        return {"mean": output.float().mean().item(), "largest": np.float32(output.float().max())}

    reply = evaluated(trainer(device, samples(5), noting), precision="bf16")
    assert reply.evaluated is not None
    assert set(kinds) == {torch.bfloat16}
    assert set(reply.evaluated.sums) == {"loss", "mean", "largest"}


def test_peaks_of_an_evaluation_are_its_own(device: Device) -> None:
    def large(model: nn.Module, batch: list[Tensor]) -> float:
        return float(torch.ones(8 * 2**20).sum())

    gc.collect()  # what earlier tests have left in circles is not to go between two steps
    one = trainer(device, samples(5), large)
    before = one.run(Chunk(Settings(batch_size=4), 1, 3)).samples[-1]
    reply = evaluated(one)
    after = one.run(Chunk(Settings(batch_size=4), 1, 1)).samples[-1]
    assert reply.evaluated is not None
    assert reply.evaluated.live_peak_bytes > 32 * 2**20 > before.live_peak_bytes
    assert after.live_peak_bytes == pytest.approx(before.live_peak_bytes, abs=64)  # the losses of more steps are kept


class Counting(nn.CrossEntropyLoss):
    """A criterion with a buffer and modes of its own."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.scale *= 2
        MODES.put(self.training)
        return super().forward(outputs, targets)


def test_a_criterion_with_state_of_its_own_is_left_as_it_was_too(device: Device) -> None:
    there = {"net": Net(), "data": samples(9), "criterion": (criterion := Counting())}
    workload = attached({"model": "net", "data": "data", "loss": "criterion"}, there)
    one = trainer(device, samples(9), loss=workload.loss)
    modes()
    assert evaluated(one).failure is None
    assert (criterion.scale.item(), criterion.training, modes()) == (1.0, True, {False})


def test_a_metric_that_is_a_module_evaluates_too_and_is_left_as_it_was(device: Device) -> None:
    names = {"model": "net", "data": "data", "loss": "criterion", "eval_data": "data", "metric": "metric"}
    there = {"net": Net(), "data": samples(9), "criterion": nn.CrossEntropyLoss(), "metric": (metric := Counting())}
    workload = attached(names, there)
    one = trainer(device, samples(9), workload.metric)
    modes()
    assert evaluated(one).failure is None
    assert (metric.scale.item(), metric.training, modes()) == (1.0, True, {False})


class Bad(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise ValueError("a broken file")
        return samples(9)[index]


def no_number(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


def other_names(model: nn.Module, batch: Any) -> dict[str, float]:
    return {f"of_{len(batch[0])}": 1.0}


@pytest.mark.parametrize(
    ("data", "metric", "message"),
    [
        (Bad(), None, "ValueError: a broken file"),
        (samples(9), no_number, r"metric 'no_number' must be one number .* a Tensor of shape \(4, 3\)"),
        (samples(9), other_names, "gave of_1 for one micro-batch and of_4 for another"),
        (samples(9), lambda model, batch: {"loss": 1.0}, "may not call a number 'loss'"),
    ],
)
def test_a_failing_evaluation_is_this_ranks_failure_and_leaves_all_as_it_was(
    data: Any, metric: Any, message: str, device: Device
) -> None:
    one = trainer(device, data, metric)
    before = state(one)
    reply = evaluated(one)
    assert reply.evaluated is None
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.phase) == ("error", "evaluation")
    assert re.search(message, reply.failure.message)
    after = state(one)
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert one.run(Chunk(Settings(batch_size=4), 1, 1)).failure is None


def test_running_out_of_memory_in_an_evaluation_names_the_module(device: Device) -> None:
    one = trainer(device, samples(5))
    one.run(Chunk(Settings(batch_size=4), 1, 1))

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    hook = one.live.model.get_submodule("norm").register_forward_pre_hook(short)
    reply = evaluated(one)
    hook.remove()
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.phase) == ("oom", "evaluation")
    assert reply.failure.asked_bytes == 2**30


def test_a_rank_whose_settings_failed_takes_part_in_the_vote(device: Device, alone: Overheard) -> None:
    one = trainer(device, samples(5))
    asked: list[float] = []
    alone.on_send = lambda name, tensors: asked.append(tensors[0].item())
    reply = evaluated(one, optimizer="own")  # the workload brings none
    assert reply.failure is not None
    assert reply.failure.phase == "settings"
    assert asked == [1.0]


def test_what_another_rank_failed_in_gives_nothing(device: Device, alone: Overheard) -> None:
    one = trainer(device, samples(5))
    alone.on_send = lambda name, tensors: tensors[0].add_(1)
    reply = evaluated(one)
    assert (reply.evaluated, reply.failure) == (None, None)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_loader_brings_its_dataset_its_subset_and_how_it_collates() -> None:
    data = samples(7)

    def collate(rows: list[Any]) -> Any:
        return rows

    for loader in (DataLoader(data, 3), DataLoader(data, 3, shuffle=True, drop_last=True)):
        assert as_held_out(loader).dataset is data
    assert len(as_held_out((torch.ones(5, 2), torch.ones(5)))) == 5
    assert as_held_out(DataLoader(data, 2, collate_fn=collate)).collate is collate
    part = as_held_out(DataLoader(data, 2, sampler=SubsetRandomSampler([5, 1, 3]))).dataset
    assert isinstance(part, Subset)
    assert part.indices == [1, 3, 5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(samples(7), 2, sampler=WeightedRandomSampler([1.0] * 7, 9)),
            "WeightedRandomSampler.*more than once",
        ),
        (DataLoader(samples(7), batch_size=None), "eval_data: .* brings micro-batches of its own"),
        (DataLoader(samples(7), batch_sampler=[[1, 2], [3]]), r"eval_data: .*batch sampler \(list\)"),
        (Endless(), "eval_data: .* can only be iterated"),
        (DataLoader(Endless(), 2), "eval_data: .* can only be iterated"),
        (5, "eval_data: .* has neither"),
        ([], "eval_data: .* is empty"),
    ],
)
def test_what_cannot_be_seen_exactly_once_is_refused(data: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        as_held_out(data)


def test_an_attached_metric_is_called_as_losses_are(device: Device) -> None:
    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    def both(model: nn.Module, batch: list[Tensor]) -> dict[str, float]:
        return {"a": 1.0, "b": 2.0}

    names = {"model": "net", "data": "data", "loss": "criterion", "eval_data": "data"}
    there = {"net": Net(), "data": samples(9), "criterion": nn.CrossEntropyLoss(), "right": right, "both": both}
    for name, expected in (("right", {"right"}), ("both", {"a", "b"})):
        workload = attached(names | {"metric": name}, there)
        assert workload.eval_data is not None
        assert workload.eval_data() is there["data"]
        assert workload.metric is not None
        assert set(workload.metric(there["net"], [torch.ones(2, 6), torch.zeros(2)])) == expected
    assert attached({"model": "net", "data": "data"}, there).eval_data is None
    with pytest.raises(WorkloadError, match="The metric must be callable; this is a TensorDataset"):
        attached(names | {"metric": "data"}, there)


def test_a_knob_may_put_another_loss_in_place_for_steps_and_evaluations(device: Device) -> None:
    def apply(live: LiveModel, settings: Settings) -> None:
        live.loss = (lambda model, batch: 2 * loss(model, batch)) if settings.doubled else loss

    register(Knob("doubled", False, "twice the loss", parse=bool, allowed="on or off", apply=apply))
    try:
        found = []
        for doubled in (True, False):
            one = trainer(device, samples(23))
            reply = one.run(Chunk(Settings(batch_size=4, learning_rate=0.0, doubled=doubled), 1, 1, eval_every=1))
            assert reply.evaluated
            found.append((reply.samples[0].loss or 0.0, reply.evaluated.sums["loss"]))
    finally:
        del KNOBS["doubled"]
    assert found[0] == pytest.approx([2 * figure for figure in found[1]], rel=1e-6)
