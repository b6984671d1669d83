"""``optimizer=adamw8bit``: AdamW whose moments have 8 bits, made of torch's and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from gpumem_nb.engine.step import optimizers
from gpumem_nb.engine.step.dry_update import AskedUpdate, CannotBeForeseen, foresee
from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.optimizer_state import Replicas
from gpumem_nb.internals import bitsandbytes_internals
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.knobs import update as update_knobs
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload, WorkloadInfo


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))  # of the second layer all is small


def loss(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch[0])
    return output.square().mean()


def live() -> LiveModel:
    return LiveModel(Workload("net", net, lambda: TensorDataset(torch.ones(2, 96)), loss), opened())


def trained(model: LiveModel, steps: int) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        found = loss(model.model, [torch.randn(16, 96)])
        found.backward()
        model.optimizer.step()
        model.step_counted(False)
        model.zero_grad()
        losses.append(found.item())
    return losses


@pytest.fixture(autouse=True)
def there() -> None:
    pytest.importorskip("bitsandbytes")


def test_flips_go_on_from_the_moments_there_are_and_come_back_to_the_bit_before_a_step() -> None:
    model = live()
    trained(model, 5)
    exact = {
        param: {name: value.clone() for name, value in kept.items()} for param, kept in model.optimizer.state.items()
    }
    model.apply(Settings(optimizer="adamw8bit"))
    states = list(model.optimizer.state.values())
    assert [state["state1"].dtype for state in states] == [torch.uint8, *[torch.float32] * 3]
    assert {state["step"] for state in states} == {5}
    model.apply(Settings())
    for param, kept in model.optimizer.state.items():
        assert all(torch.equal(value, exact[param][name]) for name, value in kept.items())

    model.apply(Settings(optimizer="adamw8bit"))
    trained(model, 1)
    model.apply(Settings())
    for kept in model.optimizer.state.values():
        assert kept["step"].item() == 6
        assert kept["exp_avg"].abs().max() > 0
        assert (kept["exp_avg_sq"] >= 0).all()


OTHERS = [["sgd", "adamw8bit"], ["adamw8bit", "sgd", "adamw8bit"], ["adamw8bit", "adamw", "sgd", "adamw8bit"]]


@pytest.mark.parametrize("path", OTHERS)
def test_no_state_is_lost_by_way_of_another_optimizer_without_a_step(path: list[str]) -> None:
    straight, around = live(), live()
    for model in (straight, around):
        trained(model, 5)
    for name in path:
        around.apply(Settings(optimizer=name))
    straight.apply(Settings(optimizer="adamw8bit"))
    assert trained(around, 3) == trained(straight, 3)
    around.apply(Settings(optimizer="sgd"))
    around.apply(Settings())
    assert {kept["step"].item() for kept in around.optimizer.state.values()} == {8}


def test_steps_are_counted_in_fp32_whatever_default_type_a_cell_has_set() -> None:
    model = live()
    model.apply(Settings(optimizer="adamw8bit"))
    trained(model, 1)
    torch.set_default_dtype(torch.bfloat16)  # in which 257 is 256
    try:
        model.apply(Settings())
    finally:
        torch.set_default_dtype(torch.float32)
    assert {kept["step"].dtype for kept in model.optimizer.state.values()} == {torch.float32}


def test_eight_bits_are_as_near_as_eight_bits_can_be() -> None:
    model = live()
    trained(model, 5)
    before = {param: kept["exp_avg"].clone() for param, kept in model.optimizer.state.items()}
    eight = bitsandbytes_internals.adamw8bit(model.parameters, 1e-3)
    bitsandbytes_internals.in_8_bits(eight, dict(model.optimizer.state))
    back = torch.optim.AdamW(model.parameters)
    bitsandbytes_internals.in_32_bits(back, dict(eight.state))
    for number, param in enumerate(model.parameters):
        off = (back.state[param]["exp_avg"] - before[param]).abs().max()
        assert off <= (0.01 if number == 0 else 0) * before[param].abs().max()


def test_training_goes_on_as_with_adamw() -> None:
    torchs, eight = live(), live()
    eight.apply(Settings(optimizer="adamw8bit"))
    assert trained(eight, 12) == pytest.approx(trained(torchs, 12), rel=0.02)


def test_what_lacks_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    info = WorkloadInfo("net", 1, 4, 100, blocks=4)
    settings = Settings(optimizer="adamw8bit")
    with pytest.raises(InvalidInput, match=r"no adamw8bit with optimizer_impl=loop\. Use optimizer_impl=default\."):
        compatibility.check(compatibility.asked(settings, {"optimizer_impl": "loop"}, 2), info, 2)
    fused = compatibility.asked(Settings(optimizer_impl="fused"), {"optimizer": "adamw8bit"}, 2)
    assert fused.optimizer_impl == "default"
    monkeypatch.setattr(update_knobs, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"bitsandbytes, which is not installed.*%pip install bitsandbytes"):
        compatibility.check(settings, info, 2)


def test_weights_that_it_would_lay_out_anew_are_refused() -> None:
    def conv() -> nn.Module:
        net = nn.Conv2d(16, 64, 3)
        net.weight.data = net.weight.data.to(memory_format=torch.channels_last)
        return net

    model = LiveModel(Workload("net", conv, lambda: TensorDataset(torch.ones(2, 16, 5, 5)), loss), opened())
    with pytest.raises(WorkloadError, match=r"of shape \(64, 16, 3, 3\) lies otherwise.* Attach the model"):
        model.apply(Settings(optimizer="adamw8bit"))
    assert model.settings.optimizer == "adamw"
    model.model.requires_grad_(False)
    model.apply(Settings(optimizer="adamw8bit"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_weights_of_types_that_it_would_cut_to_fp32_are_refused(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(80, 80, dtype=dtype))]
    with pytest.raises(WorkloadError, match=r"of shape \(80, 80\) is (float64|complex64)\. Use optimizer=adamw"):
        optimizers.build(weights, Settings(optimizer="adamw8bit"))
    optimizers.build([weights[0], weights[1].requires_grad_(False)], Settings(optimizer="adamw8bit"))


def test_sparse_gradients_are_refused_in_a_sentence() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    optimizer = bitsandbytes_internals.adamw8bit(table.parameters(), 1e-3)
    table(torch.tensor([3])).sum().backward()
    with pytest.raises(WorkloadError, match=r"AdamW8bit needs dense gradients.* Use optimizer=sgd, or"):
        optimizers.update(optimizer, None, None, optimizer.step)


class _OwnForm(SGD):
    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return packed | {"state": {place: {"inside": kept} for place, kept in packed["state"].items()}}


class _Around(SGD):
    """Wraps another optimizer without being built as one, as timm's Lookahead does."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.inner = SGD(params, **options)
        self.param_groups, self.defaults, self.state = self.inner.param_groups, self.inner.defaults, self.inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("kind", [_OwnForm, _Around])
def test_an_optimizer_with_a_state_dict_of_its_own_form_is_stored_as_it_is(kind: type[SGD]) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1, momentum=0.9)
    optimizer.step()
    whole = Replicas(optimizer).gather()
    assert whole
    other = nn.Parameter(torch.ones(3))
    resumed = kind([other], lr=0.1, momentum=0.9)
    Replicas(resumed).scatter(whole)()
    assert torch.equal(resumed.state[other]["momentum_buffer"], torch.ones(3))


@torch.library.custom_op("gpumem_nb_tests::move", mutates_args={"weight"})
def _move(weight: Tensor, gradient: Tensor) -> None:
    weight.sub_((gradient * 2).mul_(0.1))  # which takes a copy that no one sees from outside


@_move.register_fake
def _(weight: Tensor, gradient: Tensor) -> None:
    return None


class _ByAnOperatorOfItsOwn(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                _move(param, param.grad)


def test_what_an_operator_of_another_library_takes_is_not_guessed() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with pytest.raises(CannotBeForeseen, match="gpumem_nb_tests::move is no operator of torch's"):
        foresee(AskedUpdate(_ByAnOperatorOfItsOwn([weight], lr=0.1)), torch.device("cpu"), lambda tensor: 0)
