"""Weights that no module has, handed to the optimizer that the toolkit built."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import rows, stream


@pytest.mark.parametrize("flipped", [False, True])
def test_a_weight_added_to_the_toolkits_optimizer_is_trained_like_the_others(flipped: bool) -> None:
    scale = nn.Parameter(torch.ones(2))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        output: Tensor = model(batch[0]).mean()
        return output + scale.sum()

    trainer = Trainer(Workload("loose", lambda: nn.Linear(4, 4), rows, loss), stream(), opened(), time.time())
    settings = Settings(batch_size=2, optimizer="sgd", learning_rate=0.125)
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    trainer.live.optimizer.add_param_group({"params": [scale]})
    if flipped:
        settings = settings.replace(optimizer="momentum")
        trainer.run(Chunk(settings, 2, 1))
        settings = settings.replace(optimizer="sgd")
        scale.data.fill_(1)
    assert trainer.run(Chunk(settings, 3, 4)).failure is None
    assert scale.tolist() == [0.5, 0.5]  # a gradient of 1 in each step, none of which lasts
    assert scale.grad is None
    assert "optimizer.2" in dict(trainer.live.parts.named_parameters())
    scale.register_hook(lambda gradient: gradient * torch.inf)
    reply = trainer.run(Chunk(settings, 3, 1))
    assert reply.failure is not None
    assert "the gradient of optimizer.2 became inf" in reply.failure.message
