"""What accelerate prepared trains as in a loop of one's own, whether the Accelerator is named or what it returned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, PartialState

from gpumem_nb.engine.trainers.prepared import of_accelerator, of_prepared
from gpumem_nb.internals.transformers_internals import among
from gpumem_nb.shared.errors import WorkloadError
from tests.trainers import alone, differing, made

CELL = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
numbers = torch.Generator().manual_seed(1)
points = torch.randn(48, 6, generator=numbers)
pairs = TensorDataset(points, points[:, :3].argmax(1))
criterion = nn.CrossEntropyLoss()

def prepared(steps=2, **given):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, step_scheduler_with_optimizer=True, **given)
    loaders = [DataLoader(pairs, batch_size=4), DataLoader(pairs, batch_size=8)]
    return accelerator, accelerator.prepare(net, opt, *loaders, schedule)

def loop(accelerator, things):
    net, opt, loader, _, schedule = things
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(criterion(net(inputs), targets))
            opt.step()
            schedule.step()
            opt.zero_grad()
    return accelerator.unwrap_model(net)
"""


@pytest.fixture
def cell() -> dict[str, Any]:
    return made(CELL)


@pytest.mark.parametrize("named", ["the Accelerator", "what it returned"])
@pytest.mark.parametrize("steps", [1, 2])
def test_it_trains_as_the_loop_does_bit_for_bit(named: str, steps: int, cell: dict[str, Any]) -> None:
    plain = cell["loop"](*cell["prepared"](steps))
    accelerator, things = cell["prepared"](steps)
    trainer = accelerator if named == "the Accelerator" else things
    ours = alone({"trainer": trainer, "loss": cell["criterion"]}, 12 // steps)
    assert differing(ours.model, plain) == []
    assert ours.trainer.live.settings.accumulation_steps == steps
    assert ours.trainer.live.settings.lr_schedule == "own"
    assert ours.evaluated().keys() == {"loss"}
    assert ours.adopted.kind == "accelerate's Accelerator"


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR"])
def test_on_two_ranks_a_prepared_schedule_goes_on_as_on_two_processes(
    kind: str, linked: bool, cell: dict[str, Any]
) -> None:
    torch, found = cell["torch"], []
    for ours in (False, True):
        opt = torch.optim.SGD(cell["nn"].Linear(2, 2).parameters(), lr=1.0)
        options = {"step_size": 2} if kind == "StepLR" else {"max_lr": 1.0, "total_steps": 9}
        schedule = getattr(torch.optim.lr_scheduler, kind)(opt, **options)
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=linked)
        things = accelerator.prepare(cell["nn"].Linear(2, 2), opt, schedule)
        one = of_accelerator(accelerator, 2).parts["scheduler"] if ours else things[2]
        vars(PartialState())["num_processes"] = 1 if ours else 2
        rates = []
        for _ in range(6):
            things[1].step()
            one.step()
            rates.append(opt.param_groups[0]["lr"])
        found.append(rates)
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_a_schedule_that_was_not_prepared_goes_on_once_a_step(cell: dict[str, Any]) -> None:
    _, (net, opt, loader, _, schedule) = cell["prepared"](1)
    ours = alone({"trainer": (net, opt, loader, schedule.scheduler), "loss": cell["criterion"]}, 5)
    assert ours.rates == [0.05, 0.05, 0.025, 0.025, 0.0125]


def test_batches_that_are_shared_out_among_processes_are_refused(cell: dict[str, Any]) -> None:
    config = DataLoaderConfiguration(split_batches=True)
    accelerator, things = cell["prepared"](dataloader_config=config)
    for take, named in ((of_accelerator, accelerator), (of_prepared, things)):
        assert take(named, 1).parts.keys() >= {"model", "data"}
        with pytest.raises(WorkloadError, match=r"split_batches=True.* make batches 1/4 as large"):
            take(named, 4)


def test_its_precision_becomes_the_knobs_and_leaves_the_model(cell: dict[str, Any]) -> None:
    accelerator, things = cell["prepared"](mixed_precision="bf16")
    assert "_original_forward" in vars(things[0])
    ours = alone({"trainer": accelerator, "loss": cell["criterion"]}, 2)
    assert ours.trainer.live.settings.precision == "bf16"
    assert "_original_forward" not in vars(ours.model)


def test_more_loaders_are_named_and_two_models_refused(cell: dict[str, Any]) -> None:
    accelerator, _ = cell["prepared"]()
    accelerator.prepare(cell["DataLoader"](cell["pairs"]))
    assert alone({"trainer": accelerator, "loss": cell["criterion"]}, 1).adopted.left_out == (
        "1 more DataLoader, which is neither trained nor validated on",
    )
    accelerator.prepare(cell["nn"].Linear(2, 2))
    with pytest.raises(WorkloadError, match=r"accelerate prepared 2 models, and one is trained here. Name those"):
        alone({"trainer": accelerator, "loss": cell["criterion"]}, 1)


def test_an_accelerator_that_has_prepared_nothing_says_what_to_run() -> None:
    with pytest.raises(WorkloadError, match=r"has prepared no model yet. Run the cell with accelerator.prepare"):
        alone({"trainer": Accelerator(cpu=True)}, 1)


def test_a_tuple_that_was_never_prepared_is_refused(cell: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=r"no Accelerator has prepared what is in it. Name the objects"):
        alone({"trainer": (cell["nn"].Linear(6, 3), cell["pairs"])}, 1)


@pytest.mark.parametrize("named", ["the Accelerator", "what it returned"])
def test_it_trains_in_a_process_that_was_started_anew(named: str, cell: dict[str, Any]) -> None:
    accelerator, things = cell["prepared"](2)
    kept = cloudpickle.dumps(accelerator if named == "the Accelerator" else things)
    AcceleratorState._reset_state(reset_partial_state=True)
    ours = alone({"trainer": cloudpickle.loads(kept), "loss": cell["criterion"]}, 1)
    assert ours.trainer.live.settings.accumulation_steps == 2
    Accelerator(cpu=True, mixed_precision="bf16")  # which would find a state that was made by halves


def test_a_loss_in_a_process_without_an_accelerator_makes_no_state_by_halves() -> None:
    state = SimpleNamespace(num_processes=1)
    with among(SimpleNamespace(accelerator=SimpleNamespace(state=state)), 2, 1):
        assert state.num_processes == 2
    assert state.num_processes == 1
    assert PartialState._shared_state == {}
