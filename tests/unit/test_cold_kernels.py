"""What CUDA's kernels and its autocast keep for backward, and what a dry step knows of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.engine.dry import kernels
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.step import DryStep
from gpumem_nb.internals.fake_internals import fake_mode
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.shared.forecast import Kernels
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload

from .test_cold_model import keeping

HEADS, LENGTH, HEAD, WIDTH, ROWS = 2, 64, 16, 8, 4


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_cross_entropy_under_autocast_is_that_of_cuda() -> None:
    """Its log_softmax asks for the type of the logits (ATen/native/LossNLL.cpp); the CPU's autocast casts the whole."""
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.extend([tensor.dtype] * (tensor.numel() == ROWS * WIDTH))
        return tensor

    installed = kernels.install_autocast()
    try:
        with fake_mode(), torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, keep):
            logits = nn.Linear(WIDTH, WIDTH)(torch.zeros(ROWS, WIDTH, requires_grad=True))
            kept.clear()
            nn.functional.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long))
    finally:
        del installed
    assert sorted(map(str, kept)) == ["torch.bfloat16", "torch.float32"]


def kept_with_bias(bias: Callable[[], Tensor]) -> int:
    """Elements of the largest tensor that attention keeps, and makes a gradient of."""
    with keeping(ampere=True) as kept:
        query = torch.zeros(1, HEADS, LENGTH, HEAD, requires_grad=True)
        given = bias()
        nn.functional.scaled_dot_product_attention(query, query, query, given).sum().backward()
        scores = HEADS * LENGTH * LENGTH
        return sum(elements == scores for elements in kept)


def test_a_bias_that_was_turned_keeps_the_scores() -> None:
    side_by_side = kept_with_bias(lambda: torch.zeros(1, HEADS, LENGTH, LENGTH, requires_grad=True))
    turned = kept_with_bias(lambda: torch.zeros(LENGTH, LENGTH, HEADS, requires_grad=True).permute(2, 0, 1)[None])
    assert (side_by_side, turned) == (1, 2)  # the bias itself; and the weights of attention


Layer = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True, "dropout": 0.1}, {"bias": False}])
def test_recurrent_layers_keep_a_reserve(kind: Layer, gates: int, options: dict[str, Any]) -> None:
    directions = 1 + options.get("bidirectional", False)
    with keeping(ampere=True) as kept:
        layer = kind(WIDTH, HEAD, 2, **options)
        inputs = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
        output, state = layer(inputs)
        (output.sum() + (state[0] if kind is nn.LSTM else state).sum()).backward()
        assert output.shape == (ROWS, LENGTH, HEAD * directions)
        assert inputs.grad is not None
        assert inputs.grad.shape == inputs.shape
        assert all(param.grad is not None and param.grad.shape == param.shape for param in layer.parameters())
    dropped = directions if "dropout" in options else 0
    assert max(kept) == (2 * directions * (gates + 1) + dropped) * ROWS * LENGTH * HEAD


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_recurrent_layers_under_autocast_keep_16_bits_and_give_gradients_of_the_weights_type() -> None:
    installed = kernels.install_autocast()
    try:
        with keeping(ampere=True), torch.autocast("cpu", torch.bfloat16):
            layer = nn.LSTM(WIDTH, HEAD)
            output, _ = layer(torch.zeros(LENGTH, ROWS, WIDTH))
            output.float().sum().backward()
            assert output.dtype is torch.bfloat16
            assert {param.grad.dtype for param in layer.parameters() if param.grad is not None} == {torch.float32}
    finally:
        del installed


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_reach_the_layer_that_gave_a_recurrent_one_its_state(kind: Layer) -> None:
    with keeping(ampere=True):
        encoder, decoder, inputs = kind(WIDTH, HEAD), kind(WIDTH, HEAD), torch.zeros(LENGTH, ROWS, WIDTH)
        decoder(inputs, encoder(inputs)[1])[0].sum().backward()
        assert all(param.grad is not None for param in encoder.parameters())


def test_what_a_recurrent_layer_gives_may_be_written_into() -> None:
    with keeping(ampere=True):
        output, _ = nn.LSTM(WIDTH, HEAD, batch_first=True)(torch.zeros(ROWS, LENGTH, WIDTH))
        output += 1
        output.sum().backward()
        assert output.shape == (ROWS, LENGTH, HEAD)


def test_flash_does_not_take_queries_that_are_turned() -> None:
    with keeping(ampere=True) as kept:
        given = torch.zeros(1, HEADS, HEAD, LENGTH, dtype=torch.bfloat16, requires_grad=True).transpose(-1, -2)
        nn.functional.scaled_dot_product_attention(given, given, given).sum().backward()
    assert max(kept) >= HEADS * LENGTH * LENGTH


def test_recurrent_layers_with_projections_go_step_by_step() -> None:
    with keeping(ampere=True) as kept:
        layer = nn.LSTM(WIDTH, HEAD, proj_size=4)
        output, _ = layer(torch.zeros(LENGTH, ROWS, WIDTH))
        output.sum().backward()
        assert output.shape == (LENGTH, ROWS, 4)
    assert len(kept) > LENGTH


def taken(forward: Callable[[Tensor], Any]) -> Any:
    """What ``forward`` says of its inputs in a dry step."""
    rows = [torch.zeros(LENGTH) for _ in range(ROWS)]
    said: list[Any] = []

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(LENGTH, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            said.append(forward(inputs))
            return self.linear(inputs)  # type: ignore[no-any-return]

    workload = Workload("asking", Asking, lambda: rows, lambda model, batch: model(batch).mean())
    DryStep(workload, Batches(rows), Settings(optimizer="sgd"), Kernels(True, 0)).trace(2)
    return said[-1]


def test_what_follows_from_sizes_is_known() -> None:
    def in_a_row(inputs: Tensor) -> bool:
        positions = torch.arange(inputs.shape[1])[None]
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        packed += 0
        return bool((packed[:, -1] == 0).all())

    assert taken(in_a_row) is True
    assert taken(lambda inputs: torch.tensor([3, 4])[1].item()) == 4
    assert taken(lambda inputs: torch.arange(3).tolist()) == [0, 1, 2]
    assert taken(lambda inputs: torch.equal(torch.arange(3), torch.arange(3))) is True
    assert taken(lambda inputs: len(torch.arange(4)[torch.arange(4) > 1])) == 2
    assert taken(lambda inputs: torch.arange(LENGTH).unsqueeze_(0).shape) == (1, LENGTH)


def written_over(inputs: Tensor) -> int:
    places = torch.arange(2 * LENGTH).view(2, LENGTH)
    places[:] = inputs.long()
    return places.tolist()[0][0]  # type: ignore[no-any-return]


def written_by_name(inputs: Tensor) -> int:
    places = torch.arange(LENGTH)
    torch.add(places, inputs.long()[0], out=places)
    return int(places.sum())


@pytest.mark.parametrize(
    "forward",
    [
        lambda inputs: int(inputs.long().sum()),
        lambda inputs: int((torch.arange(LENGTH) + inputs.long()).sum()),
        lambda inputs: int(torch.randint(9, (3,)).sum()),
        written_over,
        written_by_name,
        lambda inputs: int(torch.zeros(3, dtype=torch.long).scatter_add_(0, inputs.long()[0], inputs.long()[0]).sum()),
    ],
    ids=["a sample", "a sum with a sample", "drawn", "written over", "written by name", "counted"],
)
def test_what_follows_from_samples_or_is_drawn_is_not_known(forward: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Exception, match=r"_local_scalar_dense"):
        taken(forward)


def test_a_block_that_asks_what_is_known_is_recomputed() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(LENGTH, LENGTH)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs[:, : int(torch.arange(inputs.shape[1]).max()) + 1])  # type: ignore[no-any-return]

    rows = [torch.zeros(LENGTH) for _ in range(ROWS)]
    model = nn.Sequential(*(Asking() for _ in range(3)))
    workload = Workload("asking", lambda: model, lambda: rows, lambda model, batch: model(batch).mean())
    settings = Settings(optimizer="sgd", checkpointing="blocks")
    assert "recomputation" in DryStep(workload, Batches(rows), settings, Kernels(True, 0)).trace(2).phases


def test_a_causal_model_without_padding_needs_no_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=WIDTH, n_head=HEADS, vocab_size=16, n_positions=256, use_cache=False, resid_pdrop=0.0
    )

    def data() -> list[dict[str, Tensor]]:
        ids = torch.zeros(256, dtype=torch.long)
        return [{"input_ids": ids, "labels": ids}] * ROWS

    workload = Workload("gpt2", lambda: transformers.GPT2LMHeadModel(config), data, lambda m, batch: m(**batch).loss)
    found = gm.predict(workload, gpu="A100-40GB", batch_size=ROWS)
    assert isinstance(found, Prediction)
    assert found.categories["activations"] < ROWS * 256 * 256 * 4  # of one matrix of scores, or mask, of each sample
