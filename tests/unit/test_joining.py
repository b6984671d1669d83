"""Ranks begin with rank 0's values, to the bit and in every type; here the ranks come one after another."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from gpumem_nb.engine.copies import overwrite
from gpumem_nb.engine.link import communicator
from gpumem_nb.engine.step import joining
from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.optimizer_state import Replicas
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.unit.test_anybodys_model import Complex, Odd
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss, rows, stream


class Postman(Overheard):
    """Carries what rank 0 sends to those that come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[Any] = []
        self.waiting: list[Any] = []

    def become(self, rank: int) -> None:
        self.rank, self.waiting = rank, list(self.first)

    def carry(self, value: Any) -> Any:
        if self.rank:
            return self.waiting.pop(0)
        self.first.append(value)
        return value

    def from_first(self, content: bytes, about: str) -> bytes:
        carried: bytes = self.carry(content)
        return carried

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        first = self.carry({name: tensor.clone() for name, tensor in named.items()})
        assert named.keys() == first.keys()
        for name, tensor in named.items():
            overwrite(tensor, first[name])


@pytest.fixture
def postman(monkeypatch: pytest.MonkeyPatch) -> Postman:
    link = Postman()
    monkeypatch.setattr(communicator, "_of_process", link)
    return link


class Counting(nn.Module):
    """Keeps something in its state dict that is no tensor."""

    def __init__(self, seen: Any = 0) -> None:
        super().__init__()
        self.seen = seen

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def live(model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> LiveModel:
    workload = Workload(
        "joining",
        lambda: model,
        rows,
        loss,
        optimizer=optimizer and (lambda params: optimizer),
        scheduler=scheduler and (lambda own: scheduler),
    )
    return LiveModel(workload, opened())


def bits(model: nn.Module) -> dict[str, list[int]]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for name, t in named}


def scrambled(model: nn.Module) -> nn.Module:
    """A copy with other values in everything that holds any."""
    other = copy.deepcopy(model)
    for tensor in (*other.parameters(), *other.buffers()):
        if tensor.numel() and 0 not in tensor.stride():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            tensor.data = (flat ^ (1 if tensor.dtype is torch.bool else 3)).view(tensor.dtype).reshape(tensor.shape)
    return other


class Transposed(nn.Module):
    """A weight that does not lie in memory in the order of its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())


@pytest.mark.parametrize("kind", [Odd, Complex, Transposed, lambda: nn.Linear(3, 2).bfloat16()])
def test_every_rank_gets_the_first_ones_bits_in_every_type(kind: Callable[[], nn.Module], postman: Postman) -> None:
    first = live(kind())
    second = live(scrambled(first.model))
    assert bits(second.model) != bits(first.model)
    joining.take_from_first(first)
    postman.become(1)
    joining.take_from_first(second)
    assert bits(second.model) == bits(first.model)


def test_an_extra_state_is_taken_from_the_first_rank(postman: Postman) -> None:
    first, second = (live(nn.Sequential(nn.Linear(4, 2), Counting(seen))) for seen in (7, 0))
    joining.take_from_first(first)
    postman.become(1)
    joining.take_from_first(second)
    assert second.model[1].seen == 7  # type: ignore[index]


def test_an_extra_state_that_cannot_be_sent_is_refused_on_every_rank(postman: Postman) -> None:
    def generator() -> Any:
        yield 1

    for rank, seen in enumerate((generator(), 0)):
        postman.become(rank)
        with pytest.raises(WorkloadError, match="gives cannot be sent to the other ranks"):
            joining.take_from_first(live(nn.Sequential(nn.Linear(4, 2), Counting(seen))))


def trained(steps: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("there", "here"), [(3, 1), (2, 0)])
def test_an_optimizer_that_was_used_before_goes_on_from_the_first_ranks_state(
    there: int, here: int, postman: Postman
) -> None:
    first, second = live(*trained(there)), live(*trained(here))
    joining.take_from_first(first)
    postman.become(1)
    joining.take_from_first(second)
    for param, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        state, copied = first.own_optimizer.state[param], second.own_optimizer.state[other]  # type: ignore[union-attr]
        assert state.keys() == copied.keys()
        assert all(torch.equal(state[name], copied[name]) for name in state)


def test_what_an_optimizer_of_ones_own_counts_is_taken_over(postman: Postman) -> None:
    class Counting(Adam):
        updates = 0

    optimizers = [Counting(nn.Linear(2, 2).parameters()) for _ in range(2)]
    for rank, one in enumerate(optimizers):
        postman.become(rank)
        vars(one)["updates"] = 5 - rank
        Replicas(one).follow_first()
    assert [one.updates for one in optimizers] == [5, 5]


def test_state_moves_with_the_weights_and_a_rank_of_its_own_does_not(postman: Postman) -> None:
    class Placed(torch.optim.Adagrad):
        rank = 0

    there = nn.Linear(2, 2, device="meta")
    own = Placed(there.parameters())
    own.state[there.weight] = {"step": torch.zeros(()), "sum": torch.zeros(2, 2)}  # as made before it moved
    Replicas(own).move_to(torch.device("meta"), {id(there.weight)})
    assert {name: value.is_meta for name, value in own.state[there.weight].items()} == {"step": False, "sum": True}
    for rank in range(2):
        postman.become(rank)
        one = Placed(nn.Linear(2, 2).parameters())
        vars(one)["rank"] = rank
        Replicas(one).follow_first()
        assert one.rank == rank


def test_state_in_lists_is_taken_over_and_lies_where_its_weight_does(
    postman: Postman, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = live(*trained(1)), live(*trained(0))
    for number, param in enumerate(first.model.parameters()):
        first.own_optimizer.state[param]["bases"] = [torch.rand(2, 3).t(), (torch.full((), number), 5)]  # type: ignore[union-attr]
    joining.take_from_first(first)
    postman.become(1)
    monkeypatch.setattr(postman, "any_rank", lambda vote, about: True)
    joining.take_from_first(second)
    for param, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        one, (number, five) = first.own_optimizer.state[param]["bases"]  # type: ignore[union-attr]
        copied, (same, other_five) = second.own_optimizer.state[other]["bases"]  # type: ignore[union-attr]
        assert torch.equal(one, copied)
        assert (one.stride(), number.item(), five) == (copied.stride(), same.item(), other_five)
    postman.become(0)
    elsewhere = nn.Linear(4, 2, device="meta")
    whole = Replicas(first.own_optimizer).gather()  # type: ignore[arg-type]
    assert whole is not None
    Replicas(own := Adam(elsewhere.parameters())).scatter(whole)()
    assert all(bases[0].is_meta for bases in (state["bases"] for state in own.state.values()))


def described(make: Callable[[], LiveModel], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that ranks compare."""
    asked: list[int] = []

    def note(numbers: list[int], about: str) -> list[bool]:
        asked.extend(numbers)
        return [True] * len(numbers)

    with monkeypatch.context() as patched:
        patched.setattr(joining, "alike", note)
        joining.check_alike(make())
    return asked


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout())


def partly_frozen() -> nn.Module:
    made = model()
    made[0].bias.requires_grad_(False)  # type: ignore[index]
    return made


def partly_evaluating() -> nn.Module:
    made = model()
    made[1].eval()  # type: ignore[index]
    return made


def with_optimizer(kind: Any = SGD, step_lr: int = 0, **options: Any) -> LiveModel:
    made = model()
    own = kind(made.parameters(), **{"lr": 0.1} | options)
    return live(made, own, lr_scheduler.StepLR(own, step_lr) if step_lr else None)


DIFFERENT: list[tuple[str, Callable[[], LiveModel], Callable[[], LiveModel], int]] = [
    ("another shape", lambda: live(model()), lambda: live(nn.Sequential(nn.Linear(4, 3), nn.Dropout())), 0),
    ("other strides", lambda: live(convolution()), lambda: live(convolution(torch.channels_last)), 0),
    ("a buffer more", lambda: live(nn.Linear(4, 2)), lambda: live(with_buffer()), 0),
    ("frozen", lambda: live(model()), lambda: live(partly_frozen()), 1),
    ("evaluating", lambda: live(model()), lambda: live(partly_evaluating()), 2),
    ("another class", with_optimizer, lambda: with_optimizer(Adam), 3),
    ("another option", with_optimizer, lambda: with_optimizer(momentum=0.9), 3),
    ("another rate", with_optimizer, lambda: with_optimizer(lr=0.2), 3),
    ("another scheduler", lambda: with_optimizer(step_lr=2), lambda: with_optimizer(step_lr=3), 4),
]


def convolution(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, 3, 3).to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def with_buffer() -> nn.Module:
    made = nn.Linear(4, 2)
    made.register_buffer("extra", torch.ones(1), persistent=False)
    return made


@pytest.mark.parametrize(("kind", "one", "other", "index"), DIFFERENT, ids=[kind for kind, *_ in DIFFERENT])
def test_ranks_that_hold_something_else_differ_in_one_number(
    kind: str,
    one: Callable[[], LiveModel],
    other: Callable[[], LiveModel],
    index: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, again, yours = (described(make, monkeypatch) for make in (one, one, other))
    assert mine == again
    assert [a == b for a, b in zip(mine, yours, strict=True)][index] is False


def test_ranks_that_hold_other_optimizers_are_told_so(alone: Overheard, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SGD((made := nn.Linear(4, 2)).parameters(), lr=0.1)
    workload = Workload("differing", lambda: made, rows, loss, optimizer=lambda params: own)
    trainer = Trainer(workload, stream(), opened(), time.time())
    other = [0, 0, 0, 1, 0]
    monkeypatch.setattr(
        alone, "numbers", lambda own, about: [list(own), [a + b for a, b in zip(own, other, strict=True)]]
    )
    with pytest.raises(WorkloadError, match="hold different optimizers: class, groups or options differ"):
        trainer.join()


def test_what_an_optimizer_without_state_counts_is_taken_over_by_a_sync(postman: Postman) -> None:
    class Counting(SGD):
        updates = 0

    lives = []
    for rank in range(2):
        postman.become(rank)
        model = nn.Linear(2, 2)
        lives.append(live(model, Counting(model.parameters(), lr=0.1)))
        vars(lives[rank].own_optimizer)["updates"] = 5 - rank
        joining.make_alike(lives[rank])
    assert [vars(one.own_optimizer)["updates"] for one in lives] == [5, 5]


def test_rank_zeros_state_is_not_given_to_an_optimizer_that_has_its_weights_in_another_order(
    postman: Postman, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[int]] = []

    def note(numbers: list[int], about: str) -> list[bool]:
        told.append(list(numbers))
        return [True] * len(numbers)

    monkeypatch.setattr(joining, "alike", note)
    for swapped in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = SGD(model.parameters(), lr=0.1)
        if swapped:
            model[0], model[1] = model[1], model[0]
        joining.make_alike(live(model, optimizer))
    assert told[0] != told[1]
