"""The loss that a model returns by itself: over the tokens of a whole step in training, and of each batch elsewhere."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpumem_nb.engine.attach import as_loss
from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone


class Tokens(nn.Module):
    """Has its loss as transformers' models for masked tokens do."""

    loss_type = "ForMaskedLM"
    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        how = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(self.table(ids).flatten(0, 1), labels.flatten(), reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


def sentences(count: int, length: int) -> list[dict[str, Tensor]]:
    return [{"ids": torch.full((length,), row % 8), "labels": torch.full((length,), 1)} for row in range(count)]


def test_an_evaluation_divides_by_its_own_tokens() -> None:
    losses = []
    for steps in (0, 1):
        data, held_out = stream_of(sentences(16, 5), 0, 1), as_held_out(sentences(8, 3))
        workload = Workload("tokens", Tokens, lambda: None, as_loss(None))
        trainer = Trainer(workload, data, opened(), time.time(), held_out)
        settings = Settings(batch_size=4, accumulation_steps=2, optimizer="sgd", learning_rate=1e-12)
        assert trainer.run(Chunk(settings, 1, steps)).failure is None
        evaluated = trainer.run(Chunk(settings, 1, 0, evaluate=True)).evaluated
        assert evaluated is not None
        losses.append(evaluated.sums["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_model_without_labels_and_without_a_loss_is_told_to_name_one() -> None:
    pair = [torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)]
    with pytest.raises(WorkloadError, match=r"given the whole micro-batch, a list of 2.* Name the loss, e.g. loss="):
        as_loss(None)(nn.Linear(3, 4), pair)
