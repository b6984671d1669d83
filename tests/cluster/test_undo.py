"""Undoing and questions leave training exactly as it would have been without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster

CHANNELS_LAST = """
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
net = nn.Sequential(net, nn.Flatten(), nn.Linear(8, 2)).to(memory_format=torch.channels_last)
opt = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
rows = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 2, (64,)))
loss = nn.CrossEntropyLoss()
"""

QUERY_AND_KEY = """
from torch import nn
torch.manual_seed(0)
class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.bound = 2.0
    def forward(self, x):
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters()):
                k.data = 0.9 * k.data + 0.1 * q.data
            self.query.weight.data.clamp_(-0.3, 0.3)
        return (self.query(x) * self.key(x)).sum(1)
net = Moco()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
held_out = torch.utils.data.TensorDataset(torch.randn(13, 8))
loss = lambda net, batch: net(batch[0]).square().mean()
"""

ALL = "[t.tolist() for t in net.state_dict().values()]"


def attach(session: Session, code: str, **named: str) -> None:
    session.run_cell(code, title="<model>")
    session.attach(model="net", loss="loss", data="rows", optimizer="opt", **named)
    session.set(batch_size=4)


def losses_of(session: Session, steps: int) -> list[float]:
    losses: list[float] = session.train(steps).frame().sort_values(["rank", "step"]).loss.tolist()
    return losses


@pytest.mark.parametrize("ask", first_tier(["predict", "what_if"], every(2)))
def test_a_question_about_another_optimizer_leaves_moments_with_their_weights(two_ranks: Session, ask: str) -> None:
    losses = []
    for asks in (False, True):
        two_ranks.run_cell(CHANNELS_LAST, title="<model>")
        two_ranks.attach(model="net", loss="loss", data="rows")
        two_ranks.set(batch_size=4, optimizer="adam", optimizer_impl="fused")
        two_ranks.train(4)
        if asks:
            _ = two_ranks.predict(optimizer="sgd") if ask == "predict" else two_ranks.what_if()
        losses.append(losses_of(two_ranks, 6))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("again", first_tier(["attach", "sync", "resume", "a flip there and back"], every(2)))
def test_moments_of_a_channels_last_net_stay_with_their_weights(two_ranks: Session, again: str, tmp_path: Path) -> None:
    losses = []
    for does in (False, True):
        attach(two_ranks, CHANNELS_LAST)
        two_ranks.train(4)
        if does and again == "attach":
            two_ranks.attach(model="net", loss="loss", data="rows", optimizer="opt")
            two_ranks.set(batch_size=4)
        elif does and again == "sync":
            two_ranks.sync()
        elif does and again == "resume":
            two_ranks.save(tmp_path / "state")
            two_ranks.train(2)
            two_ranks.resume(tmp_path / "state")
        elif does:
            two_ranks.set(optimizer="sgd")
            two_ranks.set(optimizer="own")
        strides = two_ranks.run("[opt.state[p]['exp_avg'].stride() == p.stride() for p in net.parameters()]")
        assert strides == [[True] * 6] * 2
        losses.append(losses_of(two_ranks, 6))
        states = two_ranks.run("[opt.state[p]['exp_avg'].tolist() for p in net.parameters()]")
        assert states[0] == states[1]
    if again != "attach":  # by which the order of the data begins anew
        assert losses[0] == losses[1]


def test_an_evaluation_leaves_weights_that_forward_writes_as_they_were(two_ranks: Session) -> None:
    attach(two_ranks, QUERY_AND_KEY, eval_data="held_out")
    two_ranks.set(batch_size=2)
    two_ranks.train(2)
    for _ in range(2):
        before = two_ranks.run(ALL)
        two_ranks.evaluate()
        assert two_ranks.run(ALL) == before
        two_ranks.train(2)
    assert two_ranks.run(ALL)[0] == two_ranks.run(ALL)[1]


@pytest.mark.parametrize(
    "change", ["net.e.weight.data.flip(0)", "net.e.weight.data.roll(1)", "-net.e.weight.data", "net.e.weight.data.t()"]
)
def test_a_frozen_weight_whose_rows_moved_on_one_rank_is_named_in_the_next_step(
    two_ranks: Session, change: str
) -> None:
    code = (
        "from torch import nn\ntorch.manual_seed(0)\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.e, self.out = nn.Embedding(16, 16).requires_grad_(False), nn.Linear(16, 1)\n"
        "    def forward(self, x):\n"
        "        return self.out(self.e(x))\n"
        "net = Net()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "rows = torch.utils.data.TensorDataset(torch.arange(64) % 16)\n"
        "loss = lambda net, batch: net(batch[0]).square().mean()\n"
    )
    attach(two_ranks, code)
    two_ranks.train(2)
    two_ranks.run(f"net.e.weight.data = {change}.contiguous()", ranks=[1])
    with pytest.raises(TrainingFailed, match=r"e\.weight is not the same on rank 1 as on rank 0"):
        two_ranks.train(1)
    two_ranks.sync()
    two_ranks.train(1)


def test_an_update_that_raises_for_what_a_cell_has_set_is_undone_as_a_whole(two_ranks: Session) -> None:
    attach(two_ranks, CHANNELS_LAST.replace("AdamW(net.parameters(), lr=0.01, fused=True", "Adam(net.parameters()"))
    two_ranks.train(4)
    counts = "[int(state['step']) for state in opt.state.values()], " + ALL
    before = two_ranks.run(counts)
    two_ranks.run("opt.param_groups[0]['betas'] = (0.9, None)")
    with pytest.raises(TrainingFailed):
        two_ranks.train(1)
    assert two_ranks.run(counts) == before
    two_ranks.run("opt.param_groups[0]['betas'] = (0.9, 0.999)")
    assert two_ranks.train(2).frame().step.max() == 6


def test_an_undone_step_leaves_weights_that_its_forward_wrote(two_ranks: Session) -> None:
    attach(two_ranks, QUERY_AND_KEY)
    two_ranks.train(4)
    for _ in range(2):
        before = two_ranks.run(ALL)
        two_ranks.run("hook = net.query.weight.register_hook(lambda grad: 1 / 0)", ranks=[1])
        with pytest.raises(TrainingFailed):
            two_ranks.train(1)
        assert two_ranks.run(ALL) == before
        two_ranks.run("hook.remove()", ranks=[1])
        two_ranks.train(1)


def test_a_question_about_a_model_with_a_frozen_dataclass_leaves_the_weights(two_ranks: Session) -> None:
    config = "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Config:\n    a: int = 1\n"
    kept = "self.config, self.stats = Config(), (torch.zeros(1), torch.zeros(1))"
    code = config + QUERY_AND_KEY.replace("self.bound = 2.0", kept)
    attach(two_ranks, code)
    two_ranks.train(3)
    before = two_ranks.run(ALL)
    two_ranks.predict(batch_size=8)
    assert two_ranks.run(ALL) == before
    assert two_ranks.check_sync().ok
    two_ranks.train(1)
