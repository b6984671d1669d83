"""What a rank sends of its gradients, when what is trained changes between steps."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
from torch import Tensor

from gpumem_nb.engine import cells
from gpumem_nb.engine.step import reduction
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import stream, workload

SETTINGS = Settings(batch_size=2)


def test_a_layer_that_was_frozen_for_a_while_is_averaged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(tensors: list[Tensor], **_: object) -> int:
        sent.append(len(tensors))
        return 1

    monkeypatch.setattr(hvd, "grouped_allreduce_async_", send)
    trainer = Trainer(workload(), stream(), opened(), time.time())
    for trained in (True, False, True):
        trainer.live.model.get_parameter("weight").requires_grad_(trained)
        assert trainer.run(Chunk(SETTINGS, 1, 2)).failure is None
        assert sent[-1] == 2 + trained  # weight, bias, ballot


def test_a_hook_that_a_cell_adds_changes_a_gradient_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def send(tensors: list[Tensor], **_: object) -> int:
        sent.extend(tensor.abs().max().item() for tensor in tensors[:-1])  # without the ballot
        return 1

    monkeypatch.setattr(hvd, "grouped_allreduce_async_", send)
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 1)  # every gradient leaves as soon as it is there
    trainer = Trainer(workload(), stream(), opened(), time.time())
    assert trainer.run(Chunk(SETTINGS, 1, 1)).failure is None
    assert max(sent) > 1e-6

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-1e-6, 1e-6)

    for param in trainer.live.parameters:
        param.register_post_accumulate_grad_hook(clamp)
    sent.clear()
    cells.one_more()
    assert trainer.run(Chunk(SETTINGS, 1, 1)).failure is None
    assert max(sent) <= 1.1e-6
