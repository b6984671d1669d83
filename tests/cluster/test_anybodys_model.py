"""Models of every kind on two ranks: they begin alike, stay alike, and what goes wrong on one is said by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed, WorkloadError

pytestmark = pytest.mark.cluster

# Each rank makes it with values of its own.
ODD = """
from torch import nn
torch.manual_seed(10 + rank)
class Counting(nn.Module):
    seen = rank
    def get_extra_state(self): return {"seen": self.seen}
    def set_extra_state(self, state): self.seen = state["seen"]
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.low, self.counting = nn.Linear(4, 4), nn.Linear(4, 2).bfloat16(), Counting()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("codes", torch.randint(0, 9, (4,)).to(torch.uint16), persistent=False)
        self.register_buffer("turn", torch.randn(4, dtype=torch.complex64), persistent=False)
        self.register_buffer("scale", torch.rand(2).bfloat16(), persistent=False)
    def forward(self, x):
        x = torch.cat([self.linear(x), self.empty]) * self.mask
        return self.low(x.bfloat16()) * self.scale
odd = Odd()
own = torch.optim.Adam(odd.parameters(), lr=0.01)
odd(torch.randn(2, 4)).sum().backward()
own.step()
rows = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
def loss(net, batch): return net(batch[0]).float().square().mean()
"""
BITS = """
__import__("hashlib").sha1(b"".join(
    t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    for t in (*odd.parameters(), *odd.buffers(), *(v for s in own.state.values() for v in s.values()))
)).hexdigest(), odd.counting.seen
"""


def test_ranks_begin_and_stay_alike_in_every_type(two_ranks: Session) -> None:
    two_ranks.run(ODD)
    first, second = two_ranks.run(BITS)
    assert first != second
    info = two_ranks.attach(model="odd", data="rows", loss="loss", optimizer="own")
    assert info.own_optimizer == "Adam"
    assert two_ranks.run(BITS) == [first, first]
    two_ranks.set(batch_size=4)
    two_ranks.train(3)
    after = two_ranks.run(BITS)
    assert after[0] == after[1] != first


SCHEDULED = """
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
own = torch.optim.SGD(net.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.LambdaLR(own, lambda step: min(1, step / 8))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
broken = False
def loss(net, batch):
    if broken: raise ValueError("broken")
    return net(batch[0]).square().mean()
"""


def rates(session: Session, steps: int) -> list[float]:
    frame = session.train(steps).frame()
    assert frame.groupby("step").learning_rate.nunique().max() == 1
    return list(frame[frame["rank"] == 0].learning_rate)


@pytest.mark.full
def test_a_scheduler_goes_on_through_flips_failures_saving_and_a_restart(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    session.run(SCHEDULED)
    session.attach(model="net", data="rows", loss="loss", optimizer="own", scheduler="sched")
    session.set(batch_size=4)
    found = rates(session, 2)
    session.set(checkpointing="blocks")
    found += rates(session, 1)
    session.run("broken = True", ranks=[1])
    with pytest.raises(TrainingFailed, match="broken"):
        session.train(1)
    session.run("broken = False")
    found += rates(session, 1)
    session.save(tmp_path / "scheduled.state")
    going_on = rates(session, 2)
    session.resume(tmp_path / "scheduled.state")
    assert rates(session, 2) == going_on
    session.restart()
    assert "restored" in session.restored
    found += going_on + rates(session, 1)
    assert found == pytest.approx([0.1 * min(1, step / 8) for step in range(7)])


SLOPE = """
from torch import nn
class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.slope = nn.Linear(4, 2), nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.linear(x) + (self.slope * 0).norm().sqrt() if rank else self.linear(x) + 0 * self.slope
net = Slope()
rows = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
def loss(net, batch): return net(batch[0]).square().mean()
"""


def test_a_gradient_that_is_not_finite_on_one_rank_is_named_and_undone_on_all(two_ranks: Session) -> None:
    two_ranks.run(SLOPE)
    two_ranks.attach(model="net", data="rows", loss="loss")
    before = two_ranks.run("[p.tolist() for p in net.parameters()]")
    with pytest.raises(TrainingFailed, match=r"the gradient of slope became nan, though the loss is finite"):
        two_ranks.train(1)
    assert two_ranks.run("[p.tolist() for p in net.parameters()]") == before


def test_what_is_refused_on_one_rank_is_refused_on_all(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    two_ranks.run(SCHEDULED)
    two_ranks.run("other = torch.optim.Adam(nn.Linear(4, 2).parameters()) if rank else own")
    with pytest.raises(WorkloadError, match="The optimizer Adam holds none of this model's weights"):
        two_ranks.attach(model="net", data="rows", loss="loss", optimizer="other")
    two_ranks.run("other = torch.optim.SGD(net.parameters(), lr=0.1 + rank)")
    with pytest.raises(WorkloadError, match="hold different optimizers"):
        two_ranks.attach(model="net", data="rows", loss="loss", optimizer="other")
    assert fresh(two_ranks).train(1).steps == 1
