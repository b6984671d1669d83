"""Memory that training keeps from step to step is noticed and named on the rank, and told once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gpumem_nb.sample import Leak
from gpumem_nb.session import Session

pytestmark = pytest.mark.cluster

MODEL = """
from collections import deque
from torch import nn
class Net(nn.Module):
    seen = {}
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)
        self.keep = lambda x: None
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        self.keep(x)
        return self.head(x)
net = Net()
rows = torch.utils.data.TensorDataset(torch.randn(256, 16))
"""


@dataclass(frozen=True)
class Case:
    """A leak that is planted: the code, and by what name, from where and with which advice it must be told."""

    code: str
    name: str
    made_at: str
    fix: str
    holder: str = ""


CASES = {
    "losses with their graphs": Case(
        """
losses = []
def loss(model, batch):
    value = model(batch[0]).square().mean()
    losses.append(value)
    return value
""",
        name="losses",
        made_at=":4 in loss",
        fix="tensor.detach()",
        holder="in the notebook's variables on the rank",
    ),
    "losses of which no backward frees the graph": Case(
        """
history = {"train": []}
def loss(model, batch):
    out = model(batch[0])
    history["train"].append((out - 1).abs().mean())
    return out.square().mean()
""",
        name="history['train']",
        made_at=" in loss",
        fix="tensor.detach()",
    ),
    "a metric without detach": Case(
        """
total = 0
def loss(model, batch):
    global total
    out = model(batch[0])
    total = total + (out - 1).square().mean()
    return out.square().mean()
""",
        name="total",
        made_at=":6 in loss",
        fix="add tensor.item()",
    ),
    "hidden states of a module": Case(
        """
net.hidden = []
net.keep = net.hidden.append
def loss(model, batch):
    return model(batch[0]).square().mean()
""",
        name="model.hidden",
        made_at=" in Net.forward",
        fix="tensor.detach()",
    ),
    "outputs in a dict": Case(
        """
outputs = {}
def loss(model, batch):
    out = model(batch[0])
    outputs[len(outputs)] = {"out": out.detach().repeat(1, 64)}
    return out.square().mean()
""",
        name="outputs",
        made_at=":5 in loss",
        fix="Delete entries",
    ),
    "graphs retained": Case(
        """
graphs = []
def loss(model, batch):
    out = model(batch[0])
    side = out.exp().mean()
    torch.autograd.grad(side, out, retain_graph=True)
    graphs.append(side)
    return out.square().mean()
""",
        name="graphs",
        made_at=":5 in loss",
        fix="tensor.detach()",
    ),
    "exceptions with their tracebacks": Case(
        """
errors = []
def loss(model, batch):
    out = model(batch[0])
    try:
        raise ValueError("planted")
    except ValueError as error:
        errors.append(error)
    return out.square().mean()
""",
        name="errors",
        made_at="",
        fix="with_traceback(None)",
        holder="the variables of loss() in their tracebacks",
    ),
    "hooks registered at each call": Case(
        """
def loss(model, batch):
    noise = torch.randn(16, 16)
    model.layers[1].register_forward_hook(lambda module, args, output: output + noise.mean())
    return model(batch[0]).square().mean()
""",
        name="model.layers[1]._forward_hooks",
        made_at=":3 in loss",
        fix="Register the hook once",
        holder=" hooks",
    ),
    "a cache on the module": Case(
        """
net.cache = {}
net.keep = lambda x: net.cache.setdefault(float(x.sum().detach()), x.detach() * 2)
def loss(model, batch):
    return model(batch[0]).square().mean()
""",
        name="model.cache",
        made_at="in <lambda>",
        fix="Delete entries",
    ),
    "a default argument": Case(
        """
def loss(model, batch, seen=[]):
    seen.append(batch[0].clone())
    return model(batch[0]).square().mean()
""",
        name="seen",
        made_at=":3 in loss",
        fix="use None",
        holder="a default argument of loss()",
    ),
    "a closure": Case(
        """
def make():
    kept = deque()
    def loss(model, batch):
        kept.append(batch[0] * 2)
        return model(batch[0]).square().mean()
    return loss
loss = make()
""",
        name="kept",
        made_at=":5 in make.<locals>.loss",
        fix="maxlen",
        holder="a closure variable of make.<locals>.loss()",
    ),
    "a class's attribute": Case(
        """
net.keep = lambda x: Net.seen.setdefault(len(Net.seen), x.detach() * 2)
def loss(model, batch):
    return model(batch[0]).square().mean()
""",
        name="Net.seen",
        made_at="in <lambda>",
        fix="Delete entries",
    ),
}


def attached(session: Session, code: str, **knobs: Any) -> Session:
    session.run(MODEL)
    session.run_cell(code, title="<planted>")
    session.attach(model="net", loss="loss", data="rows")
    known = {"batch_size": 16, "accumulation_steps": 1, "precision": "fp32", "checkpointing": "none"}
    session.set(**(known | {"optimizer": "adamw", "learning_rate": 0.001, "clip_norm": None} | knobs))
    return session


def found(session: Session) -> list[tuple[Leak, ...]]:
    return list(session.history.leaks.values())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_planted_leak_is_found_within_50_steps_and_named(two_ranks: Session, case: Case) -> None:
    session = attached(two_ranks, case.code)
    run = session.train(50)
    [of_ranks] = found(session)
    assert [leak.rank for leak in of_ranks] == [0, 1]
    for leak in of_ranks:
        assert leak.name == case.name
        assert case.holder in leak.holder
        assert case.made_at in leak.made_at
        assert leak.made_at.startswith("<planted>:")
        assert case.fix in leak.fix
        assert leak.bytes_per_step > 0
        assert leak.bytes_so_far > 0
    [note] = [note for note in run.notes if case.name in note]
    assert note.startswith("ranks 0-1 keep ")
    assert [event.text for event in session.history.events if event.kind == "leak"][-1] == note
    assert session.train(60).notes == [], "told once"
