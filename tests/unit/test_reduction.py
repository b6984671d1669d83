"""What a rank sends of its gradients, when what is trained changes between steps."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
from torch import Tensor

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
