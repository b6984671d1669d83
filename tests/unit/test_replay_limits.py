"""Checkpointing of what is unusual: right to the last bit, or refused in a sentence."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserList, deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.replay.checkpointing import Checkpointing, find_blocks
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.memory.ledger.recorder import Recorder
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import rows, stream

WIDTH = 6
Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.inner(x)).sigmoid()


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(net: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, net(x)).square().mean()


class Counting(Block):
    """Counts in what it is given beside its input, and depends on that."""

    def forward(self, x: Tensor, seen: Any = None) -> Tensor:
        out = super().forward(x) * len(seen)
        seen.update({out.detach(): None}) if isinstance(seen, dict) else seen.append(out.detach())
        return out


class Sharing(Net):
    def __init__(self, shared: Callable[[list[int]], Any]) -> None:
        super().__init__(Counting)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), self.shared([1])
        for block in self.blocks:
            x = block(x, seen)
        return x


def steps(make: Callable[[], nn.Module], loss: Loss, mode: str | None, count: int = 2) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    net = make()
    checkpointing = Checkpointing(net, find_blocks(net), mode) if mode else None
    found: list[Any] = []
    for _ in range(count):
        value = loss(net, torch.randn(4, WIDTH))
        value.backward()
        found += [value.detach(), *(param.grad for param in net.parameters())]
        net.zero_grad()
    if checkpointing:
        checkpointing.finished()
        checkpointing.remove()
    return found


def same(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(one is other or torch.equal(one, other) for one, other in pairs)


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    y = cast(Tensor, net(x))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + cast(Tensor, slope.norm(dim=1) - 1).square().mean()


def second_derivative(net: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return bend.square().mean()


def backward_twice(net: nn.Module, x: Tensor) -> Tensor:
    value = mean_square(net, x)
    value.backward(retain_graph=True)
    return value


def transformed(net: nn.Module, x: Tensor) -> Tensor:
    """``torch.func`` beside the blocks; it runs under no saved-tensor hooks."""
    slopes = torch.func.vmap(torch.func.grad(lambda one: cast(Net, net).first(one).square().sum()))(x)
    return mean_square(net, x) + cast(Tensor, slopes).square().mean()


def with_other_weights(net: nn.Module, x: Tensor) -> Tensor:
    """Computed with weights of the moment, as meta-learning has it."""
    weights = {name: weight * (1 + weight.mean()) for name, weight in net.named_parameters()}
    return cast(Tensor, torch.func.functional_call(net, weights, (x,))).square().mean()


class Transforming(Block):
    """``torch.func`` in a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x - cast(Tensor, torch.func.grad(lambda z: torch.tanh(self.inner[0](z)).square().sum())(x))


@pytest.mark.parametrize("kind", [Block, Transforming])
@pytest.mark.parametrize("loss", [penalty, second_derivative, backward_twice, transformed, with_other_weights])
def test_gradients_of_gradients_are_those_of_plain_torch(kind: Callable[[], nn.Module], loss: Loss) -> None:
    expected = steps(lambda: Net(kind), loss, None)
    for mode in ("blocks", "sqrt"):
        assert same(steps(lambda: Net(kind), loss, mode), expected)


class Packed(nn.Module):
    """An LSTM of packed sequences: a named tuple that looks at what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2, dropout=0.2) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(1, len(x) + 1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, None].repeat(1, len(x), 1), lengths, batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        return packed.data


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_packed_sequences_are_held(mode: str) -> None:
    def loss_of(mode: str | None) -> list[Any]:
        torch.manual_seed(0)
        net = Packed()
        checkpointing = Checkpointing(net, list(net.layers), mode) if mode else None
        value = mean_square(net, torch.randn(4, WIDTH))
        value.backward()
        if checkpointing:
            checkpointing.finished()
        return [value.detach(), *(param.grad for param in net.parameters())]

    assert same(loss_of(mode), loss_of(None))


class Descending(Block):
    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward(x).square().sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


class Normalizing(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = next(self.inner.parameters())
            weight.div_(weight.norm())
        return super().forward(x)


class Secretive(Block):
    """Counts where nobody can look."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.counter)


class Growing(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x.repeat(next(self.counter), 1)).mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Descending, "it computes gradients in its own forward"),
        (Normalizing, "it changes its own weights in forward"),
        (Secretive, "run a second time it did something else"),
        (Growing, "run a second time it did something else"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(kind: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(WorkloadError, match=f"checkpointing cannot recompute a block: {words}.*checkpointing=none"):
        steps(lambda: Net(kind), mean_square, "blocks")


def frozen_the_second_time(net: nn.Module, x: Tensor) -> Tensor:
    trained = mean_square(net, x)
    net.requires_grad_(False)
    frozen = mean_square(net, x.clone().requires_grad_())
    net.requires_grad_(True)
    return trained + frozen


def hooked_the_second_time(net: nn.Module, x: Tensor) -> Tensor:
    plain, block = mean_square(net, x), cast(nn.ModuleList, net.blocks)[1]
    with block.get_submodule("inner.0").register_forward_hook(lambda *told: 2 * told[-1]):
        return plain + mean_square(net, x)


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_a_loss_that_freezes_weights_between_two_calls_is_refused(mode: str) -> None:
    with pytest.raises(WorkloadError, match="its weights were changed, frozen or unfrozen between forward and back"):
        steps(Net, frozen_the_second_time, mode)


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_a_block_runs_again_with_the_hooks_that_it_had(mode: str) -> None:
    assert same(steps(Net, hooked_the_second_time, mode), steps(Net, hooked_the_second_time, None))


class Comparing(Block):
    """Attends to itself when it is given the same tensor twice, as ``nn.MultiheadAttention`` does."""

    def forward(self, x: Tensor, memory: Tensor | None = None, also: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        return out * x.sigmoid() if memory is x and also is x else out


class Attending(Net):
    def __init__(self) -> None:
        super().__init__(Comparing)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, x, also=x)
        return x


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_arguments_that_are_one_tensor_are_one_in_a_replay(mode: str) -> None:
    assert same(steps(Attending, mean_square, mode), steps(Attending, mean_square, None))


class Sometimes(Block):
    """Draws numbers of NumPy, though not from the beginning."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 3 else float(np.random.rand()))


@pytest.mark.parametrize("shared", [list, deque, OrderedDict.fromkeys, UserList])
@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_containers_that_blocks_are_given_and_fill_are_as_they_were(shared: Any, mode: str) -> None:
    assert same(steps(lambda: Sharing(shared), mean_square, mode), steps(lambda: Sharing(shared), mean_square, None))


def test_random_numbers_drawn_late_are_refused_once() -> None:
    net = Net(Sometimes)
    checkpointing = Checkpointing(net, find_blocks(net), "blocks")
    for _ in range(2):
        mean_square(net, torch.ones(2, WIDTH)).backward()
    with pytest.raises(WorkloadError, match="random numbers of Python or NumPy"):
        mean_square(net, torch.ones(2, WIDTH)).backward()
    checkpointing.abandon()
    mean_square(net, torch.ones(2, WIDTH)).backward()


def test_blocks_that_forward_does_not_call_are_refused(alone: None) -> None:
    class Bypassing(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)
            return x

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        return mean_square(net, batch[0].repeat(1, 2)[:, :WIDTH])

    trainer = Trainer(Workload("bypassing", Bypassing, rows, loss), stream(), opened(), 0.0)
    reply = trainer.run(Chunk(Settings(batch_size=2, checkpointing="blocks"), 1, 1))
    assert reply.failure is not None
    assert "checkpointing=blocks has no effect: forward calls none of the 3 blocks" in reply.failure.message
    assert trainer.run(Chunk(Settings(batch_size=2), 2, 1)).failure is None


def test_steps_under_the_recorder_allow_transforms(alone: None) -> None:
    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        return transformed(net, batch[0].repeat(1, 2)[:, :WIDTH])

    trainer = Trainer(Workload("transformed", Net, rows, loss), stream(), opened(), 0.0)
    for number, mode in enumerate(("none", "blocks")):
        reply = trainer.run(Chunk(Settings(batch_size=2, checkpointing=mode), number, 2, ledger_steps=1))
        assert reply.failure is None, reply.failure


class Masked(Block):
    """A mask that nobody changes, and a small state that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1000, 1000))
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state = cast(Tensor, self.state)
        state.add_(1)
        return super().forward(x) * cast(Tensor, self.mask)[0, 0] + state.clone()


def test_only_what_changes_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Tensor] = []

    class Ledger:
        def saved(self, tensor: Tensor) -> None:
            saved.append(tensor)

    net = Net(Masked)
    Checkpointing(net, find_blocks(net), "blocks")
    for _ in range(2):
        mean_square(net, torch.ones(2, WIDTH)).backward()
    monkeypatch.setattr(Recorder, "current", Ledger())
    loss = mean_square(net, torch.ones(2, WIDTH))
    states = [tensor for tensor in saved if tensor.shape == (WIDTH,)]
    assert len(states) == 3
    assert not any(tensor.numel() > 100 for tensor in saved)
    loss.backward()
    assert [block.state[0].item() for block in net.blocks] == [3, 3, 3]  # type: ignore[index]


def compiled(how: str, backend: str) -> nn.Module:
    net = Net()
    if how == "whole":
        return cast(nn.Module, torch.compile(net, backend=backend))
    if how == "whole, in place":
        net.compile(backend=backend)
    for number in range(3) if how.startswith("blocks") else ():
        if how == "blocks, in place":
            net.blocks[number].compile(backend=backend)
        else:
            net.blocks[number] = cast(nn.Module, torch.compile(net.blocks[number], backend=backend))
    return net


@pytest.mark.parametrize("how", ["blocks", "blocks, in place"])
def test_compiled_blocks_are_recomputed(how: str) -> None:
    expected = steps(lambda: compiled(how, "aot_eager"), mean_square, None)
    torch._dynamo.reset()
    assert same(steps(lambda: compiled(how, "aot_eager"), mean_square, "blocks"), expected)


@pytest.mark.parametrize("how", ["whole", "whole, in place"])
def test_a_model_compiled_as_a_whole_is_refused(how: str) -> None:
    net = compiled(how, "eager")
    with pytest.raises(WorkloadError, match=r"blocks of the Net that torch.compile compiled as a whole.*block.compile"):
        Checkpointing(net, find_blocks(net), "blocks")
