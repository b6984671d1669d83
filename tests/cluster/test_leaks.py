"""Memory that training keeps from step to step is noticed and named on the rank, and told once."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gpumem_nb.memory.leaks import holders
from gpumem_nb.report.freed import leak_headline
from gpumem_nb.session import Session
from gpumem_nb.shared.messages import Leak
from gpumem_nb.shared.workload import Workload
from gpumem_nb.workloads.catalog import CATALOG
from tests.tiers import every, first_tier
from tests.timing import HANG_S

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


SEARCH = f"setattr(__import__('sys').modules[{holders.__name__!r}], 'LONGEST_SEARCH_S', {{}})"


@pytest.fixture(autouse=True)
def long_search(two_ranks: Session) -> Iterator[None]:
    """Who holds something is looked for as long as it takes: on a busy machine some seconds."""
    two_ranks.run(SEARCH.format(HANG_S))
    yield
    two_ranks.run(SEARCH.format(holders.LONGEST_SEARCH_S))


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
        made_at=r"<planted>:4 in loss",
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
        made_at=r"<planted>:[45] in loss",
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
        made_at=r"<planted>:6 in loss",
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
        made_at=r"<model>:13 in Net.forward",
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
        made_at=r"<planted>:5 in loss",
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
        made_at=r"<planted>:5 in loss",
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
        made_at=r"collate.py:\d+ in collate_tensor_fn",
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
        made_at=r"<planted>:3 in loss",
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
        made_at=r"<planted>:[23] in <lambda>",
        fix="Delete entries",
    ),
    "a default argument": Case(
        """
def loss(model, batch, seen=[]):
    seen.append(batch[0].clone())
    return model(batch[0]).square().mean()
""",
        name="seen",
        made_at=r"<planted>:3 in loss",
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
        made_at=r"<planted>:5 in make.<locals>.loss",
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
        made_at=r"<planted>:[23] in <lambda>",
        fix="Delete entries",
    ),
}


def attached(session: Session, code: str, **knobs: Any) -> Session:
    session.run_cell(MODEL, title="<model>")
    session.run_cell(code, title="<planted>")
    session.attach(model="net", loss="loss", data="rows")
    known = {"batch_size": 16, "accumulation_steps": 1, "precision": "fp32", "checkpointing": "none"}
    session.set(**(known | {"optimizer": "adamw", "learning_rate": 0.001, "clip_norm": None} | knobs))
    return session


def found(session: Session) -> list[tuple[Leak, ...]]:
    return list(session.history.leaks.values())


@pytest.mark.parametrize("case", first_tier(CASES.values(), every(7)), ids=CASES)
def test_a_planted_leak_is_found_within_50_steps_and_named(two_ranks: Session, case: Case) -> None:
    session = attached(two_ranks, case.code)
    run = session.train(50)
    [of_ranks] = found(session)
    assert [leak.rank for leak in of_ranks] == [0, 1]
    for leak in of_ranks:
        assert leak.name == case.name
        assert case.holder in leak.holder
        assert re.fullmatch(case.made_at.replace(">:", r" \d+>:"), leak.made_at)  # cells are numbered
        assert case.fix in leak.fix
        assert leak.bytes_per_step > 0
        assert leak.bytes_so_far > 0
    [note] = [note for note in run.notes if case.name in note]
    # The note is made when the first rank has found it, which may be a chunk before the other one.
    assert re.match("(rank 0|rank 1|ranks 0-1) keeps? ", note)
    assert leak_headline(of_ranks).startswith("ranks 0-1 keep ")
    assert [event.text for event in session.history.events if event.kind == "leak"][-1] == note


@pytest.mark.full
@pytest.mark.parametrize(
    "knobs",
    [{"checkpointing": "blocks"}, {"precision": "bf16", "accumulation_steps": 2}, {"precision": "fp16"}],
    ids=str,
)
def test_a_leak_is_found_under_other_settings_too(two_ranks: Session, knobs: dict[str, Any]) -> None:
    session = attached(two_ranks, CASES["losses of which no backward frees the graph"].code, **knobs)
    session.train(50)
    [of_ranks] = found(session)
    assert {leak.name for leak in of_ranks} == {"history['train']"}
    assert {leak.rank for leak in of_ranks} == {0, 1}


@pytest.mark.full
def test_a_leak_is_told_once_and_another_one_too(two_ranks: Session) -> None:
    session = attached(two_ranks, CASES["a closure"].code)
    assert len(session.train(50).notes) == 1
    assert session.train(60).notes == []
    session.run("more = []\nnet.keep = lambda x: more.append(x.detach() * 2)")
    [note] = session.train(100).notes
    assert "`more`" in note
    assert list(session.history.leaks) == ["kept", "more"]


def test_the_rank_that_leaks_is_named_also_in_a_workload_of_ones_own(two_ranks: Session) -> None:
    kept: list[Any] = []

    def model() -> Any:
        import torch

        return torch.nn.Linear(64, 8)

    def data() -> Any:
        import torch

        return torch.utils.data.TensorDataset(torch.randn(256, 64))

    def loss(model: Any, batch: Any) -> Any:
        import horovod.torch as hvd

        out = model(batch[0])
        if hvd.rank() == 1:
            kept.append(out.exp())
        return out.square().mean()

    two_ranks.load(Workload("leaky", model, data, loss))
    two_ranks.set(batch_size=16)
    run = two_ranks.train(50)
    [[leak]] = found(two_ranks)
    assert leak.rank == 1
    assert leak.name == "kept"
    assert "a closure variable of " in leak.holder
    assert re.fullmatch(r"test_leaks\.py:\d+ in test_.*loss", leak.made_at)
    assert [note for note in run.notes if note.startswith("rank 1 keeps ")]


@pytest.mark.full
def test_cells_may_allocate_while_training_goes_on_and_loading_clears_the_list(two_ranks: Session) -> None:
    session = attached(two_ranks, CASES["a closure"].code)
    session.train(50)
    assert found(session)
    attached(session, "def loss(model, batch):\n    return model(batch[0]).square().mean()\nmine = []")
    assert not found(session)
    session.play()
    for _ in range(30):
        session.run("mine.append(torch.ones(10_000))")
    session.pause()
    assert not found(session)


def random_settings(dice: random.Random) -> dict[str, Any]:
    return {
        "precision": dice.choice(["fp32", "bf16", "fp16"]),
        "checkpointing": dice.choice(["none", "selective", "blocks", "sqrt"]),
        "batch_size": dice.choice([2, 4, 8]),
        "accumulation_steps": dice.choice([1, 2]),
        "optimizer": dice.choice(["sgd", "momentum", "adam", "adamw"]),
    }


TINY = {"digits": {"width": 4, "depth": 1, "resolution": 8}, "text": {"width": 8, "depth": 2, "sequence_length": 8}}


@pytest.mark.full
@pytest.mark.parametrize("name", CATALOG)
def test_ready_made_workloads_leak_nothing_over_160_steps_of_random_flips(two_ranks: Session, name: str) -> None:
    dice = random.Random(name)
    two_ranks.load(name, **TINY[CATALOG[name].task])
    while two_ranks.history.steps < 160:  # the slowest growth that is looked for shows in 128
        two_ranks.set(**random_settings(dice))
        two_ranks.train(dice.randint(5, 25))
    assert not found(two_ranks)


@pytest.mark.full
def test_batches_of_varying_length_are_no_leak(two_ranks: Session) -> None:
    attached(
        two_ranks,
        """
def collate(samples):
    length = 1 + int(abs(samples[0][0].sum()) * 1000) % 40
    return [torch.stack([sample[0] for sample in samples]).repeat(length, 1)]
rows = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
class Latest:
    def loss(self, model, batch):
        self.latest = model(batch[0])
        return self.latest.square().mean()
loss = Latest().loss
""",
    )
    two_ranks.train(150)
    assert not found(two_ranks)
