"""Weights as in a plain loop, bit for bit, whatever you do to the model; and a watch where that fails."""

from __future__ import annotations

import pytest
import torch

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.conftest import weights
from tests.internals import gradients_in_many_pieces
from tests.reference import STATE, Reference

pytestmark = pytest.mark.cluster

NET = """
import torch
from torch import nn
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
features = torch.randn(64, 6)
data = torch.utils.data.TensorDataset(features, features[:, :3].argmax(1))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
"""


class Both:
    """The same on ranks and in the plain loop."""

    def __init__(self, session: Session, code: str, loss: str = "criterion", settings: dict[str, object] | None = None):
        self.session, self.plain = session, Reference(code, 2)
        session.run(code)
        session.attach("net", "data", loss, "optimizer")
        self.set(batch_size=4, **(settings or {}))

    def set(self, **knobs: object) -> None:
        self.session.set(**knobs)
        self.plain.set(**knobs)

    def cell(self, code: str) -> None:
        self.session.run(code)
        self.plain.cell(code)

    def train(self, steps: int = 4) -> None:
        self.session.train(steps)
        self.plain.train(steps)

    def check(self) -> None:
        for on_rank, plain in zip(self.session.run(STATE), self.plain.state(), strict=True):
            assert on_rank.keys() == plain.keys()
            assert [name for name, tensor in plain.items() if not torch.equal(tensor, on_rank[name])] == []


def test_a_layer_unfrozen_in_a_cell_is_averaged(two_ranks: Session) -> None:
    both = Both(two_ranks, NET + "net[0].requires_grad_(False)\n")
    both.train()
    both.cell("net[0].requires_grad_(True)")
    both.train()
    both.check()


def test_a_layer_frozen_in_a_cell_stays_as_it_is(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    both.train()
    both.cell("net[0].requires_grad_(False)\nbefore = net[0].weight.clone()")
    both.train()
    both.check()
    assert two_ranks.run("torch.equal(before, net[0].weight)") == [True, True]


def test_a_layer_frozen_for_a_while_is_averaged_again(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    for trained in (True, False, True):
        both.cell(f"net[0].requires_grad_({trained})")
        both.train()
    both.check()


def test_weights_added_to_the_optimizer_are_averaged(two_ranks: Session) -> None:
    both = Both(two_ranks, NET.replace("AdamW(net.parameters()", "AdamW(net[2:].parameters()"))
    both.train()
    both.cell("optimizer.add_param_group({'params': list(net[0].parameters()), 'lr': 0.02})")
    both.train()
    both.check()


def test_a_layer_without_gradients_is_left_alone(two_ranks: Session) -> None:
    both = Both(
        two_ranks, NET + "net[1].spare = nn.Linear(2, 2)\noptimizer.add_param_group({'params': net[1].parameters()})"
    )
    both.train()
    both.check()


SOMETIMES = """
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)
    def forward(self, x):
        return self.body(x) + self.extra(x) if rank == 1 else self.body(x)
net = Sometimes()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
"""


def test_a_gradient_on_some_ranks_is_averaged_with_zeros_and_said_once(two_ranks: Session) -> None:
    both = Both(two_ranks, NET + SOMETIMES)
    both.train(3)
    both.train(3)
    both.check()
    told = [event.text for event in two_ranks.history.events if "had no gradient" in event.text]
    assert len(told) == 1
    assert "extra.weight" in told[0]


LEARNED = """
class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.temperature, target)
criterion = Warm()
optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1, momentum=0.9)
"""


def test_a_criterion_with_weights_is_trained_like_the_model(two_ranks: Session) -> None:
    both = Both(two_ranks, NET + LEARNED)
    both.train()
    both.cell("for param in criterion.parameters(): param.grad = torch.ones_like(param)")
    both.train()
    both.check()
    assert len(set(two_ranks.run("criterion.temperature.item()"))) == 1


def test_gradients_that_a_cell_leaves_are_not_added(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    both.train()
    two_ranks.run("criterion(net(features), data.tensors[1]).backward()")
    both.train()
    both.check()


REENTRANT = """
from torch.utils.checkpoint import checkpoint
class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.again(y)), x, use_reentrant=True)
        return self.last(self.again(x))
net = Repeated()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


def test_a_gradient_that_comes_in_pieces_leaves_whole(two_ranks: Session) -> None:
    both = Both(two_ranks, NET + REENTRANT)
    with gradients_in_many_pieces(two_ranks):
        two_ranks.attach("net", "data", "criterion", "optimizer")
        two_ranks.set(batch_size=4)
        both.train(6)
        both.check()


def test_weights_that_differ_pause_training_until_they_are_synced(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    both.train()
    two_ranks.run("with torch.no_grad(): net[2].weight[0, 0] += 1e-3", ranks="1")
    with pytest.raises(
        TrainingFailed, match=r"(?s)2\.weight is not the same on rank 1.*cell ran on rank 1 alone.*%hvd_sync"
    ):
        two_ranks.train(2)
    with pytest.raises(TrainingFailed, match=r"2\.weight"):
        two_ranks.train(2)
    assert two_ranks.history.rescue
    two_ranks.sync()
    assert not two_ranks.history.rescue, "the card goes"
    both.train()
    both.check()


def test_what_a_cell_did_to_the_optimizer_of_one_rank_is_noticed_beside_another_change(two_ranks: Session) -> None:
    both = Both(two_ranks, NET.replace("AdamW(net.parameters()", "AdamW(net[2:].parameters()"))
    both.train()
    two_ranks.run("""
optimizer.add_param_group({'params': list(net[0].parameters())})
if rank == 1:
    optimizer.state[net[2].weight]['exp_avg'] += 1e-3
""")  # the first attempt at the next step is undone, because other weights are trained
    with pytest.raises(TrainingFailed, match="the ranks hold different weights"):
        two_ranks.train(5)
    two_ranks.sync()


def test_a_learning_rate_that_differs_is_noticed_and_synced(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    both.train()
    two_ranks.run("optimizer.param_groups[0]['lr'] = 0.5", ranks="1")
    with pytest.raises(TrainingFailed, match="the ranks hold different weights"):
        two_ranks.train(50)
    two_ranks.sync()
    assert two_ranks.train(3).steps == 3
    assert len(weights(two_ranks)) == 1
    assert two_ranks.run("optimizer.param_groups[0]['lr']") == [0.01, 0.01]


def test_weights_that_no_optimizer_has_are_named(two_ranks: Session) -> None:
    both = Both(two_ranks, NET)
    both.train()
    both.cell("torch.manual_seed(9)\nnet[4] = nn.Linear(8, 3)")
    with pytest.raises(TrainingFailed, match=r"4\.weight came into the model .*add_param_group"):
        two_ranks.train(1)
    both.cell("optimizer.add_param_group({'params': net[4].parameters()})")
    both.train()
    both.check()


def test_an_embedding_with_max_norm_that_no_module_shows_is_named(two_ranks: Session) -> None:
    two_ranks.run("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(50, 8)), nn.Linear(8, 1)
    def forward(self, x):
        return self.out(nn.functional.embedding(x, self.table, max_norm=1.0)).mean(1)
torch.manual_seed(0)
net, loss = Net(), nn.MSELoss()
rows = torch.utils.data.TensorDataset(torch.randint(0, 50, (96, 4)), torch.randn(96, 1))
""")
    two_ranks.attach(model="net", data="rows", loss="loss")
    two_ranks.set(batch_size=4)
    with pytest.raises(TrainingFailed, match=r"forward itself writes table, and on each rank something else.*max_norm"):
        two_ranks.train(1)
    assert len(weights(two_ranks)) == 1
