"""What torch adds up in place, but not on fake tensors: live bytes of dry steps and of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.virtual_gpu import MIB, on_virtual_gpu

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

pytestmark = pytest.mark.usefixtures("process_with_a_virtual_gpu")

ROWS, WIDTH = 1024, 512
TABLE_BYTES = ROWS * WIDTH * 4
Function = Callable[["Tensor"], "Tensor"]


def rows() -> list[Any]:
    import torch

    return [torch.zeros(WIDTH) for _ in range(8)]


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def applied(function: Function) -> Callable[[], nn.Module]:
    """A model of one table, to which this is applied."""
    import torch
    from torch import nn

    class Applied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(ROWS, WIDTH))

        def forward(self, inputs: Tensor) -> Tensor:
            return function(self.table) * inputs[0]

    return Applied


def real_peak_bytes(gpu: VirtualGPU, model: Callable[[], nn.Module], micro_batches: int) -> int:
    """Of forward and backward, without anything that watches operators."""
    import torch

    made, batch = model(), torch.zeros(2, WIDTH)
    held = gpu.reading().live_bytes
    gpu.reset_peak()
    for _ in range(micro_batches):
        mean(made, batch).backward()
    return gpu.reading().live_peak_bytes - held


def dry_peak_bytes(model: Callable[[], nn.Module], micro_batches: int) -> int:
    import gpumem_nb as gm
    from gpumem_nb.engine.dry.batches import Batches
    from gpumem_nb.engine.dry.step import DryStep
    from gpumem_nb.shared.forecast import Kernels
    from gpumem_nb.shared.settings import Settings

    settings = Settings(optimizer="sgd", optimizer_impl="loop", accumulation_steps=micro_batches)
    workload = gm.Workload("mine", model, rows, mean)
    trace = DryStep(workload, Batches(rows()), settings, Kernels(True, 0)).trace(2)
    return int(trace.change.cumsum().max())


def compare(gpu: VirtualGPU, *functions: Function, micro_batches: int = 1) -> None:
    for place, function in enumerate(functions):
        model = applied(function)
        real, dry = real_peak_bytes(gpu, model, micro_batches), dry_peak_bytes(model, micro_batches)
        assert abs(dry - real) < TABLE_BYTES / 8, (place, dry / MIB, real / MIB)


@on_virtual_gpu
@pytest.mark.full
def test_gradients_of_branches_are_added_up_in_place(gpu: VirtualGPU) -> None:
    import torch

    compare(
        gpu,
        lambda table: table.sin() + table.cos() + table.tanh() + table.sigmoid(),
        lambda table: (table * 2 + (table * 2).sin()).tanh() + table,
        lambda table: torch.stack([table * 2, table * 3]).sum(0),
        lambda table: table[0] + table[1] + table[2],
    )


@on_virtual_gpu
def test_gradients_of_micro_batches_are_added_up_in_place(gpu: VirtualGPU) -> None:
    compare(gpu, lambda table: table.sin() + table.cos(), micro_batches=3)


@on_virtual_gpu
def test_a_gradient_that_is_a_view_is_not_added_to(gpu: VirtualGPU) -> None:
    compare(
        gpu,
        lambda table: -table + table.view(-1).neg().view(ROWS, WIDTH),
        lambda table: table.abs().sum(0) + table.t().neg().sum(1),
    )


@on_virtual_gpu
def test_what_is_looked_up_is_written_in_place(gpu: VirtualGPU) -> None:
    import torch

    few = torch.arange(8)
    compare(
        gpu,
        lambda table: table[few].sum() + table,
        lambda table: table.index_select(0, few).sum() * table.sum(0),
        lambda table: table.gather(0, few.unsqueeze(1).expand(8, WIDTH)),
        lambda table: table.topk(2, 0)[0],
    )


@on_virtual_gpu
def test_what_a_formula_adds_up_stays_apart(gpu: VirtualGPU) -> None:
    from torch.nn import functional

    compare(
        gpu,
        functional.normalize,
        lambda table: functional.cosine_similarity(table, table.sin(), 0),
        lambda table: table.logsumexp(0) + table.sin(),
        lambda table: table * table,
    )


@on_virtual_gpu
def test_the_gradient_of_a_tied_table_comes_from_two_places(gpu: VirtualGPU) -> None:
    import torch
    from torch import nn

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.head = nn.Linear(WIDTH, ROWS, bias=False)
            self.head.weight = self.table.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.table(torch.zeros(8, dtype=torch.long)))  # type: ignore[no-any-return]

    real, dry = real_peak_bytes(gpu, Tied, 1), dry_peak_bytes(Tied, 1)
    assert abs(dry - real) < TABLE_BYTES / 8
    assert round(real / TABLE_BYTES) == 3  # that of the head came through a view, so their sum is a third table
