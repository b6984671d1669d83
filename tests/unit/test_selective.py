"""``checkpointing=selective``: gradients to the bit, as much kept as the budget says, on models of many kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn
from torch.nn import functional

from gpumem_nb.engine.replay.checkpointing import Checkpointing, find_blocks
from gpumem_nb.engine.replay.operators import Result, Results
from gpumem_nb.engine.replay.recomputing import Recomputing
from gpumem_nb.engine.replay.selective import Learned, Selection, chosen
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload

WIDTH, HEADS = 32, 4
Model = Callable[[], nn.Module]


class Attending(nn.Module):
    """As small language models are written."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(mixed))
        x = x + self.dropout(self.narrow(functional.gelu(self.wide(self.second(x)))))
        return x


class Convolving(nn.Module):
    """Batch norm, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu_(self.second(self.first(x)) + x)


class Odd(nn.Module):
    """Draws numbers, decides by a value, writes into parts of results, and counts its calls."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.linear(x).exp()
        hidden = hidden.sin() if float(hidden.mean()) > 0.5 else hidden.cos()
        places = torch.empty_like(order := hidden.detach()[0, 0].argsort())
        places[order] = torch.arange(len(order))
        noisy = hidden[..., order][..., places] * torch.rand_like(hidden)
        noisy[:, ::2] *= 0.5
        with torch.no_grad():
            self.mean.lerp_(noisy.mean((0, 1)), 0.1)
        return x + torch.cat([noisy[..., :5].sigmoid(), noisy[..., 5:].tanh()], -1) * self.calls - self.mean


class Attention(nn.Module):
    """One tensor as several arguments, and a recurrent layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x)
        x = x + self.recurrent(mixed)[0]
        return x


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], depth: int = 4, times: int = 1) -> None:
        super().__init__()
        self.blocks, self.times = nn.ModuleList(block() for _ in range(depth)), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


def rows() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 16, WIDTH)


def of_words(config: Any, kind: Any = transformers.AutoModelForCausalLM) -> Callable[[], tuple[Model, Any, Any]]:
    def made() -> tuple[Model, Any, Any]:
        torch.manual_seed(3)
        config.use_cache = False  # as checkpointing does: a cache gives keys another layout, and so other bits
        words = torch.randint(5, 90, (4, 24))
        loss = lambda model, batch: model(input_ids=batch, labels=batch).loss  # noqa: E731
        return lambda: kind.from_config(config), words, loss

    return made


def plain(model: Model, batch: Callable[[], Tensor] = rows) -> Callable[[], tuple[Model, Any, Any]]:
    return lambda: (model, batch(), lambda model, batch: model(batch).square().mean())


SMALL: dict[str, Any] = {"vocab_size": 97, "num_hidden_layers": 4, "num_attention_heads": 4}
FIRST: dict[str, Any] = {"decoder_start_token_id": 0}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
CASES: dict[str, Callable[[], tuple[Model, Any, Any]]] = {
    "attention": plain(lambda: Stack(Attending)),
    "dropout": plain(lambda: Stack(lambda: Attending(0.1))),
    "convolutions": plain(lambda: Stack(Convolving), lambda: rows().view(4, 4, 16, 8)),
    "odd": plain(lambda: Stack(Odd)),
    "several arguments": plain(lambda: Stack(Attention, 3)),
    "shared": plain(lambda: Stack(Attending, 2, times=3)),
    "gpt2": of_words(transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=4, n_head=4)),
    "llama": of_words(
        transformers.LlamaConfig(hidden_size=32, intermediate_size=88, num_key_value_heads=2, pad_token_id=0, **SMALL)
    ),
    "bert": of_words(
        transformers.BertConfig(hidden_size=32, intermediate_size=64, **EAGER, **SMALL),
        transformers.AutoModelForMaskedLM,
    ),
    "t5": of_words(
        transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, **FIRST),
        transformers.AutoModelForSeq2SeqLM,
    ),
}


def selective(model: nn.Module, budget: float | None, precision: str = "fp32") -> Recomputing:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing is made anew")

    parts = Recomputing(model, Workload("plain", none, none, none))
    kind = {} if budget is None else {"checkpointing": "selective", "activation_budget": budget}
    parts.set_checkpointing(Settings(precision=precision, **kind))
    return parts


def gradients(case: str, budget: float | None, precision: str = "fp32") -> list[Tensor]:
    """Return what two steps give: losses, gradients, and buffers afterwards."""
    make, batch, loss = CASES[case]()
    torch.manual_seed(1)
    model = make().train()
    parts, state = selective(model, budget, precision), ForwardState([model])
    torch.manual_seed(7)
    losses = [step(model, parts, state, lambda: loss(model, batch), precision) for _ in range(2)]
    trained = [param.grad for param in model.parameters() if param.grad is not None]
    return [*losses, *trained, *(buffer.clone() for buffer in model.buffers())]


def step(
    model: nn.Module, parts: Recomputing, state: ForwardState, loss: Callable[[], Tensor], precision: str = "fp32"
) -> Tensor:
    """Take one, for another time if it was only to learn."""
    while True:
        before = ForwardUndo(state)
        try:
            with parts.on():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    value = loss()
                parts.forward_ended()
                value.backward()
                parts.finished()
            return value.detach()
        except Learned:
            parts.abandon()
        before.undo()


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_buffers_are_the_same_to_the_bit(case: str) -> None:
    expected = gradients(case, None)
    for budget in (0.3, 0.9) if case != "attention" else (0, 0.1, 0.5, 1):
        found = gradients(case, budget)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("case", ["dropout", "convolutions", "bert", "llama"])
def test_they_are_the_same_with_16_bits(case: str) -> None:
    expected = gradients(case, None, "bf16")
    found = gradients(case, 0.5, "bf16")
    assert all(map(torch.equal, found, expected))


def test_what_costs_most_for_its_bytes_is_kept_first_and_a_budget_is_not_exceeded() -> None:
    cheap, dear, random = Result(100, 200.0), Result(50, 5000.0), Result(10, 9e9, can_be_kept=False)
    block = Results({("cheap", 0): cheap, ("dear", 0): dear, ("random", 0): random}, 160)
    first, last = chosen([block, block], 0.2)
    assert (dict(first), set(last)) == ({}, {("dear", 0)})
    first, last = chosen([block, block], 0.35)
    assert set(first) == set(last) == {("dear", 0)}
    first, last = chosen([block, block], 0.99)
    assert set(first) == set(last) == {("dear", 0), ("cheap", 0)}


@pytest.mark.parametrize("case", ["attention", "convolutions", "llama"])
def test_what_is_kept_costs_nearly_as_much_as_in_an_exact_answer(case: str) -> None:
    make, batch, loss = CASES[case]()
    torch.manual_seed(1)
    model = make().train()
    blocks = learned(model, lambda: loss(model, batch))
    results = [result for block in blocks for result in block.by_operator.values() if result.can_be_kept]
    sizes, costs = np.array([one.nbytes for one in results]), np.array([one.cost for one in results])
    for tenth in range(1, 10):
        room = tenth / 10 * sum(block.saved_bytes for block in blocks)
        kept = [result for of_block in chosen(blocks, tenth / 10) for result in of_block.values()]
        assert sum(one.nbytes for one in kept) <= room
        exact = milp(-costs, constraints=LinearConstraint(sizes[None], ub=room), integrality=1, bounds=Bounds(0, 1))
        assert sum(one.cost for one in kept) >= -0.97 * exact.fun


def learned(model: nn.Module, loss: Callable[[], Tensor]) -> list[Results]:
    """What the operators of the model's blocks give."""
    selection = Selection()
    checkpointing = Checkpointing(model, find_blocks(model), "selective", selection)
    checkpointing.take_off()
    with checkpointing.on():
        loss()
        with pytest.raises(Learned):
            selection.forward_ended()
    checkpointing.remove()
    return selection.results


def test_a_graph_can_be_run_backward_twice() -> None:
    torch.manual_seed(1)
    model = Stack(lambda: Attending(0.1))
    parts, state, batch = selective(model, 0.5), ForwardState([model]), rows()
    step(model, parts, state, lambda: model(batch).square().mean())
    with parts.on():
        value = model(batch).square().mean()
        parts.forward_ended()
        once = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        twice = torch.autograd.grad(value, list(model.parameters()))
    assert all(map(torch.equal, once, twice))


class Routed(nn.Module):
    """Writes in place as often as the input says, and reads in between where it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        way = int(x.detach()[0, 0, 0])
        hidden = self.linear(x)
        seen = hidden.exp() if way == 7 else 0
        for _ in range(way % 4):
            hidden = hidden.mul_(0.9)
        if way == 5:
            seen, hidden = hidden + 1, hidden.relu_()
        x = torch.cat([torch.full_like(x[..., :1], way), (hidden.tanh() + seen)[..., 1:]], -1)
        return x


@pytest.mark.parametrize("ways", [(1, 2, 3, 0), (2, 5, 1), (1, 7, 5, 2), (3, 7, 1), (0, 1, 5, 7)])
def test_a_forward_that_takes_another_way_than_the_one_learned_from_is_the_same(ways: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    plain = Stack(Routed, 3)
    model = copy.deepcopy(plain)
    parts, state = selective(model, 0.95), ForwardState([model])
    for way in ways:
        batch = rows()
        batch[..., 0] = way
        for one in (plain, model):
            one.zero_grad()
        plain(batch).square().mean().backward()
        step(model, parts, state, lambda batch=batch: model(batch).square().mean())  # type: ignore[misc]
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_a_result_that_is_changed_in_place_after_its_block_is_refused() -> None:
    torch.manual_seed(1)
    model = Stack(Attending, 2)
    parts, state, batch = selective(model, 0.9), ForwardState([model]), rows()
    step(model, parts, state, lambda: model(batch).square().mean())
    seen: list[Tensor] = []
    model.blocks[0].get_submodule("qkv").register_forward_hook(lambda *told: seen.append(told[-1]))

    def loss() -> Tensor:
        value: Tensor = model(batch).square().mean()
        with torch.no_grad():
            seen[0].zero_()
        return value

    with pytest.raises(WorkloadError, match="changed in place"):
        step(model, parts, state, loss)


def test_what_is_compiled_is_refused() -> None:
    model = Stack(Attending, 2)
    model.blocks[1].get_submodule("wide").compile()
    with pytest.raises(WorkloadError, match=r"torch.compile has joined those of the Linear. Use checkpointing=blocks"):
        selective(model, 0.5)
