"""What one block more of a model would take, by a recorded step."""

from __future__ import annotations

import time

import pytest
from torch import Tensor, nn

from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream
from tests.unit.test_questions import asked

pytestmark = pytest.mark.usefixtures("alone")


def block(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.Linear(inner, width))


class Table(nn.Linear):
    """Much larger than what is used of it."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight[:100])


@pytest.mark.parametrize(("frozen", "each"), [("0", (4.0, 5.5)), ("1", (1.0, 1.1)), ("none", (4.0, 5.5))])
def test_a_block_more_takes_gradients_and_state_of_its_own_where_it_is_trained(
    gpu: VirtualGPU, frozen: str, each: tuple[float, float]
) -> None:
    def network() -> nn.Module:
        net = nn.Sequential(
            Table(4, 20_000, bias=False), nn.Sequential(*(block(100, 100) for _ in range(4))), nn.Linear(100, 4)
        )
        for name, param in net.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        return net

    trained = Trainer(Workload("deep", network, rows, loss), stream(), gpu, time.time())
    settings = Settings(batch_size=2, optimizer="adam", optimizer_impl="fused")
    size = sum(param.nbytes for param in block(100, 100).parameters())
    found = asked(trained, settings).of[0].block_bytes
    assert found is not None
    assert each[0] * size <= found <= each[1] * size


class Residual(nn.Module):
    """Adds up what its blocks give by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 500)
        self.blocks = nn.ModuleList(block(500, 20) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.stem(rows)
        for block in self.blocks:
            found = found + block(found).tanh()
        return found


def test_a_block_more_takes_what_is_kept_beside_it(gpu: VirtualGPU) -> None:
    trained = Trainer(Workload("residual", Residual, rows, loss), stream(), gpu, time.time())
    found = asked(trained, Settings(batch_size=64, optimizer="sgd")).of[0].block_bytes
    beside, weights = 2 * 64 * 500 * 4, sum(param.nbytes for param in block(500, 20).parameters())
    assert found is not None
    assert beside + weights <= found <= 1.5 * (beside + weights)
