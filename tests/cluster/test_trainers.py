"""Trainers of other libraries that live on the ranks train there as by themselves on as many processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed, WorkloadError
from tests import internals
from tests.conftest import weights
from tests.trainers import PAIRS, TEXT, made

pytestmark = pytest.mark.cluster

CELL = TEXT + PAIRS


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which these trainers make one of their own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _with_as_many_threads_as_a_rank() -> Iterator[None]:
    """With others, sums are added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attached(session: Session, code: str, cell: str = CELL, **beside: str) -> Session:
    """Attach what this code makes on the ranks."""
    session.run(f"{cell}\ntrainer = {code}")
    session.attach(trainer="trainer", **beside)
    return session


def losses(session: Session, steps: int) -> list[float]:
    """The losses of the next steps on each rank."""
    found: list[float] = session.train(steps).frame().sort_values(["rank", "step"]).loss.tolist()
    return found


def same_weights(session: Session, plain: torch.nn.Module) -> list[str]:
    """Names of weights that are not those of the plain model, on any rank."""
    found = session.run("{name: param.detach().clone() for name, param in trainer.model.named_parameters()}")
    named = dict(plain.named_parameters())
    return sorted({name for ours in found for name, param in ours.items() if not torch.equal(param, named[name])})


@pytest.mark.full
def test_tokens_are_averaged_over_all_ranks_as_in_one_process_with_as_many_micro_batches(two_ranks: Session) -> None:
    """Their numbers differ from rank to rank: 3 to 9 of each row count."""
    plain = eval("trained_by(gradient_accumulation_steps=2)", made(CELL))
    plain.train()
    attached(two_ranks, "trained_by()")
    assert two_ranks.settings.batch_size == 4
    run = two_ranks.train(6).frame()
    assert same_weights(two_ranks, plain.model) == []
    mine = run.groupby("step").loss.mean().tolist()
    assert mine == pytest.approx([entry["loss"] for entry in plain.state.log_history if "loss" in entry], rel=1e-6)
    assert sorted(run.loss.groupby(run.step).nunique().unique()) == [2], "each rank says its own share"


@pytest.mark.full
def test_a_split_of_the_micro_batches_keeps_the_mathematics(two_ranks: Session) -> None:
    found = []
    for batch_size, accumulation_steps in ((4, 2), (2, 4), (8, 1)):
        attached(two_ranks, "trained_by(per_device_train_batch_size=8, lr_scheduler_type='constant')")
        two_ranks.set(batch_size=batch_size, accumulation_steps=accumulation_steps)
        found.append(two_ranks.train(4).frame().groupby("step").loss.mean().tolist())
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.full
def test_an_evaluation_sees_all_samples_on_all_ranks(two_ranks: Session) -> None:
    more = """
import numpy as np

def scores(prediction):
    guessed, known = prediction.predictions.argmax(-1), prediction.label_ids
    classes = [(guessed[known == one] == one).mean() for one in range(3) if (known == one).any()]
    return {"seen": len(known), "worst": min(classes), "last": float(known[-1])}

def classified():
    arguments = TrainingArguments(**SILENT, remove_unused_columns=False, per_device_train_batch_size=4, max_steps=4)
    return Trainer(Net(), arguments, train_dataset=pairs, eval_dataset=pairs[:21], compute_metrics=scores)
"""
    attached(two_ranks, "classified()", CELL + more).train(2)
    found = two_ranks.evaluate()
    plain = two_ranks.run("trainer.evaluate()")[0]
    assert {name: found.metrics[name] for name in ("seen", "worst", "last")} == pytest.approx(
        {name: plain[f"eval_{name}"] for name in ("seen", "worst", "last")}
    )
    two_ranks.run("def scores(prediction): raise ValueError('of scores')\ntrainer.compute_metrics = scores")
    two_ranks.attach(trainer="trainer")
    with pytest.raises(TrainingFailed, match="of scores"):
        two_ranks.evaluate()
    assert two_ranks.train(1).steps == 1


def test_a_step_that_one_rank_cannot_fetch_fails_on_all_and_training_goes_on(two_ranks: Session) -> None:
    more = """
class Rows(list):
    bad = False

    def __getitem__(self, place):
        if Rows.bad and rank == 1: raise OSError("of rank 1")
        return super().__getitem__(place)

rows = Rows(rows)
"""
    attached(two_ranks, "trained_by()", CELL + more).train(2)
    two_ranks.run("Rows.bad = True")
    with pytest.raises(TrainingFailed, match="of rank 1"):
        two_ranks.train(2)
    two_ranks.run("Rows.bad = False")
    assert two_ranks.train(2).frame().step.max() == 4
    assert len(set(two_ranks.run("[float(p.sum()) for p in trainer.model.parameters()]")[0])) > 1


@pytest.mark.full
def test_questions_flips_and_files_know_of_no_trainer(two_ranks: Session, tmp_path: Path) -> None:
    attached(two_ranks, "trained_by(gradient_accumulation_steps=2)").train(2)
    before = weights(two_ranks)
    predicted = two_ranks.predict(checkpointing="blocks", batch_size=8)
    assert predicted.verdict == "fits"
    assert weights(two_ranks) == before, "a question leaves no trace"
    two_ranks.save(tmp_path / "of_trainer.state")
    expected = losses(two_ranks, 2)
    two_ranks.resume(tmp_path / "of_trainer.state")
    assert losses(two_ranks, 2) == expected
    two_ranks.set(checkpointing="blocks", precision="bf16")
    assert two_ranks.train(1).steps == 1
    two_ranks.set(checkpointing="none", precision="fp32")


def test_an_export_says_what_to_set_in_the_trainers_own_program(two_ranks: Session, tmp_path: Path) -> None:
    attached(two_ranks, "trained_by()").train(1)
    two_ranks.set(batch_size=2, accumulation_steps=2, precision="bf16")
    with pytest.raises(WorkloadError) as caught:
        two_ranks.export(tmp_path / "train.py")
    two_ranks.set(precision="fp32")
    said = str(caught.value)
    assert said.startswith("No script was written. Trainer of transformers brings a training loop of its own")
    assert "per_device_train_batch_size (batch_size=2), gradient_accumulation_steps (accumulation_steps=2)" in said
    assert "bf16 or fp16 (precision=bf16)" in said
    assert not (tmp_path / "train.py").exists()


def test_the_magic_shows_what_was_taken_and_names_the_roles(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(f"{CELL}\ntrainer = trained_by(neftune_noise_alpha=5)")
    shown = shell.run_line_magic("hvd_attach", "trainer=trainer")
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    assert "per_device_train_batch_size" in str(shown)
    assert "Not kept: neftune_noise_alpha=5: embeddings get no noise" in str(shown)
    with pytest.raises(WorkloadError, match=r"there is no variable 'trainr' on the ranks. Did you mean 'trainer'"):
        two_ranks.attach(trainer="trainr")
    with pytest.raises(InvalidInput, match="trainer= must be the name of a variable"):
        two_ranks.attach(trainer=object())  # type: ignore[arg-type]
    assert two_ranks.workload is not None
    assert two_ranks.workload.name == "GPT2LMHeadModel"
    assert two_ranks.train(1).steps == 1


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
torch.manual_seed(0)
features = torch.randn(64, 6)
rows = torch.utils.data.TensorDataset(features, features[:, :3].argmax(1))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.25)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
prepared = accelerator.prepare(net, opt, torch.utils.data.DataLoader(rows, batch_size=4))
criterion = nn.CrossEntropyLoss()
"""


def test_what_an_accelerator_prepared_trains_as_its_parts_do(two_ranks: Session) -> None:
    found: list[Any] = []
    for trainer in ("accelerator", "prepared"):
        two_ranks.run(ACCELERATE)
        two_ranks.attach(trainer=trainer, loss="criterion")
        assert two_ranks.settings.accumulation_steps == 2
        found.append(losses(two_ranks, 3))
    loader = "torch.utils.data.DataLoader(rows, batch_size=4)"
    two_ranks.run(f"{ACCELERATE}\nnet, opt = accelerator.unwrap_model(net), opt\nloader = {loader}")
    two_ranks.attach(model="net", data="loader", loss="criterion", optimizer="opt")
    assert losses(two_ranks, 3) == found[0] == found[1]


@pytest.mark.full
def test_a_restart_brings_the_trainer_back_with_its_optimizer() -> None:
    """It is kept whole, as other objects that live on the ranks are."""
    internals.stop_running()
    with gpumem_nb.start(2, device="cpu", memory_limit="256MiB") as session:
        attached(session, "trained_by(weight_decay=0.1)")
        before = losses(session, 2)
        session.restart()
        assert session.workload is not None
        assert session.workload.adopted is not None
        after = losses(session, 2)
        attached(session, "trained_by(weight_decay=0.1)")
        whole = losses(session, 4)
    assert [*before[:2], *after[:2], *before[2:], *after[2:]] == whole


LIGHTNING = """
import torch, warnings
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
numbers = torch.Generator().manual_seed(1)
points = torch.randn(48, 6, generator=numbers)
pairs = TensorDataset(points, points[:, :3].argmax(1))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

def fitted(**given):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(accelerator="cpu", max_epochs=2, **quiet, **given)

module = Module()
loader = DataLoader(pairs, batch_size=4)
"""


def test_a_lightning_module_trains_as_in_one_process_with_as_many_micro_batches(two_ranks: Session) -> None:
    pytest.importorskip("lightning", reason="make test installs it")
    plain = made(LIGHTNING)
    plain["fitted"](accumulate_grad_batches=2).fit(plain["module"], plain["loader"])
    two_ranks.run(f"{LIGHTNING}\ntrainer = fitted()")
    assert (
        two_ranks.run("trainer.world_size, trainer.global_rank, type(trainer.strategy).__name__")
        == [(1, 0, "SingleDeviceStrategy")] * 2
    ), "an ordinary process"
    info = two_ranks.attach(trainer="trainer", model="module", data="loader")
    assert info.name == "Module"
    two_ranks.train(12)
    found = two_ranks.run("{name: param.detach().clone() for name, param in module.named_parameters()}")
    for name, param in plain["module"].named_parameters():
        assert all(torch.equal(ours[name], param) for ours in found)


def test_lightning_takes_a_rank_for_an_ordinary_process(two_ranks: Session) -> None:
    pytest.importorskip("lightning", reason="make test installs it")
    code = "from lightning.fabric.plugins.environments import MPIEnvironment\nMPIEnvironment.detect()"
    assert two_ranks.run(code) == [False, False]


@pytest.mark.full
def test_trls_trainer_averages_tokens_over_all_ranks(two_ranks: Session) -> None:
    trl = pytest.importorskip("tests.unit.test_trainers_trl", reason="make test-full installs TRL")
    plain = eval("trained_by(gradient_accumulation_steps=2)", made(trl.CELL))
    plain.train()
    attached(two_ranks, "trained_by()", trl.CELL)
    two_ranks.train(6)
    assert same_weights(two_ranks, plain.model) == []
