"""``precision=bf16_weights``: weights and gradients in bf16, updated in fp32 and rounded stochastically."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.utils.data import TensorDataset

from gpumem_nb.engine import cells
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step import pieces
from gpumem_nb.engine.step.narrowed import to_narrow
from gpumem_nb.engine.step.parts import Parts
from gpumem_nb.engine.step.pieces import BF16_WEIGHTS, why_not
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.step.trials import NO_CONFIGURATION
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.categories import GRADIENTS
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.unit.test_one_rank import alone as alone  # a fixture

pytestmark = pytest.mark.usefixtures("alone")
NARROW = Settings(precision="bf16_weights", batch_size=4)
WIDE = Settings(batch_size=4)


class Net(nn.Module):
    """A tied table, a convolution with a batch norm, and layers of which one is wider than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.deep, self.back = nn.Linear(8 * 6, 40), nn.Linear(40, 8 * 6, bias=False)
        self.head = nn.Linear(40, 8 * 6)
        self.head.weight = nn.Parameter(self.back.weight.detach().T.clone())
        self.tied = nn.Linear(40, 8 * 6)
        self.tied.weight = self.head.weight = nn.Parameter(torch.randn(48, 40) / 7)

    def forward(self, rows: Tensor) -> Tensor:
        flat = self.norm(self.first(rows)).flatten(1)
        hidden = self.deep(flat).tanh()
        found: Tensor = self.back(self.head(hidden).view(-1, 48)[:, :40]) + self.tied(hidden)
        return found


def seen_loss(seen: list[Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0])
        output: Tensor = model(batch[0]).float()
        return output.square().mean()

    return loss


def data() -> TensorDataset:
    return TensorDataset(torch.randn(64, 4, 6, generator=torch.Generator().manual_seed(3)))


def made(model: Callable[[], nn.Module] = Net, seen: list[Tensor] | None = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    workload = Workload("net", model, data, seen_loss([] if seen is None else seen), **more)
    return Trainer(workload, ShardedStream(*as_dataset(data()), rank=0, size=1), opened(), time.time())


def run(one: Trainer, settings: Settings, number: int, steps: int) -> list[float]:
    reply = one.run(Chunk(settings, number, steps))
    assert reply.failure is None, reply.failure
    return [sample.loss for sample in reply.samples if sample.loss is not None]


def part(one: Trainer, name: str) -> Any:
    """A layer of the model, or a weight in it."""
    found: Any = one.live.model
    for step in name.split("."):
        found = getattr(found, step)
    return found


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    pairs = ((value, other[name]) for name, value in one.items())
    return one.keys() == other.keys() and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def stays(one: Trainer, settings: Settings) -> Any:
    """Take a step under other settings and undo it, as questions do."""
    chunk = Chunk(settings, NO_CONFIGURATION, 1, trial=True)
    with one.aside(settings), one.trying(chunk) as why_not_applied:
        return one.try_step(why_not_applied, chunk).failure


def rounded(wide: Tensor, seed: int, step: int, place: int) -> Tensor:
    """What the page says, in NumPy: the last 16 bits of each number plus 16 random ones, and then cut off."""
    numbers = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {place}".encode()))
    drawn = torch.empty(-(-wide.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=numbers)
    random = drawn.numpy().view(np.uint16)[: wide.numel()].reshape(wide.shape).astype(np.uint32)
    cut = (wide.numpy().view(np.uint32) + random) >> 16 << 16
    return torch.from_numpy(cut.view(np.float32)).bfloat16()


def plainly(net: nn.Module, seed: int, batches: list[Tensor], accumulation: int, clip: float | None) -> Any:
    """An ordinary loop: matrices and kernels in bf16, AdamW on fp32 copies of them, random rounding."""
    net.train()
    weights = list(net.parameters())
    narrow = [weight.dim() > 1 for weight in weights]
    for weight, is_narrow in zip(weights, narrow, strict=True):
        weight.data = weight.data.bfloat16() if is_narrow else weight.data
    copies = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = AdamW(copies, lr=1e-3)
    losses = []
    for step in range(len(batches) // accumulation):
        total = torch.zeros(())
        for batch in batches[step * accumulation : (step + 1) * accumulation]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(batch).float().square().mean() / accumulation
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        for weight, wide in zip(weights, copies, strict=True):
            wide.data, wide.grad = weight.detach().float(), None if weight.grad is None else weight.grad.float()
            weight.grad = None
        optimizer.step()
        for place, (weight, wide, is_narrow) in enumerate(zip(weights, copies, narrow, strict=True)):
            weight.data = rounded(wide.detach(), seed, step, place) if is_narrow else wide.detach().clone()
    return losses, bits(net)


@pytest.mark.parametrize(
    "knobs", [{}, {"accumulation_steps": 2, "clip_norm": 0.01}, {"optimizer_impl": "fused"}], ids=["", "clip", "fused"]
)
def test_it_trains_as_a_plain_loop_with_that_rounding_to_the_bit(knobs: dict[str, Any]) -> None:
    seen = list[Tensor]()
    one = made(seen=seen)
    net = copy.deepcopy(one.live.model)
    settings = NARROW.replace(**knobs)
    found = run(one, settings, 1, 6)
    expected, weights = plainly(net, one.stream.seed, list(seen), settings.accumulation_steps, settings.clip_norm)
    if settings.optimizer_impl == "fused":  # whose kernel rounds otherwise in fp32
        assert found == pytest.approx(expected, rel=1e-2)
    else:
        assert found == expected
        assert same(bits(one.live.model), weights)


def test_what_is_narrow_and_what_stays() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.table = nn.Linear(4, 5), nn.LayerNorm(5), nn.Embedding(7, 5)
            self.sparse, self.recurrent = nn.Embedding(7, 5, sparse=True), nn.LSTM(5, 6)
            self.pair, self.long = nn.Bilinear(2, 3, 4), nn.Linear(3, 3).double()
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
            self.short, self.wave = nn.Linear(3, 3).half(), nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
            self.view = nn.Parameter(torch.zeros(4, 4))
            self.register_buffer("seen_as", self.view.detach()[:2])
            self.register_buffer("mean", torch.zeros(3, 3))

    net = Mixed()
    names = {id(value): name for name, value in net.named_parameters()}
    found = [names[id(weight)] for weight in to_narrow(Parts(net, lambda *_: None))]
    assert sorted(found) == ["linear.weight", "table.weight"]


def test_a_flip_that_is_tried_or_taken_back_before_a_step_leaves_weights_to_the_bit() -> None:
    one = made()
    run(one, WIDE, 1, 2)
    before = bits(one.live.model)
    for settings in (NARROW, NARROW.replace(optimizer="sgd")):
        assert stays(one, settings) is None
        assert same(bits(one.live.model), before)
    run(one, NARROW, 2, 0)
    narrow = bits(one.live.model)
    assert {name for name, value in narrow.items() if value.dtype is torch.bfloat16} >= {"deep.weight", "head.weight"}
    assert part(one, "head.weight") is part(one, "tied.weight")
    assert narrow["norm.weight"].dtype is narrow["deep.bias"].dtype is torch.float32
    deep = part(one, "deep.weight")
    with torch.no_grad():
        deep[0, 0] = 7.0
    run(one, WIDE, 3, 0)
    assert torch.equal(
        deep, narrow["deep.weight"].float().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(7.0))
    )
    with torch.no_grad():
        deep.copy_(before["deep.weight"])
    assert same(bits(one.live.model), before), "all but what a cell has written is as it was"


def test_after_a_step_it_widens_exactly_and_the_state_stays() -> None:
    one = made()
    run(one, WIDE, 1, 2)
    moments = {id(kept): kept for kept in one.live.optimizer.state.values()}
    run(one, NARROW, 2, 2)
    assert {id(kept) for kept in one.live.optimizer.state.values()} == moments.keys()
    narrow = bits(one.live.model)
    assert stays(one, WIDE) is None
    assert same(bits(one.live.model), narrow)
    run(one, WIDE, 3, 0)
    assert same(
        bits(one.live.model),
        {name: value.float() if value.is_floating_point() else value for name, value in narrow.items()},
    )
    run(one, WIDE, 4, 2)
    one.close()
    run(other := made(), NARROW, 1, 2)
    other.close()
    assert all(weight.dtype is torch.float32 for weight in other.live.model.parameters())


def failing(optimizer: Optimizer, at: int) -> Callable[[], None]:
    """Let an optimizer's update fail once, when it has come to its ``at``-th piece."""
    own, calls = type(optimizer).step, []

    def step(self: Optimizer, closure: Any = None) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("no room")
        return own(self, closure)

    type(optimizer).step = step  # type: ignore[method-assign]

    def back() -> None:
        type(optimizer).step = own  # type: ignore[method-assign]

    return back


def test_an_update_that_fails_half_way_is_undone_to_the_bit_and_rounds_alike_when_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 500)
    expected = run(one := made(), NARROW, 1, 5)
    weights = bits(one.live.model)
    other = made()
    found = run(other, NARROW, 1, 2)
    before, moments = bits(other.live.model), copy.deepcopy(list(other.live.optimizer.state.values()))
    back = failing(other.live.optimizer, 3)
    try:
        reply = other.run(Chunk(NARROW, 2, 1))
    finally:
        back()
    assert reply.failure is not None
    assert reply.failure.phase == "update"
    assert same(bits(other.live.model), before)
    for kept, was in zip(other.live.optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(kept[name], value) for name, value in was.items())
    assert found + run(other, NARROW, 3, 3) == expected
    assert same(bits(other.live.model), weights)


def test_gradients_of_both_types_travel_in_few_buckets_and_in_fp32(alone: Overheard) -> None:
    one = made()
    alone.sent.clear()
    run(one, NARROW, 1, 1)
    assert len(alone.buckets) == 2
    assert {tensor.dtype for tensors in alone.buckets for tensor in tensors} == {torch.float32}
    alone.sent.clear()
    run(one, WIDE, 2, 1)
    assert len(alone.buckets) == 1


def test_weights_that_a_cell_brings_are_narrow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made()
    run(one, NARROW, 1, 1)
    with torch.no_grad():
        part(one, "deep.weight").data = part(one, "deep.weight").data.float()
    monkeypatch.setattr(cells, "ran", lambda: 99)
    run(one, NARROW, 1, 2)
    assert part(one, "deep.weight").dtype is torch.bfloat16


def test_weights_that_a_cell_makes_share_memory_go_on_sharing_it_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for flip in (NARROW, WIDE):
        one = made()
        run(one, NARROW, 1, 1)
        back, head = part(one, "back.weight"), part(one, "head.weight")
        back.data = head.data
        monkeypatch.setattr(cells, "ran", lambda flip=flip: id(flip))
        run(one, flip, 2, 2)
        assert back.dtype is head.dtype is torch.float32
        assert back.data_ptr() == head.data_ptr(), "one update of the two would be lost, or they come apart"
        assert part(one, "deep.weight").dtype is (torch.bfloat16 if flip is NARROW else torch.float32)


def test_a_state_that_is_turned_into_8_bits_and_back_is_in_fp32_again() -> None:
    pytest.importorskip("bitsandbytes")
    one = made()
    for number, optimizer in enumerate(("adamw", "adamw8bit", "adamw"), start=1):
        run(one, NARROW.replace(optimizer=optimizer), number, 2)
    steps = {int(kept["step"]) for kept in one.live.optimizer.state.values()}
    assert steps == {6}
    assert {kept["exp_avg"].dtype for kept in one.live.optimizer.state.values()} == {torch.float32}


class Own(SGD):
    pass


def hooked(params: Any) -> Optimizer:
    optimizer = SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda params: Own(params, lr=0.1), "Own is none of them. Use precision=bf16 with it"),
        (hooked, "hooks before the step of this SGD nothing but copies"),
    ],
)
def test_optimizers_that_cannot_be_given_some_weights_are_refused(make: Any, said: str) -> None:
    one = made(optimizer=make)
    settings = NARROW.replace(optimizer="own")
    assert said in why_not(one.live.optimizer, BF16_WEIGHTS)
    before = bits(one.live.model)
    failure = one.run(Chunk(settings, 1, 1)).failure
    assert failure is not None
    assert said in failure.message
    run(one, WIDE.replace(optimizer="own"), 2, 0)
    assert same(bits(one.live.model), before)


def test_hooks_after_the_update_run_once() -> None:
    calls = list[int]()

    def own(params: Any) -> Optimizer:
        optimizer = Adafactor(params)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    run(made(optimizer=own), NARROW.replace(optimizer="own"), 1, 3)
    assert len(calls) == 3


def test_a_model_without_such_weights_and_shares_of_a_state_are_refused_in_a_sentence() -> None:
    failure = made(lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(24))).run(Chunk(NARROW, 1, 1)).failure
    assert failure is not None
    assert "finds no weight to hold in bf16" in failure.message
    with pytest.raises(InvalidInput, match="cannot be used with shard_optimizer=on"):
        NARROW.replace(shard_optimizer="on").check_together(2)
    said = KNOBS["precision"].exported
    assert said
    assert "is not written into scripts" in said("bf16_weights", False)
    assert not said("bf16", False)
    assert not NARROW.same_mathematics(WIDE.replace(precision="bf16"))
    assert GRADIENTS in KNOBS["precision"].moves
