"""Every link between ranks keeps the same promises; here threads and a rank by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.link.communicator import Communicator, Separated, Single, here, used_by_thread
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.link_promises import PROMISES, who_leaves_ends_the_wait_of_the_others_and_all_join_again
from tests.threads import Meeting
from tests.unit.test_one_rank import loss, rows

Promise = Callable[[Communicator], None]
each = pytest.mark.parametrize("promise", PROMISES, ids=[promise.__name__ for promise in PROMISES])


@each
@pytest.mark.parametrize("ranks", [2, 4])
def test_threads(promise: Promise, ranks: int) -> None:
    Meeting(ranks).run(promise)


@each
def test_a_rank_by_itself(promise: Promise) -> None:
    promise(Single())


def test_threads_come_apart_and_join_again() -> None:
    Meeting(3).run(who_leaves_ends_the_wait_of_the_others_and_all_join_again)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    def alone(link: Communicator) -> None:
        if link.rank == 0:
            link.any_rank(True, "alone")

    with pytest.raises(Separated):
        Meeting(2, timeout_s=0.1).run(alone)


def test_a_rank_by_itself_copies_nothing() -> None:
    link, mine = Single(), torch.ones(4)
    link.all_reduce([mine], "sum")
    assert link.all_gather(mine, "gather") is mine
    assert link.reduce_scatter(mine, "scatter") is mine
    assert torch.equal(mine, torch.ones(4))
    link.check()


class Net(nn.Module):
    """With a sparse table and weights in 16 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x[:, 0].abs() * 7).long().clamp(0, 7))
        last: Tensor = self.last(self.narrow(found.bfloat16()).float())
        return last


@pytest.mark.parametrize("knobs", [{}, {"compression": "fp16"}, {"reduction": "sum"}], ids=str)
def test_one_rank_trains_as_a_plain_loop_to_the_bit(knobs: dict[str, str]) -> None:
    torch.manual_seed(1)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    with used_by_thread(Single()):
        own = torch.optim.SGD(net.parameters(), lr=0.1)
        workload = Workload("small", lambda: net, rows, loss, optimizer=lambda params: own)
        trainer = Trainer(workload, ShardedStream(*as_dataset(rows()), rank=0, size=1), opened(), time.time())
        settings = trainer.live.settings.replace(batch_size=4, **knobs)
        assert trainer.run(Chunk(settings, 1, 5)).failure is None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss(plain, [torch.ones(4, 4)]).backward()
        optimizer.step()
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name


def test_ranks_that_are_threads_train_alike() -> None:
    settings = Settings(batch_size=2, optimizer="sgd", learning_rate=0.1, bucket_mib=1e-6)

    def train(link: Communicator) -> list[Tensor]:
        assert here() is link
        stream = ShardedStream(*as_dataset(rows()), rank=link.rank, size=link.size)
        trainer = Trainer(Workload("small", lambda: nn.Linear(4, 4), rows, loss), stream, opened(), time.time())
        trainer.join()
        assert trainer.run(Chunk(settings, 1, 3)).failure is None
        return [param.detach().clone() for param in trainer.live.model.parameters()]

    one, other = Meeting(2).run(train)
    assert all(map(torch.equal, one, other))
