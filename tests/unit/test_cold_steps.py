"""What a dry step holds, and that it holds the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.engine.dry import answer, scratch
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.step import DryStep
from gpumem_nb.memory.ledger.trace import CODE, Trace
from gpumem_nb.shared.categories import COMMUNICATION
from gpumem_nb.shared.forecast import Kernels
from gpumem_nb.shared.settings import Settings

from .test_cold_model import keeping

WIDTH, DEPTH = 64, 3


def rows() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % WIDTH) for index in range(8)]


def workload(model: Callable[[], nn.Module], data: Any = rows) -> gm.Workload:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].to(next(model.parameters()).dtype)
        return nn.functional.cross_entropy(model(inputs).float(), batch[1])

    return gm.Workload("mine", model, data, loss)


def dry_step(model: Callable[[], nn.Module], ranks: int = 2, bucket_mib: float = 4) -> DryStep:
    settings = Settings(optimizer="sgd", optimizer_impl="loop", bucket_mib=bucket_mib)
    return DryStep(workload(model), Batches(rows()), settings, Kernels(True, 1024), ranks)


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH)))


def sent_bytes(trace: Trace) -> int:
    """Of copies that are alive at once."""
    sent = trace.category == CODE[COMMUNICATION]
    of_sent = sent[abs(trace.event) - 1]
    phases = {trace.phases[phase] for phase in trace.phase[of_sent]}
    assert phases <= {"reduction"}
    return int(max([0, *(trace.change * of_sent).cumsum()]))


@pytest.mark.parametrize(("dtype", "bytes_a_weight"), [(torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 0)])
def test_gradients_of_16_bits_travel_as_copies_of_32(dtype: torch.dtype, bytes_a_weight: int) -> None:
    trace = dry_step(lambda: layers(dtype)).trace(2)
    assert sent_bytes(trace) == DEPTH * (WIDTH * WIDTH + WIDTH) * bytes_a_weight


def test_copies_of_32_bits_are_made_a_bucket_at_a_time_and_for_no_rank_alone() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(4)))

    assert sent_bytes(dry_step(model, bucket_mib=1e-6).trace(2)) == 2 * WIDTH * WIDTH * 4
    assert sent_bytes(dry_step(model, ranks=1).trace(2)) == 0


def test_gradients_that_do_not_lie_in_order_travel_as_copies() -> None:
    def model() -> nn.Module:
        first = nn.Linear(WIDTH, WIDTH, bias=False)
        first.weight = nn.Parameter(first.weight.detach().t())
        return nn.Sequential(first, nn.Linear(WIDTH, WIDTH))

    assert sent_bytes(dry_step(model).trace(2)) == WIDTH * WIDTH * 4


def test_weights_without_a_gradient_travel_as_zeros() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.frozen(self.used(inputs))  # type: ignore[no-any-return]

    assert sent_bytes(dry_step(Unused).trace(2)) == WIDTH * WIDTH * 4


def test_a_sparse_gradient_travels_as_a_table() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, WIDTH, sparse=True)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.table(inputs.long()).mean(1)  # type: ignore[no-any-return]

    assert sent_bytes(dry_step(Looked).trace(2)) == 100 * (WIDTH + 1) * 4


HEADS, SHARED, LENGTH, HEAD = 8, 2, 64, 16


def kept_by_grouped_attention(dtype: torch.dtype, ampere: bool, shared: int = SHARED) -> list[int]:
    """Elements of each tensor that attention keeps where heads share keys and values."""
    with keeping(ampere) as kept:
        query = torch.zeros(1, HEADS, LENGTH, HEAD, dtype=dtype, requires_grad=True)
        key = torch.zeros(1, shared, LENGTH, HEAD, dtype=dtype, requires_grad=True)
        attend = nn.functional.scaled_dot_product_attention
        attend(query, key, key, enable_gqa=True).sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape
    return kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_keeps_shared_keys_and_values_as_they_are(dtype: torch.dtype) -> None:
    kept = kept_by_grouped_attention(dtype, ampere=True)
    assert max(kept) == HEADS * LENGTH * HEAD
    assert kept.count(SHARED * LENGTH * HEAD) == 2
    assert kept.count(HEADS * LENGTH * HEAD) == 2  # query and result


@pytest.mark.parametrize(("dtype", "ampere"), [(torch.float32, True), (torch.float32, False), (torch.float16, False)])
def test_shared_keys_and_values_keep_scores_without_flash(dtype: torch.dtype, ampere: bool) -> None:
    assert max(kept_by_grouped_attention(dtype, ampere)) >= HEADS * LENGTH * LENGTH
    assert max(kept_by_grouped_attention(dtype, ampere, shared=HEADS)) < HEADS * LENGTH * LENGTH


def test_flash_takes_gradients_of_shared_keys_apart() -> None:
    query, key = (torch.zeros(1, heads, LENGTH, HEAD, dtype=torch.float16) for heads in (HEADS, SHARED))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    alone, shared = (sum(scratch.inside(backward, (query, query, one, one), None)) for one in (query, key))
    assert shared - alone == 2 * HEADS * LENGTH * HEAD * 2


def test_each_piece_inside_an_operator_finds_its_own_place() -> None:
    query = torch.zeros(1, HEADS, LENGTH, HEAD)
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    assert scratch.inside(backward, (query, query, query, query), None) == [
        4 * HEADS * LENGTH * HEAD,
        4 * HEADS * LENGTH,
    ]

    def trace(length: int) -> Trace:
        table = nn.Embedding(10, WIDTH)
        data = [(torch.zeros(length), 0)] * 8
        given = gm.Workload("mine", lambda: table, lambda: data, lambda model, batch: model(batch[0].long()).mean())
        return DryStep(given, Batches(data), Settings(optimizer="sgd"), Kernels(True, 1024)).trace(4)

    few, many = trace(700), trace(800)  # 2,800 indices are not sorted
    assert len(many.births.nonzero()[0]) - len(few.births.nonzero()[0]) == 8


def test_what_a_model_draws_is_the_same_in_each_step() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(30))

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.inside:
                if random.random() < 0.5:
                    inputs = layer(inputs)
                if np.random.rand() < 0.5:
                    inputs = inputs.tanh()
            return self.inside[0](inputs)  # type: ignore[no-any-return]

    before = random.getstate()
    first, second = (dry_step(Skipping).trace(2) for _ in range(2))
    assert list(first.change) == list(second.change)
    assert random.getstate() == before


def test_data_that_draws_is_the_same_in_each_prediction() -> None:
    def data() -> Any:
        lengths = int(torch.randint(10**4, ())), random.randrange(10**4), int(np.random.randint(10**4))
        return [tuple(map(torch.zeros, lengths))] * 4

    first, second = (answer._batches(workload(layers, data)).of(3) for _ in range(2))
    assert len(first) == 3
    assert [part.shape for part in first] == [part.shape for part in second]
