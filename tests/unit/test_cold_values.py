"""Models that ask for the values of tensors, which a dry step does not have: when they are built, or in each step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.engine.dry import run as runs
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.forecast import SEGMENT_BYTES, Kernels
from gpumem_nb.shared.settings import Settings

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
WIDTH, LENGTH, SAMPLES = 64, 512, 32


class Plain(nn.Module):
    """Attention keeps scores on the CPU, and none on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, rate, batch_first=True) for rate in self.rates()
        )

    def rates(self) -> list[float]:
        return [0.05, 0.1]

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Rates(Plain):
    """As vision transformers have them."""

    def rates(self) -> list[float]:
        return [rate.item() for rate in torch.linspace(0.05, 0.1, 2)]


class Bounded(Plain):
    def __init__(self) -> None:
        super().__init__()
        weight = next(self.parameters())
        while bool(weight.abs().max() > 0.01):
            with torch.no_grad():
                weight.mul_(0.5)


class Checked(Rates):
    def forward(self, inputs: Tensor) -> Tensor:
        if bool(inputs.isnan().any()):
            raise AssertionError
        return super().forward(inputs)


class Counted(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)[:, : int((inputs[0, :, 0] == 0).sum())]


def samples() -> list[Tensor]:
    return [torch.zeros(LENGTH, WIDTH)] * 8


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def workload(model: Callable[[], nn.Module]) -> gm.Workload:
    return gm.Workload("mine", model, samples, mean)


@functools.cache
def predict(model: Callable[[], nn.Module]) -> Prediction:
    predicted = gm.predict(workload(model), gpu="A100-40GB", batch_size=SAMPLES)
    assert isinstance(predicted, Prediction)
    return predicted


@pytest.mark.parametrize(
    ("model", "line"),
    [(Rates, "rate.item() for rate in torch.linspace"), (Bounded, "while bool(weight.abs().max() > 0.01)")],
)
def test_a_model_that_asks_when_it_is_built_takes_its_step_without_memory(
    model: Callable[[], nn.Module], line: str
) -> None:
    plain, asks = predict(Plain), predict(model)
    assert abs(asks.live_peak_bytes - plain.live_peak_bytes) <= 64  # a single number may be let go of a moment later
    assert asks.reserved_peak_bytes == pytest.approx(plain.reserved_peak_bytes, abs=SEGMENT_BYTES)
    assert "from a step on fake tensors, after building the model with memory for its weights" in asks.basis
    assert "aten._local_scalar_dense.default needs the values of a tensor" in asks.basis
    assert "test_cold_values.py, line" in asks.basis
    assert line in asks.basis


@pytest.mark.parametrize("model", [Checked, Counted])
def test_a_model_that_asks_in_each_step_takes_small_ones_on_the_cpu(model: Callable[[], nn.Module]) -> None:
    plain, asks = predict(Plain), predict(model)
    assert "from steps on the CPU with batch_size 2 and 4. The forward cannot be run" in asks.basis
    assert "in forward: " in asks.basis
    assert asks.live_peak_bytes == pytest.approx(plain.live_peak_bytes, rel=0.15)  # no scores are kept there either
    assert asks.low_bytes <= plain.reserved_peak_bytes <= asks.high_bytes


class Cut(Plain):
    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        assert lengths is not None
        return super().forward(inputs[:, : int(lengths.max())])


def test_steps_on_the_cpu_have_the_values_of_the_samples() -> None:
    def said(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(*batch).mean()  # type: ignore[no-any-return]

    texts = gm.Workload("texts", Cut, lambda: [(sample, LENGTH) for sample in samples()], said)
    found = gm.predict(texts, gpu="A100-40GB", batch_size=SAMPLES)
    assert isinstance(found, Prediction)
    assert found.live_peak_bytes == pytest.approx(predict(Plain).live_peak_bytes, rel=0.15)


def run(model: Callable[[], nn.Module]) -> runs.Run:
    return runs.Run(workload(model), Batches(samples()), Settings(batch_size=2), Kernels(True, 0))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_model_that_is_too_large_for_steps_on_the_cpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_REAL_BYTES", 1000)
    with (
        run(Checked) as asks,
        pytest.raises(WorkloadError, match=r"Small steps on the CPU would need more than.*%hvd_start"),
    ):
        asks.take()
    with run(Rates) as asks:  # needs none
        asks.take()


class TooLarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.empty(2**28) for _ in range(5))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 5)]


def test_a_model_whose_weights_have_no_room_says_what_to_do() -> None:
    with pytest.raises(WorkloadError) as refused:
        predict(TooLarge)
    said = str(refused.value)
    assert "needs the values of a tensor, which a dry run does not have (test_cold_values.py, line" in said
    assert "A dry run may take at most 4.0 GiB. Let the constructor do without that value, or start ranks" in said
