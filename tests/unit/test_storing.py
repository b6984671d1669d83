"""A saved state holds everything that training goes on from, and goes on in a process that begins anew."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from gpumem_nb.engine import attach
from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.storing import capture, restore
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import StateFileError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from tests.links import Overheard
from tests.unit.test_anybodys_model import OWN, Odd
from tests.unit.test_anybodys_model import attached as trainer_of
from tests.unit.test_joining import Counting, bits, scrambled
from tests.unit.test_learning_rates import SCHEDULERS, Bench, set_rates
from tests.unit.test_one_rank import alone as alone


def save(trainer: Trainer, path: Path) -> Path:
    captured = capture.capture(trainer, opened(), None)
    assert captured is not None
    captured.write(path)
    return path


def resume(trainer: Trainer, path: Path) -> None:
    restore.Checked(path, trainer, opened()).apply(trainer)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    before, after = Bench(SCHEDULERS[kind]), Bench(SCHEDULERS[kind])
    before.train(3)
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.train(4)
    after.train_plainly(7)
    after.check_same()


def test_rates_that_a_cell_set_are_saved(tmp_path: Path) -> None:
    before, after = Bench(), Bench()
    before.train(1, learning_rate=0.2)
    set_rates(before.own, 0.03, 0.001)
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.train(1, learning_rate=0.2)
    assert [group["lr"] for group in after.own.param_groups] == [0.03, 0.001]
    after.train(1, learning_rate=0.4)
    assert [group["lr"] for group in after.own.param_groups] == pytest.approx([0.4, 0.4 / 30])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_schedule_goes_on_where_it_was_saved_and_the_rate_with_the_ranks(ranks: int, tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"lr_schedule": "linear", "schedule_steps": 10, "lr_scaling": "linear"}
    before, after = Bench(), Bench()
    before.train(3, reference_batch=2, **knobs)
    after.trainer.live = LiveModel(after.trainer.workload, opened(), ranks)
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.trainer.live.apply(before.settings)
    assert after.trainer.live.learning_rate == pytest.approx(0.07 * ranks)
    before.train(2)
    for _ in range(2):
        after.trainer.live.step_counted(skipped=False)
    for group, same in zip(after.own.param_groups, before.own.param_groups, strict=True):
        assert group["lr"] == pytest.approx(same["lr"] * ranks, rel=1e-14)


@pytest.mark.parametrize("optimizer", ["own", "adam"])
def test_a_scheduler_that_rests_goes_on_after_a_resume(optimizer: str, tmp_path: Path) -> None:
    before, after = (Bench(lambda own: ExponentialLR(own, 0.5)) for _ in range(2))
    assert before.train(3) == after.train_plainly(3)
    before.train(1, lr_schedule="constant")
    before.train(1, optimizer=optimizer)
    after.settings = before.settings
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.train(1)
    assert after.train(2, optimizer="own", lr_schedule="own") == after.train_plainly(2) == [0.0125, 0.00625]


def test_groups_keep_their_proportions_after_a_resume_at_rate_zero(tmp_path: Path) -> None:
    before, after = Bench(), Bench()
    before.train(4, lr_schedule="linear", schedule_steps=3)
    assert [group["lr"] for group in before.own.param_groups] == [0, 0]
    after.settings = before.settings
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.train(1, lr_schedule="constant")
    assert [group["lr"] for group in after.own.param_groups] == pytest.approx([0.1, 0.01])


def test_closing_after_a_resume_leaves_the_rate_that_the_knob_names(tmp_path: Path) -> None:
    before, after = Bench(), Bench()
    before.train(3, warmup_steps=9)
    resume(after.trainer, save(before.trainer, tmp_path / "state"))
    after.trainer.close()
    assert [group["lr"] for group in after.own.param_groups] == pytest.approx([0.1, 0.01])


def test_a_state_with_another_scheduler_is_refused(tmp_path: Path) -> None:
    path = save(Bench(SCHEDULERS["cosine"]).trainer, tmp_path / "state")
    for other, words in ((None, "is trained with none"), (SCHEDULERS["steps"], "is trained with MultiStepLR")):
        with pytest.raises(StateFileError, match=f"saved with CosineAnnealingLR, and this {words}"):
            resume(Bench(other).trainer, path)


def test_the_optimizer_before_does_not_live_on_after_resuming(tmp_path: Path) -> None:
    trainer = trainer_of(nn.Linear(4, 2))
    settings = Settings(batch_size=2)
    trainer.run(Chunk(settings, 1, 1))
    before = weakref.ref(trainer.live.optimizer)
    resume(trainer, save(trainer, tmp_path / "state"))
    gc.collect()
    assert before() is None


def odd() -> nn.Module:
    return nn.ModuleDict({"odd": Odd(), "counting": Counting(7)})


def of_odd(model: Any, batch: Any) -> Any:
    return model["odd"](batch[0]).square().mean()


def test_every_type_and_extra_states_are_saved(tmp_path: Path) -> None:
    model = odd()
    other: Any = scrambled(model)
    other["counting"].seen = 0
    trainers = [trainer_of(one, of_odd, SGD(one.parameters(), lr=0.1)) for one in (model, other)]
    trainers[0].run(Chunk(OWN, 1, 2))
    path = save(trainers[0], tmp_path / "state")
    resume(trainers[1], path)
    assert bits(other) == bits(model)
    assert other["counting"].seen == 7
    for trainer in trainers:
        trainer.run(Chunk(OWN, 1, 2))
    assert bits(other) == bits(model)


def test_an_extra_state_that_no_file_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 2), "counting": Counting({1, 2})})
    trainer = trainer_of(model, lambda model, batch: model["linear"](batch[0]).sum())
    with pytest.raises(StateFileError, match="The module counting keeps a set in its state"):
        save(trainer, tmp_path / "state")


class Refusing(Counting):
    """Takes back no state, as one whose form has changed since."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        raise KeyError("form")


class RefusingScheduler(ExponentialLR):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "refused" in state:
            raise TypeError("refused")
        super().load_state_dict(state)


@pytest.mark.parametrize("refuses", ["the module last", "the scheduler RefusingScheduler"])
def test_a_state_that_the_models_own_code_refuses_changes_nothing(refuses: str, tmp_path: Path) -> None:
    def made(seen: int, last: type[Counting] = Counting) -> tuple[Trainer, Any]:
        model = nn.ModuleDict({"linear": nn.Linear(4, 2), "first": Counting(seen), "last": last(seen)})
        own = SGD(model.parameters(), lr=0.1)
        loss = lambda model, batch: model["linear"](batch[0]).sum()  # noqa: E731
        return trainer_of(model, loss, own, lambda own: RefusingScheduler(own, 0.5)), model

    before, _ = made(5)
    if refuses.startswith("the scheduler"):
        before.live.scheduler.refused = True  # type: ignore[union-attr]
    path = save(before, tmp_path / "state")
    after, model = made(7, Refusing if refuses.startswith("the module") else Counting)
    weights, rates = bits(model), after.live.scheduler.state_dict()  # type: ignore[union-attr]
    with pytest.raises(StateFileError, match=f"cannot be resumed: {refuses} of rank 0 does not take back its state"):
        resume(after, path)
    assert (model["first"].seen, model["last"].seen) == (7, 7)
    assert bits(model) == weights
    assert after.live.scheduler.state_dict() == rates  # type: ignore[union-attr]


def test_step_hooks_are_not_lost_silently_with_attached_objects(tmp_path: Path) -> None:
    own = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"own": own}, path, 2**40) == ""
    own.register_step_post_hook(lambda *_: None)
    assert "loses its step hooks" in attach.save_objects({"own": own}, path, 2**40)
    assert not path.exists()


class Slowing(SGD):
    """Counts its updates, and keeps a function with a state of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.updates, sums = 0, dict[nn.Parameter, torch.Tensor]()

        def change(param: nn.Parameter) -> None:
            sums[param] = sums.get(param, torch.zeros_like(param)) + 1
            param.sub_(sums[param] / self.updates**2)

        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        for param in self.param_groups[0]["params"]:
            self.change(param)


def test_weights_that_share_memory_share_it_in_attached_objects_that_came_back(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data = net[0].weight.data
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"net": net}, path, 2**40) == ""
    one, other = attach.load_objects(path, opened())["net"]
    one.weight.data.fill_(5)
    assert torch.equal(other.weight, one.weight)


def test_functions_of_cells_that_came_back_have_the_variables_of_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = vars(sys.modules["__main__"])
    for name in ("SCALE", "half", "penalty", "rank"):
        monkeypatch.setitem(variables, name, None)  # to be gone again afterwards
    exec("SCALE, rank = 2, 0\ndef half(x): return x / 2\ndef penalty(x): return half(x) * SCALE + rank", variables)
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"penalty": variables["penalty"]}, path, 2**40) == ""
    for name in ("SCALE", "half", "penalty"):
        del variables[name]  # as in a rank that begins anew
    variables["rank"] = 1  # which the file of rank 0 does not know
    builtin = variables["__builtins__"]
    penalty = attach.load_objects(path, opened())["penalty"]
    assert variables["__builtins__"] is builtin
    assert penalty(2) == 3
    exec("SCALE = 10", variables)
    assert penalty(2) == 11


def test_what_a_person_holds_in_place_of_a_ranks_own_variables_comes_back(
    alone: Overheard,
) -> None:
    ours = {"loss": None, "rank": alone.rank, "size": alone.size, "device": torch.device("cpu")}
    assert attach.to_keep(["loss", None], ours) == {"loss": None}
    theirs = {"loss": None, "rank": 8, "size": (28, 28), "device": "cuda"}
    assert attach.to_keep(["loss", None], theirs) == theirs
    assert attach.to_keep([], {}) == {}
    same = {"rank": str(alone.rank), "size": np.int64(alone.size), "device": torch.device("cpu")}
    assert attach.to_keep([], same) == {}, "what rank 0 has of its own is no other rank's"


def test_what_names_rank_0s_gpu_names_the_ranks_own_when_it_comes_back(tmp_path: Path) -> None:
    def bring_back(held: dict[str, Any]) -> dict[str, Any]:
        assert attach.save_objects(held, tmp_path / "attached.pickle", 2**40) == ""
        return attach.load_objects(tmp_path / "attached.pickle", there)

    there: Any = SimpleNamespace(torch_device=torch.device("cuda:1"), exempt=nullcontext)
    held: dict[str, Any] = {"net": {torch.device("cuda:0"), torch.device("cpu"), torch.device("cuda")}}
    assert {str(one) for one in bring_back(held)["net"]} == {"cuda:1", "cpu", "cuda"}
    for before, after in (("cuda:0", "cuda:1"), ("cuda", "cuda"), ("cpu", "cpu")):
        assert bring_back({"device": before})["device"] == after


def test_what_only_an_optimizer_of_ones_own_has_comes_back_with_attached_objects(tmp_path: Path) -> None:
    own = Slowing((model := nn.Linear(2, 2)).parameters())
    own.step()
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"net": model, "own": own}, path, 2**40) == ""
    back = attach.load_objects(path, opened())
    own.step()
    back["own"].step()
    assert torch.equal(back["net"].weight, model.weight)


def test_what_an_optimizer_of_ones_own_counts_is_in_files_and_what_files_lack_is_told(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        model = nn.Linear(4, 2)
        return trainer_of(model, optimizer=Slowing(model.parameters()))

    before, after = trainer(), trainer()
    before.run(Chunk(OWN, 1, 3))
    resume(after, save(before, tmp_path / "state"))
    assert vars(after.live.optimizer)["updates"] == 3
    assert "values outside of its state (change)" in " ".join(before.info().notes)


def test_a_scheduler_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    own = SGD((model := nn.Linear(2, 2)).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5**step)
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"net": model, "own": own, "sched": scheduler}, path, 2**40) == ""
    back = attach.load_objects(path, opened())
    assert back["sched"].optimizer is back["own"]
    back["own"].step()
    back["sched"].step()
    assert back["own"].param_groups[0]["lr"] == 0.05


def test_after_a_restart_what_cells_froze_is_frozen_and_what_they_thawed_is_trained(tmp_path: Path) -> None:
    def net() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made[0].requires_grad_(False)
        return made

    before, after = trainer_of(net()), trainer_of(net())
    before.live.model[0].requires_grad_(True)  # type: ignore[index]
    before.live.model[2].bias.requires_grad_(False)  # type: ignore[index]
    before.live.model[1].eval()  # type: ignore[index]
    path = save(before, tmp_path / "state")
    restore.Checked(path, after, opened()).apply(after, after_restart=True)
    frozen = [name for name, param in after.live.model.named_parameters() if not param.requires_grad]
    assert frozen == ["2.bias"]
    assert [module.training for module in after.live.model.modules()] == [True, True, False, True]
    after = trainer_of(net())
    resume(after, path)  # which layers are trained is for whoever made this model to say
    assert [name for name, param in after.live.model.named_parameters() if not param.requires_grad] == [
        "0.weight",
        "0.bias",
    ]


def test_weights_have_the_steps_of_the_state_that_they_came_from_behind_them(tmp_path: Path) -> None:
    model: Any = nn.Linear(4, 2)
    trainer = trainer_of(model)
    trainer.run(Chunk(Settings(batch_size=2), 1, 3))
    path = save(trainer, tmp_path / "state")
    trainer.run(Chunk(Settings(batch_size=2), 1, 2))
    resume(trainer, path)
    trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    trainer.close()
    assert trainer_of(model).info().trained_before == 4


class Around(SGD):
    """Updates by way of another optimizer, which counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params := list(params), lr=0.1)
        self.inner = Slowing(params)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_what_only_an_inner_optimizer_has_comes_back_and_its_numbers_are_in_files(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        model = nn.Linear(4, 2)
        return trainer_of(model, optimizer=Around(model.parameters()))

    before, after = trainer(), trainer()
    before.run(Chunk(OWN, 1, 3))
    own: Any = before.live.optimizer
    resume(after, save(before, tmp_path / "state"))
    assert after.live.optimizer.inner.updates == own.inner.updates == 3  # type: ignore[attr-defined]
    path = tmp_path / "attached.pickle"
    assert attach.save_objects({"net": before.live.model, "own": own}, path, 2**40) == ""
    back = attach.load_objects(path, opened())
    own.step()
    back["own"].step()
    assert bits(back["net"]) == bits(before.live.model)


def test_an_extra_state_that_is_part_of_a_graph_is_taken_back(tmp_path: Path) -> None:
    class Averaging(nn.Linear):
        latest: Any = None

        def forward(self, x: Any) -> Any:
            self.latest = super().forward(x)
            return self.latest

        def get_extra_state(self) -> Any:
            return self.latest

        def set_extra_state(self, state: Any) -> None:
            self.latest = state

    models = Averaging(4, 2), Averaging(4, 2)
    before, after = (trainer_of(model, optimizer=SGD(model.parameters(), lr=0.1)) for model in models)
    before.run(Chunk(OWN, 1, 2))
    after.run(Chunk(OWN, 1, 2))
    resume(after, save(before, tmp_path / "state"))
    assert torch.equal(models[1].latest, models[0].latest)
