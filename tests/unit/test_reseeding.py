"""Another seed before the first step that counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import SimpleQueue

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import tried


class Noise(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randn(32, 4)


def test_samples_that_were_read_for_a_step_that_was_undone_are_not_those_of_the_new_seed() -> None:
    seen = SimpleQueue[list[list[float]]]()  # a list would be put back with the step that is undone

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.put(batch.tolist())
        output: Tensor = model(batch)
        return output.square().mean()

    settings = Settings(batch_size=4)
    for trials in (0, 1):
        stream = stream_of(Noise(), 0, 1, seed=5)
        trainer = Trainer(Workload("noise", lambda: nn.Linear(4, 4), Noise, loss), stream, opened(), time.time())
        if trials:
            assert tried(trainer, settings) is None
        assert trainer.reseed(7)
        assert trainer.run(Chunk(settings, 2, 1)).failure is None
    of_the_seed, of_the_trial, again = (seen.get() for _ in range(3))
    assert again == of_the_seed != of_the_trial
