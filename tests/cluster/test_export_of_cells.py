"""What cells do around attached objects, in scripts that run without the toolkit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import WorkloadError
from tests import exported

pytestmark = pytest.mark.cluster

STEPS = 6
WORDS = """
import torch
from torch import nn
words = "every rank must number these words of a set in one and the same order or it learns another language".split()
places = {word: place for place, word in enumerate(set(words))}
rows = torch.utils.data.TensorDataset(torch.tensor([places[word] for word in words]), torch.arange(len(words)) % 3)
net = nn.Sequential(nn.Embedding(len(places), 4), nn.Linear(4, 3))
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
NOW_AND_THEN = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.extra, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0
    def forward(self, features):
        self.calls += 1
        return self.always(features) + (self.extra(features) if self.calls % 2 == 0 else 0)
net = Net()
rows = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

NORMS = """
import torch
from torch import nn
class Block(nn.Sequential):
    def forward(self, x): return super().forward(x) * self[1].running_var.clone()[:, None, None]
def block(width): return Block(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 1), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(block(4) for _ in range(3))
    def forward(self, images):
        features = self.first(images)
        for block in self.blocks:
            features = nn.functional.dropout(block(features), 0.1, self.training)
        return self.last(features.mean((2, 3)))
net = Net()
net.blocks[2][1].eval()
rows = torch.utils.data.TensorDataset(torch.randn(40, 1, 5, 5), torch.arange(40) % 3)
held_out = torch.utils.data.TensorDataset(torch.randn(7, 1, 5, 5), torch.arange(7) % 3)
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
POWER = """
import torch
from torch import nn
net = nn.Sequential(*[nn.utils.spectral_norm(nn.Linear(4, 4)) for _ in range(3)])
rows = torch.utils.data.TensorDataset(torch.randn(40, 4))
def loss(model, batch): return model(batch[0]).square().mean()
"""
COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0
    def forward(self, features):
        self.calls += 1
        return self.inner(features)
net = nn.Sequential(*[Counting() for _ in range(3)])
"""
MASKED = """
import torch
from torch import nn
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
    def forward(self, features):
        return self.inner(features) * self.mask
net = nn.Sequential(*[Masked() for _ in range(3)])
rows = torch.utils.data.TensorDataset(torch.randn(40, 4))
def loss(model, batch): return model(batch[0]).square().mean()
"""


@pytest.mark.full
def test_words_of_a_set_are_numbered_as_in_the_session_and_cells_may_use_the_offered_names(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(WORDS)
    session.attach("net", "rows", "loss")
    session.set(batch_size=4)
    run = session.train(STEPS)
    session.export(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=STEPS)
    assert ran.losses == exported.mean_losses(run)

    session.run("for weight in model[0].parameters(): weight.requires_grad_(False)")
    session.run(f"if rank == 0: torch.save(net.state_dict(), {str(tmp_path / 'mine.pt')!r})")
    session.attach("net", "rows", "loss")
    session.push({"late": 3, "later": 4})
    run = session.train(2)
    written = session.export(tmp_path / "train.py")
    told = "\n".join(written.left_out)
    assert "pushed to the ranks since this was loaded: late, later" in told
    assert f"the {STEPS} steps of earlier training" in told
    assert "`if rank == 0: torch.save(net.state_dict()" in told
    session.save(tmp_path / "here.state")
    run = session.train(STEPS)
    (tmp_path / "mine.pt").unlink()
    ran = exported.run(tmp_path / "train.py", "--resume", "here.state", steps=2 + STEPS)
    assert ran.losses == exported.mean_losses(run)
    assert exported.differing(session, ran) == []
    assert not (tmp_path / "mine.pt").exists()
    assert "requires_grad_(False)" in (tmp_path / "train.py").read_text()


@pytest.mark.full
def test_a_layer_that_is_left_out_in_some_steps_is_trained_in_the_others(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(NOW_AND_THEN)
    session.attach("net", "rows", "loss")
    session.set(optimizer="adamw", batch_size=4)
    run = session.train(STEPS - 1)
    with pytest.raises(WorkloadError, match=r"extra\.weight has a gradient on no rank.*--ddp"):
        session.export(tmp_path / "train.py")
    session.export(tmp_path / "train.py", ddp=True)
    ran = exported.run(tmp_path / "train.py", steps=STEPS - 1, ddp=True)
    assert ran.losses == pytest.approx(exported.mean_losses(run))
    assert exported.differing(session, ran) == []


MODES = """
import torch
from torch import nn
net = nn.Linear(4, 3)
rows = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
class Dropped(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.drop, self.weights = nn.Dropout(0.5), torch.ones(3)
        self.register_buffer("rate", torch.tensor(rate), persistent=False)
    def forward(self, outputs, targets):
        return self.rate * nn.functional.cross_entropy(self.drop(outputs), targets)
criterion, twice = Dropped(1.0), Dropped(2.0)
"""


@pytest.mark.full
def test_criteria_and_metrics_that_are_modules_are_evaluated_as_in_the_session(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(MODES)
    session.attach("net", "rows", "criterion", eval_data="rows", metric="twice")
    session.set(batch_size=4)
    run = session.train(STEPS)
    found = session.evaluate()
    session.export(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=STEPS)
    assert ran.losses == exported.mean_losses(run)
    assert f"validation: loss {found.loss:.6g}, twice {found.metrics['twice']:.6g}" in ran.output


@pytest.mark.full
@pytest.mark.parametrize(("ddp", "mode"), [(False, "blocks"), (True, "blocks"), (False, "sqrt"), (True, "sqrt")])
def test_recomputing_reads_statistics_of_batch_norms_as_forward_did_and_counts_no_batch_twice(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, ddp: bool, mode: str
) -> None:
    session = fresh(two_ranks)
    session.run(NORMS)
    session.attach("net", "rows", "loss", eval_data="held_out")
    session.set(batch_size=4, accumulation_steps=2, checkpointing=mode)
    run = session.train(STEPS)
    found = session.evaluate()
    script = tmp_path / "train.py"
    session.export(script, ddp=ddp)
    ran = exported.run(script, steps=STEPS, ddp=ddp)
    assert ran.losses == exported.mean_losses(run)
    assert exported.differing(session, ran) == []
    assert f"loss {found.loss:.6g}" in ran.output


def test_what_else_a_block_changes_in_forward_is_refused_under_checkpointing(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(POWER)
    session.attach("net", "rows", "loss")
    session.set(batch_size=4, checkpointing="blocks")
    session.train(2)
    with pytest.raises(WorkloadError, match="a block changes weight_u when it runs, which recomputing would do again"):
        session.export(tmp_path / "train.py")
    session.set(checkpointing="none")
    session.train(1)
    session.export(tmp_path / "train.py")
    session.set(checkpointing="blocks")
    with pytest.raises(WorkloadError, match=r"Train a step first .*: that shows what blocks change"):
        session.export(tmp_path / "train.py")
    session.run(COUNTING)
    session.attach("net", "rows", "loss")
    session.train(1)
    with pytest.raises(WorkloadError, match="a block changes calls when it runs"):
        session.export(tmp_path / "train.py")


@pytest.mark.full
def test_what_others_change_in_a_block_between_steps_is_not_the_blocks_doing(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.run(MASKED)
    session.attach("net", "rows", "loss")
    session.set(batch_size=4, checkpointing="blocks")
    for _ in range(3):
        session.train(1)
        session.run("for block in net: block.mask.fill_(1.0)")
    session.train(1)
    session.export(tmp_path / "train.py")
