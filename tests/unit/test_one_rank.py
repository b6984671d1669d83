"""One rank of several, driven alone: the others always send what it sends."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpumem_nb.engine import building, cells
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.link.signals import held_back, take_over
from gpumem_nb.engine.step.ballot import NUMBERS
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.step.trials import NO_CONFIGURATION
from gpumem_nb.memory.device import Device, opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.knobs import KNOBS, Knob, LiveModel, register
from gpumem_nb.shared.messages import Chunk, Failure, Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.values import whole
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard, overheard


class DeviceFault(Exception):
    """Of a device that fails where nobody expects it."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("has no words")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    """A rank that a test drives alone."""
    return overheard(monkeypatch)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    output: Tensor = model(batch[0])
    return output.square().mean()


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(64, 4))


def workload() -> Workload:
    return Workload("small", lambda: nn.Linear(4, 4), rows, loss)


@pytest.fixture
def device() -> Device:
    return opened()


def stream() -> ShardedStream:
    return ShardedStream(*as_dataset(rows()), rank=0, size=1)


@pytest.fixture
def trainer(device: Device) -> Trainer:
    return Trainer(workload(), stream(), device, time.time())


def tried(trainer: Trainer, settings: Settings) -> Failure | None:
    """Take a step under other settings and undo it, as questions do."""
    chunk = Chunk(settings, NO_CONFIGURATION, 1, trial=True)
    with trainer.aside(settings), trainer.trying(chunk) as why_not:
        return trainer.try_step(why_not, chunk).failure


def hooks(model: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def weights(trainer: Trainer) -> list[Tensor]:
    return [param.detach().clone() for param in trainer.live.model.parameters()]


def test_what_fails_while_the_ballot_is_made_is_this_ranks_vote(
    trainer: Trainer, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 1)).failure is None  # the update asks for room under proven settings
    before = weights(trainer)

    def no_room() -> int | None:
        raise DeviceFault("an illegal memory access")

    monkeypatch.setattr(device, "room", no_room)
    reply = trainer.run(Chunk(settings, 1, 3))
    assert reply.failure is not None
    assert (reply.failure.phase, reply.failure.message) == ("reduction", "DeviceFault: an illegal memory access")
    assert [sample.event for sample in reply.samples] == ["error"]
    assert all(map(torch.equal, weights(trainer), before))


def test_memory_is_looked_at_anew_after_a_cell_and_holds_nothing_of_what_ran_before(
    trainer: Trainer, device: Device
) -> None:
    def train(size: int, settings_id: int, steps: int = 4) -> list[Sample]:
        return list(trainer.run(Chunk(Settings(batch_size=size), settings_id, steps, ledger_steps=1000)).samples)

    def recorded(samples: list[Sample]) -> list[bool]:
        return [one.ledger is not None for one in samples]

    first = train(2, 1)
    assert recorded(first) == [True, True, False, False]
    assert recorded(train(2, 1)) == [False] * 4
    torch.ones(8 << 20).mul(2)  # 64 MiB of what a cell makes and lets go of
    cells.one_more()
    after = train(2, 1)
    assert recorded(after) == [True, True, False, False]
    torch.ones(8 << 20).mul(2)
    assert device.reading().reserved_bytes > first[-1].reserved_peak_bytes
    other = train(4, 2)
    for samples in (after, other):
        assert samples[-1].reserved_peak_bytes <= first[-1].reserved_peak_bytes
    assert all(one.reserved_peak_bytes >= one.live_peak_bytes for one in (*first, *after, *other))


class UpdatesVotedOn:
    """Steps of a trainer, and whether all ranks were asked if the update of one had failed."""

    def __init__(self, link: Overheard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(link, "any_rank", self._vote)

    def _vote(self, flag: bool, name: str) -> bool:
        self.asked.append(name)
        return flag

    def in_step(self, trainer: Trainer, settings: Settings) -> bool:
        self.asked.clear()
        assert trainer.run(Chunk(settings, 1, 1)).failure is None
        return "update" in self.asked


def test_cached_segments_are_room_for_an_update(
    trainer: Trainer, device: Device, alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = UpdatesVotedOn(alone, monkeypatch)

    def voted() -> bool:
        return updates.in_step(trainer, Settings(batch_size=2))

    device.set_limit(2**30)
    try:
        assert voted(), "under settings that nothing is known of"
        assert not voted()
        cached = torch.empty(30 * 2**20, dtype=torch.uint8)
        device.empty_cache()
        device.set_limit(device.reading().reserved_bytes)
        assert voted(), "nothing is left"
        del cached
        assert not voted(), "what a tensor has left in the cache can be used"
    finally:
        device.set_limit(None)


def test_an_update_that_makes_the_optimizers_state_can_be_undone(
    trainer: Trainer, device: Device, alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, settings = UpdatesVotedOn(alone, monkeypatch), Settings(batch_size=2, precision="fp16")
    trainer.live.replace_scaler(trainer.live.scaler.state_dict() | {"scale": 2.0**30, "backoff_factor": 2.0**-20})
    device.set_limit(2**30)
    try:
        voted, timed = list[tuple[bool, int]](), list[bool]()
        for _ in range(3):
            voted.append((updates.in_step(trainer, settings), len(trainer.live.optimizer.state)))
            timed.append(trainer.update_times.of(settings) is not None)
    finally:
        device.set_limit(None)
    assert voted == [(True, 0), (True, 2), (False, 2)], "the first one was skipped by the loss scale"
    assert timed == [False, False, True], "nor is its time that of an update"


def test_an_update_with_the_first_gradient_of_a_weight_can_be_undone(device: Device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table, self.calls = nn.Linear(4, 4), nn.Embedding(2, 4, sparse=True), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            output: Tensor = self.linear(x)
            return output + self.table(torch.zeros(len(x), dtype=torch.long)) if self.calls > 2 else output

    def own(params: object) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": net.linear.parameters()}, {"params": net.table.parameters()}])

    net, settings = Net(), Settings(optimizer="own", learning_rate=1e-3, batch_size=2)
    device.set_limit(2**30)
    try:
        trainer = Trainer(Workload("late", lambda: net, rows, loss, optimizer=own), stream(), device, time.time())
        assert trainer.run(Chunk(settings, 1, 2)).failure is None
        before = net.linear.weight.detach().clone()
        failure = trainer.run(Chunk(settings, 1, 1)).failure
    finally:
        device.set_limit(None)
    assert failure is not None
    assert "does not support sparse gradients" in failure.message
    assert torch.equal(net.linear.weight, before)


def test_an_exception_without_words_is_a_failure_like_any_other(device: Device) -> None:
    def failing(model: nn.Module, batch: list[Tensor]) -> Tensor:
        raise Unspeakable

    trainer = Trainer(Workload("small", lambda: nn.Linear(4, 4), rows, failing), stream(), device, time.time())
    reply = trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    assert reply.failure is not None
    assert (reply.failure.phase, reply.failure.message) == ("forward", "Unspeakable: Unspeakable")


def test_an_interrupt_while_a_bucket_is_sent_sends_it_once(device: Device, alone: Overheard) -> None:
    sent = []

    def interrupted(name: str, tensors: object) -> None:
        sent.append(name)
        if len(sent) == 1:
            signal.raise_signal(signal.SIGINT)

    alone.on_send = interrupted
    trainer = Trainer(workload(), stream(), device, time.time())
    before = signal.getsignal(signal.SIGINT)
    try:
        take_over(SimpleNamespace())
        with held_back():
            reply = trainer.run(Chunk(Settings(batch_size=2, bucket_mib=1e-6), 1, 1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.phase) == ("interrupted", "backward")
    assert sent == ["gpumem_nb.bucket.0", "gpumem_nb.bucket.1"]


def test_what_fails_in_the_reduction_ends_the_waiting_of_all_ranks_and_is_told(
    trainer: Trainer, alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []

    def failing(name: str, tensors: object) -> None:
        raise DeviceFault("gone")

    monkeypatch.setattr(alone, "leave", left.append)
    before = weights(trainer)
    alone.on_send = failing
    reply = trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    assert reply.failure is not None
    assert (reply.failure.phase, reply.failure.message) == ("reduction", "DeviceFault: gone")
    assert left == ["reduction of a step"]
    assert all(map(torch.equal, weights(trainer), before))
    assert all(param.grad is None for param in trainer.live.model.parameters())
    alone.on_send = lambda name, tensors: None
    assert trainer.run(Chunk(Settings(batch_size=2), 2, 1)).failure is None


@pytest.fixture
def breaking() -> Iterator[None]:
    """A knob that cannot be applied with another value than its default."""

    def apply(live: LiveModel, settings: Settings) -> None:
        if settings.breaking > 1:
            raise WorkloadError("this cannot be")

    register(Knob("breaking", 1, "", parse=whole, allowed="a whole number", apply=apply))
    yield
    del KNOBS["breaking"]


@pytest.mark.usefixtures("breaking")
def test_settings_applied_in_part_are_taken_back(trainer: Trainer) -> None:
    good, bad = Settings(batch_size=2), Settings(batch_size=2, precision="bf16", breaking=2)
    trainer.run(Chunk(good, 1, 1))
    reply = trainer.run(Chunk(bad, 2, 1))
    assert reply.failure is not None
    assert [(sample.event, sample.settings_id) for sample in reply.samples] == [("error", 2)]
    assert trainer.live.settings.precision == "bf16"
    assert trainer.run(Chunk(good, 1, 1)).failure is None
    assert trainer.live.settings == good


def test_a_default_device_of_a_cells_is_for_what_people_make(device: Device) -> None:
    losses = []
    for default in (None, "meta"):
        torch.manual_seed(0)
        handed = ShardedStream(*as_dataset((np.ones((64, 4), dtype=np.float32), np.arange(64))), rank=0, size=1)
        trainer = Trainer(workload(), handed, device, time.time())
        torch.set_default_device(default)
        try:
            replies = [
                trainer.run(Chunk(Settings(batch_size=2, optimizer=name), number, 2))
                for number, name in enumerate(("adamw", "sgd"), start=1)
            ]
        finally:
            torch.set_default_device(None)
        assert [reply.failure for reply in replies] == [None, None]
        losses.append([sample.loss for reply in replies for sample in reply.samples])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dropped", ["another rank failed", "other models"])
def test_a_trainer_that_is_dropped_leaves_no_hooks(
    dropped: str, device: Device, alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    attached = Workload("attached", lambda: model, rows, loss)
    trainer = building.build(attached, stream(), device, time.time())
    assert trainer is not None
    assert hooks(model) == 2
    trainer.close()
    if dropped == "another rank failed":
        monkeypatch.setattr(alone, "any_rank", lambda vote, about: True)
        assert building.build(attached, stream(), device, time.time()) is None
    else:
        monkeypatch.setattr(alone, "numbers", lambda own, about: [list(own), [one + 1 for one in own]])
        with pytest.raises(WorkloadError, match="hold different models"):
            building.build(attached, stream(), device, time.time())
    assert hooks(model) == 0


def test_a_weight_that_a_cell_gave_another_shape_is_refused(trainer: Trainer) -> None:
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    next(trainer.live.model.parameters()).data = torch.zeros(6, 4)
    cells.one_more()
    failure = trainer.run(Chunk(settings, 1, 1)).failure
    assert failure is not None
    assert "weight has shape (6, 4) now and had (4, 4)" in failure.message


@pytest.mark.parametrize("change", ["group['lr'] = None", "del group['lr']", "group['params'].clear()"])
def test_groups_that_a_cell_has_broken_are_refused_and_can_be_left(trainer: Trainer, change: str) -> None:
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    exec(change, {"group": trainer.live.optimizer.param_groups[0]})
    cells.one_more()
    failure = trainer.run(Chunk(settings, 1, 1)).failure
    assert failure is not None
    assert re.search("learning rate of the optimizer's group 0 is None|no weights left to train", failure.message)
    trainer.close()


def test_what_a_rank_that_failed_has_sent_is_not_blamed_on_the_gradients_of_others(
    device: Device, alone: Overheard
) -> None:
    def other_failed(name: str, tensors: Any) -> None:
        for tensor in tensors:
            if tensor.numel() > NUMBERS and tensor.dim() == 1 and tensor.dtype is torch.float32 and tensor[0] == 0:
                tensor[0] = 1
            elif name.startswith("gpumem_nb.bucket"):
                tensor.fill_(math.inf)

    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    trainer = Trainer(Workload("net", lambda: net, rows, loss), stream(), device, time.time())
    alone.on_send, before = other_failed, weights(trainer)
    reply = trainer.run(Chunk(Settings(batch_size=2, bucket_mib=0.00001), 1, 1))
    assert reply.failure is None
    assert [sample.step for sample in reply.samples] == [0]
    assert all(map(torch.equal, weights(trainer), before))
