"""A Lightning module trains as its ``Trainer`` would train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.engine.storing.capture import plain
from gpumem_nb.engine.trainers.pace import Paced
from gpumem_nb.shared.errors import WorkloadError
from tests.trainers import alone, differing, made

pytest.importorskip("lightning", reason="make test installs it")

CELL = """
import torch, logging, warnings
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
numbers = torch.Generator().manual_seed(1)
points = torch.randn(48, 6, generator=numbers)
pairs = TensorDataset(points, points[:, :3].argmax(1))

class Module(L.LightningModule):
    def __init__(self, schedule=None, gives=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.schedule, self.gives = schedule, gives

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        right = (self.layers(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log_dict({"right": right, "half": 0.5})

    def train_dataloader(self):
        return DataLoader(pairs, batch_size=4)

    def val_dataloader(self):
        return [DataLoader(pairs, batch_size=5)]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.gives:
            return self.gives(optimizer)
        if self.schedule is None:
            return optimizer
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, **self.schedule}}

class Data(L.LightningDataModule):
    def setup(self, stage):
        self.rows = pairs

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=8)

def fitted(**given):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(accelerator="cpu", devices=1, **quiet, **given)
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return made(CELL)


ALIKE: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no schedule": (None, {"max_epochs": 1}),
    "a schedule by the step": ({"interval": "step", "frequency": 3}, {"max_epochs": 1}),
    "a schedule by the epoch": ({}, {"max_epochs": 3}),
    "two micro-batches": ({"interval": "step"}, {"max_epochs": 2, "accumulate_grad_batches": 2}),
    "clipping": (None, {"max_epochs": 2, "gradient_clip_val": 0.5}),
}


@pytest.mark.parametrize("what", ALIKE)
def test_it_trains_as_its_trainer_does_bit_for_bit(what: str, cell: dict[str, Any]) -> None:
    schedule, given = ALIKE[what]
    plain = cell["Module"](schedule)
    trainer = cell["fitted"](**given)
    trainer.fit(plain)
    module = cell["Module"](schedule)
    ours = alone({"trainer": cell["fitted"](**given), "model": module}, trainer.global_step)
    assert differing(ours.model, plain) == []
    assert ours.trainer.live.settings.accumulation_steps == given.get("accumulate_grad_batches", 1)
    assert ours.trainer.live.settings.clip_norm == given.get("gradient_clip_val")
    assert ours.model is module


def test_what_validation_logs_are_the_metrics(cell: dict[str, Any]) -> None:
    plain, trainer = cell["Module"](), cell["fitted"](max_epochs=2)
    trainer.fit(plain)
    ours = alone({"trainer": cell["Module"]()}, 24)
    found = ours.evaluated()
    assert found.pop("loss") > 0
    assert found == pytest.approx({name: float(trainer.callback_metrics[name]) for name in ("right", "half")})


@pytest.mark.parametrize("beside", ["a data module", "loaders", "a dataset"])
def test_data_may_be_named_beside_it(beside: str, cell: dict[str, Any]) -> None:
    loader = cell["DataLoader"](cell["pairs"], batch_size=8)
    named = {
        "a data module": {"data": cell["Data"]()},
        "loaders": {"data": loader, "eval_data": loader},
        "a dataset": {"data": cell["pairs"], "eval_data": cell["pairs"]},
    }[beside]
    plain = cell["Module"]()
    cell["fitted"](max_epochs=1).fit(plain, loader)
    ours = alone({"trainer": cell["Module"]()} | named, 6 if beside != "a dataset" else 1)
    assert ours.evaluated().keys() == {"loss", "right", "half"}
    if beside != "a dataset":
        assert differing(ours.model, plain) == []


def test_its_precision_becomes_the_knobs(cell: dict[str, Any]) -> None:
    ours = alone({"trainer": cell["fitted"](precision="bf16-mixed"), "model": cell["Module"]()}, 1)
    assert ours.trainer.live.settings.precision == "bf16"
    ours = alone({"trainer": cell["fitted"](precision="bf16-true"), "model": cell["Module"]()}, 1)
    assert any("precision='bf16-true': convert the module itself" in one for one in ours.adopted.left_out)


def test_hooks_and_callbacks_are_named(cell: dict[str, Any]) -> None:
    kind = type("Hooked", (cell["Module"],), {"on_train_epoch_end": lambda self: None, "__module__": "__main__"})
    stopping = cell["L"].pytorch.callbacks.EarlyStopping("right")
    trainer = cell["fitted"](callbacks=[stopping], limit_val_batches=2, sync_batchnorm=True)
    left_out = alone({"trainer": trainer, "model": kind()}, 1).adopted.left_out
    assert "hooks that no step here calls: on_train_epoch_end" in left_out
    assert "callbacks, which no step here calls: EarlyStopping" in left_out
    assert "limit_val_batches=2: evaluations see all of the validation data" in left_out
    assert "sync_batchnorm=True: batch norm takes the statistics of each rank's own micro-batch" in left_out


REFUSED = {
    "Module(gives=lambda one: [one, one])": "gives 2 optimizers, and a step here has one update",
    "Module(gives=lambda one: None)": "configure_optimizers gives no optimizer",
    "by_hand()": r"optimizes by hand \(automatic_optimization=False\)",
    "mine(optimizer_step=print)": "defines optimizer_step, which no step here calls",
    "mine(configure_optimizers=lambda self: self.trainer.max_steps)": "asks for self.trainer. Name a Lightning Tr",
    "mine(training_step=lambda self, batch: None)": "training_step returned no loss",
    "mine(train_dataloader=lambda self: {'a': 1, 'b': 2})": "gives several loaders, and one is trained on here",
    "mine(train_dataloader=lambda self: L.pytorch.utilities.CombinedLoader([1]))": "gives several loaders",
    "Module(), fitted(limit_train_batches=3)": r"on a part of the data \(limit_train_batches=3\), and steps here go",
    "Module(), fitted(limit_train_batches=0.5)": r"limit_train_batches=0.5",
    "Module(), fitted(overfit_batches=2)": r"limit_train_batches=2",
    "fitted()": "knows no module yet. Name it, too: model=module",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_kept_is_refused_in_a_sentence(code: str, cell: dict[str, Any]) -> None:
    more = """
def by_hand():
    module = Module()
    module.automatic_optimization = False
    return module

def mine(**methods):
    return type("Mine", (Module,), {**methods, "__module__": "__main__"})()
"""
    exec(more, cell)
    if code == "mine(training_step=lambda self, batch: None)":
        with pytest.raises(AssertionError, match=REFUSED[code]):
            alone({"trainer": eval(code, cell)}, 1)
        return
    made_of = eval(code, cell)
    parts = {"model": made_of[0], "trainer": made_of[1]} if isinstance(made_of, tuple) else {"trainer": made_of}
    with pytest.raises(WorkloadError, match=REFUSED[code]):
        alone(parts, 0)


def test_what_a_module_asks_of_its_trainer_is_answered_or_told(cell: dict[str, Any]) -> None:
    def steps(module: Any) -> Any:
        return cell["torch"].optim.SGD(module.parameters(), lr=1.0 / module.trainer.max_epochs)

    def estimated(module: Any) -> Any:
        return cell["torch"].optim.SGD(module.parameters(), lr=module.trainer.estimated_stepping_batches)

    asks, guesses = (
        type("Asks", (cell["Module"],), {"configure_optimizers": how, "__module__": "__main__"})
        for how in (steps, estimated)
    )
    found = alone({"trainer": cell["fitted"](max_epochs=4), "model": asks()}, 1)
    assert found.rates == [0.25]
    with pytest.raises(WorkloadError, match=r"asks a Trainer that does not train here .*hand over what follows"):
        alone({"trainer": cell["fitted"](max_epochs=4), "model": guesses()}, 1)


def test_a_schedule_by_the_epoch_is_saved_and_goes_on(cell: dict[str, Any]) -> None:
    def schedulers() -> tuple[Any, Any]:
        optimizer = cell["torch"].optim.SGD(cell["Module"]().parameters(), lr=1.0)
        return Paced(cell["torch"].optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5), 3), optimizer

    one, optimizer = schedulers()
    rates = []
    for _ in range(8):
        optimizer.step()
        one.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    other, optimizer = schedulers()
    optimizer.step()
    saved = plain(one.state_dict(), "the scheduler")
    other.load_state_dict({**saved, "inner": {**saved["inner"], "milestones": dict(saved["inner"]["milestones"])}})
    assert (other.done, other.inner.last_epoch) == (8, 2)
    assert other.inner.milestones == one.inner.milestones
    other.step()
    assert other.inner.last_epoch == 3


def test_a_metric_of_torchmetrics_is_told_how_to_be_logged(cell: dict[str, Any]) -> None:
    more = """
import torchmetrics

class Counted(Module):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        found = self.accuracy(self.layers(batch[0]), batch[1])
        self.log("right", found if self.by_value else self.accuracy)
"""
    exec(more, cell)
    module = cell["Counted"]()
    module.by_value = True
    ours = alone({"trainer": module}, 1)
    assert 0 <= ours.evaluated()["right"] <= 1
    module.by_value = False
    with pytest.raises(AssertionError, match=r"logs right as a torchmetrics object, .*self.log\('right'"):
        ours.evaluated()
