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


# 4 GiB of weights, and as much of gradients.
LARGER = (
    LARGE.replace("range(16)", "range(64)").replace("loss(model", "_loss(model")
    + f"""
import optparse
plan = optparse.Values(dict(strikes=False, hog=None))  # which an undone step leaves alone
def loss(model, batch):
    output = _loss(model, batch)
    if plan.strikes and rank == 1 and model[0].weight.grad is not None:
        plan.strikes = False
        torch.cuda.empty_cache()
        plan.hog = torch.empty(torch.cuda.mem_get_info()[0] - {200 * MIB}, dtype=torch.uint8, device=device)
        torch.empty(2**40, dtype=torch.uint8, device=device)
    return output
"""
)


SUMS = "[int(p.detach().view(torch.int32).sum()) for p in net.parameters()]"


def test_a_rescue_works_with_gradients_of_gigabytes_and_200_mib_free(on_gpu: Session) -> None:
    if (on_gpu.memory().ranks[0].reading.limit_bytes or 0) < 2**35:
        pytest.skip("needs a GPU of 32 GiB for two ranks")
    on_gpu.run_cell(LARGER + "data = Rows()")
    on_gpu.attach(model="net", data="data", loss="loss", optimizer="optimizer")
    on_gpu.set(batch_size=8, accumulation_steps=2)
    assert on_gpu.train(1).steps == 1
    before = on_gpu.run(SUMS)
    on_gpu.run("plan.strikes = True")
    with pytest.raises(TrainingFailed, match=r"rank [01] ran out of memory in the \w+ part of the step"):
        on_gpu.train(1)
    on_gpu.run("plan.hog, plan.strikes = None, False")
    assert on_gpu.run(SUMS) == before
    assert on_gpu.train(1).steps == 1
    one, other = on_gpu.run(SUMS)
    assert one == other
