"""What is asked between two cells leaves everything as it was: optimizers, weights that forward changes, modes."""

from __future__ import annotations

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import WorkloadError
from tests.conftest import weights
from tests.internals import INSIDE

pytestmark = pytest.mark.cluster

OWN = (
    INSIDE
    + """
from torch import nn
from gpumem_nb.engine.step.ballot import WeightWatch

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))
net[3].requires_grad_(False)
rows = torch.utils.data.TensorDataset(torch.randn(64, 4))

def size(model, batch):
    return model(batch[0]).square().mean()

def state():
    moments = [values for _, values in sorted(optimizer.state_dict()["state"].items())]
    return repr([{name: value.tolist() for name, value in values.items()} for values in moments])

class Averaging(nn.Module):
    # An encoder that is an average of another one, kept up to date in forward: as MoCo, BYOL and DINO do.
    def __init__(self):
        super().__init__()
        self.query, self.key, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.requires_grad_(False)
        self.teacher.requires_grad_(False)
    def forward(self, x):
        for q, k, t in zip(self.query.parameters(), self.key.parameters(), self.teacher.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1
            with torch.no_grad():
                t.mul_(0.9).add_(q, alpha=0.1)
        return (self.query(x) - self.key(x) + self.teacher(x)).tanh()

def remembered(model):
    return [tensor.clone() for tensor in model.state_dict().values()]

compared, original = [], WeightWatch.digest

def digest(watch):
    compared.append(watch)
    return original(watch)
"""
)


@pytest.fixture
def own(two_ranks: Session) -> Session:
    two_ranks.run(OWN)
    two_ranks.attach(model="net", loss="size", data="rows")
    knobs = {"precision": "fp32", "checkpointing": "none", "batch_size": 8, "accumulation_steps": 1}
    two_ranks.set(optimizer="adamw", optimizer_impl="default", learning_rate=1e-3, clip_norm=None, **knobs)
    return two_ranks


@pytest.mark.full
def test_an_optimizer_that_a_cell_has_changed_is_the_same_after_another_was_tried(own: Session) -> None:
    own.train(2)
    own.run("adamw, moments = optimizer, state()")
    own.set(optimizer="sgd", learning_rate=0.1)
    own.run("sgd = optimizer\nsgd.param_groups[0]['weight_decay'] = 5e-4")
    for knobs in ({"optimizer": "momentum"}, {"optimizer": "adamw"}, {"optimizer": "adam", "learning_rate": 1.0}):
        own.predict(**knobs)
        found = own.run("optimizer is sgd, sgd.param_groups[0]['weight_decay'], sgd.param_groups[0]['lr']")
        assert found == [(True, 5e-4, 0.1)] * 2
    own.set(optimizer="adamw", learning_rate=1e-3)
    assert own.run("optimizer is adamw and state() == moments") == [True] * 2, "no step was done meanwhile"


@pytest.mark.full
def test_what_an_optimizer_remembers_outlives_a_trial_after_weights_were_added_to_it(own: Session) -> None:
    own.run("adamw = torch.optim.AdamW(net[0].parameters())")
    own.attach(model="net", loss="size", data="rows", optimizer="adamw")
    own.set(optimizer="adam", learning_rate=1e-3)
    own.train(2)
    own.run("adam, moments, known = optimizer, state(), len(optimizer.state)")
    own.run("net[3].requires_grad_(True)\nadam.add_param_group({'params': [*net[3].parameters()]})")
    for name in ("sgd", "own"):
        own.predict(optimizer=name)
        assert own.run("optimizer is adam and state() == moments") == [True] * 2
    own.train(1)
    added = "len(adam.state) - known, {int(state['step']) for state in adam.state.values()}"
    assert own.run(f"optimizer is adam, {added}") == [(True, 2, {1, 3})] * 2
    assert len(weights(own)) == 1


def test_weights_that_forward_changes_stay_in_a_trial(own: Session) -> None:
    own.run("moco = Averaging()")
    own.attach(model="moco", loss="size", data="rows")
    own.train(2)
    own.run("before = remembered(moco)")
    same = "all(map(torch.equal, remembered(moco), before))"
    own.predict(batch_size=4)
    assert own.run(same) == [True] * 2
    own.timeline()
    assert own.run(same) == [True] * 2
    own.train(1)
    assert own.run(same) == [False] * 2
    own.run("before = remembered(moco)\nmoco.key.register_forward_hook(lambda *_: 1 / 0)")
    with pytest.raises(WorkloadError, match="division by zero"):
        own.predict(batch_size=4)
    assert own.run(same) == [True] * 2


def test_weights_are_compared_in_steps_that_count_and_not_in_trials(own: Session) -> None:
    own.run("WeightWatch.digest = digest")
    try:
        own.predict(batch_size=4)  # before the first step, and after a cell
        assert own.run("len(compared)") == [0, 0]
        own.train(4)
        assert own.run("len(compared)") == [2, 2], "in the first step after a cell, and in the one behind its update"
    finally:
        own.run("WeightWatch.digest = original")


def test_modes_are_what_a_cell_has_made_them_until_training_goes_on(own: Session) -> None:
    training = "[module.training for module in net.modules()]"
    own.train(1)
    for cell, ask in (
        ("net.train()", own.timeline),
        ("net[1].eval()", own.predict),
        ("net.eval()", own.predict),
        ("net[2].train()", own.timeline),
        ("net[3].train()", lambda: own.set(batch_size=4)),
    ):
        own.run(cell)
        before = own.run(training)
        ask()
        assert own.run(training) == before
    own.train(1)
    assert own.run(training) == [[True] * 6] * 2, "training had not begun with what was in evaluation mode meanwhile"
