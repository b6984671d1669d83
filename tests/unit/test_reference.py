"""What everything is held against, held against a loop without ranks."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.reference import Reference, epoch_order

CODE = """
import torch
from torch import nn
torch.manual_seed(7 + rank)
x, y = torch.arange(40.0).reshape(20, 2) / 40, torch.arange(20) % 2
net = nn.Linear(2, 2)
data = torch.utils.data.TensorDataset(x, y)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.mark.parametrize(("batch_size", "count"), [(4, 1), (2, 2)])
def test_ranks_together_are_one_loop_over_the_whole_batch(batch_size: int, count: int) -> None:
    reference = Reference(CODE, size=2)
    reference.set(batch_size=batch_size, accumulation_steps=count)
    losses = reference.train(5)

    variables: dict[str, object] = {"rank": 0}
    exec(CODE, variables)
    net, data, optimizer = (variables[name] for name in ("net", "data", "optimizer"))
    assert isinstance(net, nn.Linear)
    assert isinstance(data, TensorDataset)
    assert isinstance(optimizer, torch.optim.SGD)
    order = epoch_order(0, 0, data, None) + epoch_order(0, 1, data, None)
    for step, per_rank in enumerate(losses):
        inputs, targets = next(iter(DataLoader(data, 8, sampler=order[8 * step : 8 * step + 8])))
        loss = nn.functional.cross_entropy(net(inputs), targets)
        assert sum(per_rank) / 2 == pytest.approx(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first, second = reference.state()
    assert torch.equal(first["net.weight"], second["net.weight"])
    torch.testing.assert_close(first["net.weight"], net.weight.detach())


def test_nobody_elses_random_numbers_are_drawn() -> None:
    before = [torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())]
    Reference(f"import random\n{CODE}\nrandom.random()\ntorch.rand(3)", size=2).train(2)
    assert before == [torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())]
