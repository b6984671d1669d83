"""A GPU that another process has filled: ranks say what a step lacks, and train on when there is room."""

from __future__ import annotations

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.conftest import weights
from tests.gpu.conftest import another_process

pytestmark = pytest.mark.gpu
RANKS = 2
MIB = 2**20
LEFT = 400 * MIB  # by the other process: less than the gradients
# 1 GiB of weights, whose gradients do not find room.
LARGE = """
import torch
from torch import nn
net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16))).to(device)
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.full((4096,), index / 4096)
def loss(model, batch):
    return model(batch).square().mean()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
"""


def test_a_rank_without_room_for_its_gradients_says_so_and_goes_on(on_gpu: Session) -> None:
    on_gpu.run_cell(LARGE + "data = Rows()")
    on_gpu.attach(model="net", data="data", loss="loss", optimizer="optimizer")
    on_gpu.set(batch_size=8)
    assert on_gpu.train(3).steps == 3
    on_gpu.free()
    with another_process(leaving=LEFT), pytest.raises(TrainingFailed, match="ran out of memory"):
        on_gpu.train(2)
    assert on_gpu.train(3).steps == 3
    assert len(weights(on_gpu)) == 1
