"""Each epoch holds each sample exactly once over all ranks, whatever is flipped on the way."""

from __future__ import annotations

import pytest

from gpumem_nb.session import Session

pytestmark = pytest.mark.cluster

COUNTING = """
import torch
from torch import nn

seen = []

class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 101
    def __getitem__(self, index):
        seen.append(index)
        return torch.tensor([float(index)])

numbers = Numbered()
line = nn.Linear(1, 1)

def squared(model, batch):
    return model(batch).square().mean() * 1e-6
"""


def test_every_sample_once_an_epoch_while_batches_change(two_ranks: Session) -> None:
    session = two_ranks
    session.run(COUNTING)
    session.attach(model="line", data="numbers", loss="squared")
    session.run("del seen[:]")  # what attaching looked at
    consumed = 0
    for batch_size, accumulation_steps, steps in ((4, 1, 5), (3, 2, 4), (10, 1, 3), (5, 3, 2)):
        session.set(batch_size=batch_size, accumulation_steps=accumulation_steps)
        session.train(steps)
        consumed += batch_size * accumulation_steps * steps * 2
    per_rank = session.run("seen")
    assert sum(len(indices) for indices in per_rank) == consumed
    # Put the ranks' runs back into the global order: step by step, rank 0's part before rank 1's.
    order: list[int] = []
    cursor = 0
    for batch_size, accumulation_steps, steps in ((4, 1, 5), (3, 2, 4), (10, 1, 3), (5, 3, 2)):
        for _ in range(steps):
            size = batch_size * accumulation_steps
            for indices in per_rank:
                order.extend(indices[cursor : cursor + size])
            cursor += size
    assert consumed > 101, "the test must cross an epoch"
    assert sorted(order[:101]) == list(range(101))
    assert sorted(order[101:202]) == list(range(101))
    assert order[:20] != list(range(20))
    assert order[101:121] != order[:20], "the second epoch must be shuffled afresh"


def test_a_discarded_step_loses_no_sample(two_ranks: Session) -> None:
    session = two_ranks
    session.run(COUNTING + "\nfail = False\n")
    session.run(
        """
def sometimes(model, batch):
    if fail:
        raise RuntimeError("not today")
    return model(batch).square().mean() * 1e-6
"""
    )
    session.attach(model="line", data="numbers", loss="sometimes")
    session.run("del seen[:]")
    session.set(batch_size=4, accumulation_steps=1)
    session.train(2)
    before = session.run("list(seen)")
    session.run("fail = rank == 1")
    with pytest.raises(Exception, match="rank 1 failed in the forward part of the step: RuntimeError: not today"):
        session.train(1)
    session.run("fail = False; del seen[:]")
    session.train(1)
    after = session.run("list(seen)")
    both = [first + second for first, second in zip(before, after, strict=True)]
    assert len({index for indices in both for index in indices}) == 2 * 12
