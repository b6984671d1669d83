"""A checkpointed block may read and change what it likes: numbers are those of plain torch, to the last bit."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from gpumem_nb.engine.replay.checkpointing import SEGMENT_BLOCKS, Checkpointing, find_blocks

WIDTH = 6
STEPS = 3


class Plain(nn.Module):
    """What the blocks here have in common: layers, and something done to their result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(cast(Tensor, self.inner(x))) * x


class OldSpectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner[0] = spectral_norm(nn.Linear(WIDTH, WIDTH))


class Spectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner[0] = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldWeightNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner[0] = weight_norm(nn.Linear(WIDTH, WIDTH))


class WeightNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner[0] = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner[1] = nn.BatchNorm1d(WIDTH, momentum=None)


class ReadsStatistics(BatchNorm):
    """Reads what its batch norm writes, before and after that."""

    def forward(self, x: Tensor) -> Tensor:
        mean = cast(Tensor, self.inner[1].running_mean)
        return torch.sin(super().forward(x - mean.exp())) * mean.exp()


class Rebound(Plain):
    """A running mean, made anew in each call, that the result depends on."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(super().forward(x) - self.mean)


class InPlace(Rebound):
    """The same, changed in place after it was used, and beside it an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.zeros(WIDTH)
        self.by_data = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(Plain.forward(self, x) - self.mean.clone() - self.largest.clone() - self.by_data.clone())
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0)))
        self.by_data.data.add_(0.1)
        return y


class Late(Rebound):
    """Changes its buffer in every second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            self.mean.add_(x.detach().mean(0))
        return torch.tanh(Plain.forward(self, x) - self.mean.clone())


class Alternating(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).sigmoid() if self.calls % 2 else super().forward(x).exp()


class OnClass(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OnClass.calls += 1
        return torch.tanh(super().forward(x) * OnClass.calls)


class Remembering(Plain):
    """Keeps what it saw in containers and in an object, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.named: dict[str, list[float]] = {"sums": []}
        self.met: set[int] = set()
        self.meter = SimpleNamespace(total=0.0, last=None)

    def forward(self, x: Tensor) -> Tensor:
        factor = len(self.met) + len(self.named["sums"]) + self.meter.total
        for seen in self.recent:
            x = x + seen
        y = super().forward(x).exp() / (2 + abs(factor))
        self.recent.append(y.detach())
        self.named["sums"].append(float(y.detach().sum()))
        self.met.add(len(self.met))
        self.meter.total += float(y.detach().mean())
        self.meter.last = y
        self.latest = y
        return torch.tanh(y)


@dataclass(slots=True)
class Slots:
    calls: int = 0


class Slotted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = Slots()

    def forward(self, x: Tensor) -> Tensor:
        self.count.calls += 1
        return torch.tanh(super().forward(x) * self.count.calls)


class Recurrent(Plain):
    """The state of the last call goes into the next one, and gradients with it inside a step."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x if self.state is None else x + self.state.detach())
        self.state = torch.tanh(y)
        return self.state


class Rolling(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)
        self.own, self.numbers = random.Random(3), np.random.default_rng(4)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3:  # stochastic depth
            return x
        y = (
            self.dropout(super().forward(x))
            * float(np.random.rand())
            * self.own.random()
            * float(self.numbers.random())
        )
        return torch.sin(y * torch.rand(y.shape, generator=self.generator)).exp()


SHARED = np.random.default_rng(7)
calls_of_a_function = 0


def scaled(x: Tensor) -> Tensor:
    global calls_of_a_function
    calls_of_a_function += 1
    return x.exp() * (1 + calls_of_a_function % 3) * float(SHARED.random())


class Global(Plain):
    """Numbers and a counter that are the program's, not the block's."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(scaled(super().forward(x)))


def doubled(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


class Hooked(Plain):
    """Hooks of a person's own: before, which must not happen twice to its input, after, and with state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(doubled)
        self.count = SimpleNamespace(calls=0)
        self.inner.register_forward_hook(functools.partial(counting, self.count))
        calls = 0

        def closure(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tanh(output * calls)

        self.inner[0].register_forward_hook(closure)
        self.register_forward_hook(lambda module, inputs, output: output.sin())
        self.inner[0].register_full_backward_hook(lambda module, given, found: (2 * cast(Any, given)[0],))


def counting(count: SimpleNamespace, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    count.calls += 1
    return output * float(1 + count.calls % 2)


class OwnCheckpoint(Plain):
    """A person's own checkpointing inside."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: self.dropout(torch.tanh(self.inner(z))), x, use_reentrant=self.reentrant)
        return cast(Tensor, self.norm(torch.sin(y) * x))


class Reentrant(OwnCheckpoint):
    reentrant = True


class Recursive(Plain):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = super().forward(x)
        return cast(Tensor, self(y, depth - 1)) if depth else y.exp()


class Making(Plain):
    """Makes a layer in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        return torch.tanh(cast(Tensor, self.dropout(self.late(super().forward(x)))))


class Masked(Plain):
    """Gives masks beside its output, of types that cannot count, and keeps what no forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(WIDTH, dtype=np.float32)
        self.table.setflags(write=False)
        with torch.inference_mode():
            self.inferred = torch.ones(WIDTH)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(super().forward(x[0] if isinstance(x, tuple) else x) + self.inferred)
        return y, y > 0, torch.ones(2, dtype=torch.uint16)


class Flagged(Plain):
    """What somebody sets on the block before each call."""

    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.scale)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to be shared between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KINDS: list[Callable[[], nn.Module]] = [
    Plain, OldSpectral, Spectral, OldWeightNorm, WeightNorm, BatchNorm, ReadsStatistics, Rebound, InPlace, Late,
    Alternating, OnClass, Remembering, Slotted, Recurrent, Rolling, Global, Hooked, OwnCheckpoint, Reentrant,
    Recursive, Flagged, Making, Masked,
]  # fmt: skip


class Net(nn.Module):
    """Blocks one after another, and all of them once more."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for round_ in range(2):
            for number, block in enumerate(self.blocks):
                if isinstance(block, Flagged):
                    block.scale = x.detach().mean() + number + round_
                x = block(x)
        return x[0] if isinstance(x, tuple) else x


def run(kind: Callable[[], nn.Module], mode: str | None) -> list[Any]:
    """Losses, gradients and all state of some steps."""
    global calls_of_a_function, SHARED
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    calls_of_a_function, SHARED, OnClass.calls = 0, np.random.default_rng(7), 0
    net = Net(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    checkpointing = Checkpointing(net, find_blocks(net), mode) if mode else None
    found: list[Any] = []
    for _ in range(STEPS):
        for _ in range(2):  # micro-batches
            loss = net(torch.randn(5, WIDTH)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [param.grad for param in net.parameters()]
        found += [buffer.clone() for buffer in net.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    found += [state_of(block) for block in net.blocks]
    found += [torch.rand(2), random.random(), np.random.rand(), calls_of_a_function, SHARED.random(), OnClass.calls]
    if checkpointing:
        checkpointing.finished()
        checkpointing.remove()
    return found


def state_of(block: nn.Module) -> list[Any]:
    attributes = [getattr(block, name, None) for name in ("calls", "recent", "named", "met", "largest", "by_data")]
    objects = [getattr(block, name, None) for name in ("meter", "count")]
    drawn = [block.own.random(), block.numbers.random()] if isinstance(block, Rolling) else []
    told = [asdict(one) if isinstance(one, Slots) else vars(one) for one in objects if one]
    return [*attributes, *told, *drawn]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | deque):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_plain_torch(kind: Callable[[], nn.Module]) -> None:
    expected = run(kind, None)
    for mode in SEGMENT_BLOCKS:
        assert_same(run(kind, mode), expected)
