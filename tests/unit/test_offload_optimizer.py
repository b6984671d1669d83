"""``offload_optimizer=on``: the same numbers to the bit, the state in host memory but for a piece at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from gpumem_nb.engine.replay.loss_head import find_head
from gpumem_nb.engine.step import pieces
from gpumem_nb.engine.step.optimizers import build, hidden_matrices
from gpumem_nb.engine.step.pieces import by_pieces
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory import host_pool
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from tests.unit.test_narrow_weights import Net, bits, made, run, same
from tests.unit.test_one_rank import alone as alone  # a fixture

pytestmark = pytest.mark.usefixtures("alone")
OFF = Settings(batch_size=4)
ON = OFF.replace(offload_optimizer="on")
FLIPS = (OFF, ON, OFF, ON, ON)
OWN: dict[str, Callable[[Any], Optimizer]] = {
    "amsgrad": lambda params: Adam(params, amsgrad=True),
    "momentum": lambda params: SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda params: Adagrad(params, initial_accumulator_value=0.1),
    "rmsprop": lambda params: RMSprop(params, momentum=0.9, centered=True),
} | {kind.__name__: kind for kind in (ASGD, Adadelta, Adamax, NAdam, RAdam, Rprop)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of tests be larger than a piece."""
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 256)


def state_of(one: Trainer) -> Iterator[Tensor]:
    for kept in one.live.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def waiting(one: Trainer) -> int:
    aside = one.live.waits.aside
    return sum(value.nbytes for value in state_of(one) if aside and aside.waits(value))


def states(one: Trainer) -> list[Tensor]:
    return [value.clone() for value in state_of(one)]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "adafactor", "adamw8bit", "muon", *OWN])
def test_training_is_that_of_a_plain_loop_to_the_bit(name: str) -> None:
    batches: list[Tensor] = []
    optimizer = OWN.get(name)
    one = made(seen=batches, optimizer=optimizer)
    losses = list[float]()
    for number, settings in enumerate(FLIPS, start=1):
        now = settings.replace(optimizer="own" if optimizer else name, learning_rate=1e-3)
        losses += run(one, now, number, 2)
        has_much = name not in ("sgd", "adafactor")  # whose state in this net is nothing, or small
        assert (waiting(one) > 0) == (now.offload_optimizer == "on" and has_much)
    torch.manual_seed(0)
    plain = Net().train()
    theirs = optimizer(plain.parameters()) if optimizer else None
    if theirs is None:
        matrices = hidden_matrices(plain, find_head(plain))
        theirs = build(plain.parameters(), OFF.replace(optimizer=name, learning_rate=1e-3), lambda: matrices)
    for group in theirs.param_groups:
        group["lr"] = 1e-3
    expected = list[float]()
    for batch in batches:
        loss = plain(batch).float().square().mean()
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert same(bits(one.live.model), bits(plain))


@pytest.mark.parametrize(
    "knobs",
    [
        {"optimizer_impl": "fused"},
        {"optimizer_impl": "loop", "accumulation_steps": 2, "clip_norm": 0.01},
        {"precision": "fp16"},
        {"precision": "fp16", "optimizer_impl": "fused"},
        {"precision": "bf16_weights"},
        {"precision": "bf16_weights", "optimizer": "adamw8bit"},
        {"offload_activations": "on", "checkpointing": "none"},
    ],
    ids=str,
)
def test_flips_beside_other_knobs_change_no_bit(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "bf16_weights" in knobs.values():
        monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 2**14)  # random numbers follow from where slices begin
    found = []
    for flips in ((OFF,) * 5, FLIPS):
        one, losses = made(), list[float]()
        for number, settings in enumerate(flips, start=1):
            losses += run(one, settings.replace(**knobs), number, 2)
        one.live.waits.bring(one.live.optimizer)
        found.append((losses, bits(one.live.model), states(one)))
    (losses, weights, state), (other_losses, other_weights, other_state) = found
    assert losses == other_losses
    assert same(weights, other_weights)
    assert all(map(torch.equal, state, other_state))


def test_an_update_that_fails_half_way_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again = made(), made()
    for trained in (one, again):
        run(trained, ON, 1, 2)
    weights, state = bits(one.live.model), states(one)
    taken, fill = list[int](), AdamW.step

    def step(self: AdamW, *args: Any, **kwargs: Any) -> Any:
        fill(self, *args, **kwargs)
        taken.append(1)
        if len(taken) == 4:
            raise MemoryError("no room")

    monkeypatch.setattr(AdamW, "step", step)
    reply = one.run(Chunk(ON.replace(clip_norm=1e9), 2, 1))
    assert reply.failure is not None
    assert len(taken) == 4
    assert same(bits(one.live.model), weights)
    assert all(map(torch.equal, states(one), state))
    monkeypatch.undo()
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 256)
    assert run(one, ON, 3, 2) == run(again, ON, 3, 2)
    assert waiting(one) == waiting(again)


def test_short_host_memory_refuses_the_flip_and_the_first_state(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, fresh = made(), made()
    run(one, OFF, 1, 2)
    state = states(one)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 5 * 4096)
    reply = one.run(Chunk(ON, 2, 1))
    assert reply.failure is not None
    assert "Host memory is short" in reply.failure.message
    assert "Use offload_optimizer=off" in reply.failure.message
    assert one.run(Chunk(OFF, 3, 0)).failure is None
    assert all(map(torch.equal, states(one), state))
    assert all(map(gpu.holds, state_of(one)))
    reply = fresh.run(Chunk(ON, 1, 1))
    assert reply.failure is not None
    assert reply.failure.phase == "update"
    assert not list(state_of(fresh))


def test_what_a_cell_does_to_the_state_holds(gpu: VirtualGPU) -> None:
    found = []
    for settings in (OFF, ON):
        one = made()
        run(one, settings, 1, 2)
        weight = one.live.parameters[0]
        kept = one.live.optimizer.state[weight]
        assert kept["exp_avg"].shape == weight.shape
        kept["exp_avg"].mul_(2)
        large = next(param for param in one.live.parameters if param.numel() > 1000)
        one.live.optimizer.state[large]["exp_avg_sq"] = torch.full_like(large, 0.5)
        found.append((run(one, settings, 1, 2), bits(one.live.model)))
        if settings is ON:
            assert waiting(one) > 0.9 * sum(value.nbytes for value in state_of(one) if value.dim())
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("flips", [("adamw", "adamw8bit", "adamw"), ("adamw", "sgd", "adamw"), ("own", "adam", "own")])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_optimizer_is_flipped_as_without_it(flips: tuple[str, ...], steps: int) -> None:
    found = []
    for settings in (OFF, ON):
        one, losses = made(optimizer=lambda params: AdamW(params, lr=1e-3)), list[float]()
        for number, name in enumerate(flips):
            count = steps if number == 1 else 2
            losses += run(one, settings.replace(optimizer=name), number + 1, count)
        found.append((losses, bits(one.live.model)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


class Mixed(Net):
    """A net with one weight that is in bf16 from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.randn(48, 48, dtype=torch.bfloat16))

    def forward(self, rows: Tensor) -> Tensor:
        found = super().forward(rows)
        return found + (found.bfloat16() @ self.short).float() / 8


def test_adafactor_takes_the_smallest_difference_of_the_first_weights_type_for_all() -> None:
    found = []
    for settings in (OFF, ON):
        one = made(Mixed)
        found.append((run(one, settings.replace(optimizer="adafactor"), 1, 4), bits(one.live.model)))
        assert [group["eps"][0] for group in one.live.optimizer.param_groups] == [None]
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_an_update_in_which_no_weight_has_a_gradient_runs_the_hooks_after_it() -> None:
    one, calls = made(optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9)), list[int]()
    run(one, ON.replace(optimizer="own", learning_rate=0.1), 1, 1)
    optimizer, before = one.live.optimizer, bits(one.live.model)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    by_pieces(one.live.pieces(optimizer), optimizer, optimizer.step)()
    assert calls == [1]
    assert same(bits(one.live.model), before)


class Sum(SGD):
    """An optimizer of a person's own."""


def test_what_cannot_be_updated_by_pieces_is_refused_by_name() -> None:
    one = made(optimizer=lambda params: Sum(params, lr=0.1))
    reply = one.run(Chunk(ON.replace(optimizer="own"), 1, 1))
    assert reply.failure is not None
    assert "offload_optimizer=on needs an optimizer that is known to update each weight by itself" in (
        reply.failure.message
    )
    assert "Sum is none of them. Use offload_optimizer=off with it" in reply.failure.message
    hooked = made(optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9))
    hooked.live.optimizer.register_step_pre_hook(lambda *_: None)
    reply = hooked.run(Chunk(ON.replace(optimizer="own"), 1, 1))
    assert reply.failure is not None
    assert "would show the hooks before the step of this SGD nothing but some weights" in reply.failure.message


def test_a_model_is_handed_back_with_its_state_on_the_device(gpu: VirtualGPU) -> None:
    one = made(optimizer=lambda params: AdamW(params, lr=1e-3))
    run(one, ON.replace(optimizer="own"), 1, 2)
    assert waiting(one)
    one.close()
    assert all(gpu.holds(value) for value in state_of(one))


def test_off_costs_nothing(gpu: VirtualGPU) -> None:
    one = made()
    run(one, OFF, 1, 2)
    assert one.live.waits.aside is None
    assert one.live.waits._host.in_use is None
    assert one.live.recomputing.host_bytes == (0, 0, 0)


def test_it_is_a_layer_of_its_own_that_gives_its_memory_back() -> None:
    one = made()
    run(one, ON, 1, 2)
    pool = one.live.waits._host.in_use
    assert pool
    assert pool.used_bytes == waiting(one) > 0
    run(one, OFF, 2, 1)
    gc.collect()
    assert pool.used_bytes == 0
    assert isinstance(one.live.model, nn.Module)


def test_what_a_person_keeps_beside_the_state_is_left_alone() -> None:
    one = made()
    run(one, OFF, 1, 2)
    one.live.optimizer.state["note"] = {"steps": torch.ones(1000)}  # type: ignore[index]
    on = one.run(Chunk(ON, 2, 1))
    assert on.failure is not None
    assert "keeps a state that belongs to no weight ('note')" in on.failure.message, "as without it"
    del one.live.optimizer.state["note"]  # type: ignore[arg-type]
    assert run(one, ON, 3, 2)
