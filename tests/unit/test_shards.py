"""``shard_optimizer``: every rank keeps its share of the optimizer's state, and nothing else changes, to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from gpumem_nb.engine.link.communicator import Communicator, Separated
from gpumem_nb.engine.step.optimizer_state import Replicas, Whole, state_of
from gpumem_nb.engine.step.shards import BY_ELEMENTS
from gpumem_nb.engine.step.sharing import Sharing
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from tests.threads import Meeting

ON, OFF = Settings(shard_optimizer="on", bucket_mib=0.01), Settings(bucket_mib=0.01)
Make = Callable[[Sequence[Tensor]], Optimizer]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As ranks have: on several threads torch's loops over numbers of 16 bits depend on how they are divided."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    bend = nn.Conv2d(3, 17, 3)
    bend.weight.data = bend.weight.data.contiguous(memory_format=torch.channels_last)
    return nn.Sequential(bend, nn.BatchNorm2d(17), nn.Flatten(), nn.Linear(17 * 36, 65).to(dtype))


class Training:
    """One rank's weights, trained with the same gradients as those of all others."""

    def __init__(self, model: nn.Module, make: Make, ranks: int) -> None:
        self.params = list(copy.deepcopy(model).parameters())
        self.optimizer = make(self.params)
        self.sharing, self._steps = Sharing(ranks), 0

    def flip(self, settings: Settings) -> None:
        if self.sharing.joins(settings):
            self.sharing.join([self.optimizer])
        self.sharing.apply(self.optimizer, settings, tried=False)

    def take(self, steps: int, settings: Settings = OFF) -> None:
        for _ in range(steps):
            self.gradients()
            form = state_of(self.optimizer)
            with form.updating():
                self.optimizer.step()
            form.spread(form.after_update(settings))

    def gradients(self) -> None:
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        for param in self.params:
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]


def in_numbers(whole: Whole | None) -> dict[int, dict[str, Any]]:
    assert whole is not None
    return {place: dict(values) for place, values in whole["state"].items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(same, one, other))
    return one.shape == other.shape and torch.equal(one, other) if isinstance(one, Tensor) else one == other


KINDS: list[Any] = [
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {}),
    (NAdam, {}),
    (RAdam, {}),
    (Adamax, {}),
    (Adagrad, {}),
    (Adadelta, {}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (ASGD, {}),
    (Rprop, {}),
]
FUSED = (SGD, Adam, AdamW, Adagrad)


def test_all_that_may_be_shared_are_tried_here() -> None:
    assert {kind for kind, _ in KINDS} == set(BY_ELEMENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_weights_and_state_are_those_of_one_rank_to_the_bit_with_flips_in_both_directions(
    kind: type[Optimizer], options: dict[str, Any], implementation: dict[str, bool], dtype: torch.dtype
) -> None:
    if "fused" in implementation and kind not in FUSED:
        pytest.skip("torch has no fused kernel for it")
    if "fused" in implementation and "momentum" in options and dtype is torch.bfloat16:
        pytest.skip("in 16 bits torch 2.13's fused SGD keeps momenta on the CPU that its loop does not, also alone")
    model, optimizer_of = net(dtype), cast("Any", kind)

    def make(params: Sequence[Tensor]) -> Optimizer:
        return cast("Optimizer", optimizer_of(params, lr=1e-2, **options, **implementation))

    def alone(link: Communicator) -> Any:
        training = Training(model, make, 1)
        training.take(8)
        return training.weights(), in_numbers(state_of(training.optimizer).gather())

    def shared(link: Communicator) -> Any:
        training = Training(model, make, link.size)
        for settings in (OFF, ON, OFF, ON):
            training.flip(settings)
            training.take(2)
        whole = state_of(training.optimizer).gather()
        training.flip(OFF)
        joined = in_numbers(Replicas(training.optimizer).gather()) if link.rank == 0 else None
        return training.weights(), whole, joined

    (weights, state), *_ = Meeting(1).run(alone)
    for found in Meeting(3).run(shared):
        assert same(found[0], weights)
        if found[1] is not None:
            assert same(in_numbers(found[1]), state)
            assert same(found[2], state)


def test_each_rank_keeps_its_share_of_the_state() -> None:
    for ranks in (2, 4):

        def kept(link: Communicator) -> int:
            training = Training(net(), lambda params: AdamW(params), link.size)
            training.flip(ON)
            training.take(1)
            return sum(value.numel() for one in training.optimizer.state.values() for value in one.values())

        whole = sum(2 * param.numel() + 1 for param in net().parameters())
        for share in Meeting(ranks).run(kept):
            assert share == pytest.approx(whole / ranks, rel=0.01)


def test_more_ranks_than_there_is_to_share_train_alike() -> None:
    def trained(link: Communicator) -> list[Tensor]:
        training = Training(nn.Linear(3, 2), lambda params: Adam(params), link.size)
        torch.manual_seed(0)
        training.params[0].data.fill_(0.5)
        training.params[1].data.fill_(0.5)
        training.flip(ON)
        training.take(2)
        return training.weights()

    assert all(same(one, Meeting(1).run(trained)[0]) for one in Meeting(4).run(trained))


def test_a_state_of_two_ranks_is_taken_up_by_four_and_by_one() -> None:
    model = net()

    def saved(link: Communicator) -> Any:
        training = Training(model, AdamW, link.size)
        training.flip(ON)
        training.take(3)
        weights, whole = training.weights(), state_of(training.optimizer).gather()
        training.take(2)
        return weights, whole, training.weights()

    (weights, whole, expected), _ = Meeting(2).run(saved)

    def resumed(link: Communicator) -> list[Tensor]:
        training = Training(model, AdamW, link.size)
        for param, content in zip(training.params, weights, strict=True):
            param.data.copy_(content)
        training.sharing.form(training.optimizer, ON).scatter(copy.deepcopy(whole))()
        training._steps = 3
        training.take(2)
        return training.weights()

    for ranks in (1, 4):
        assert all(same(one, expected) for one in Meeting(ranks).run(resumed))


def test_what_a_cell_freezes_on_some_ranks_or_for_a_while_changes_no_share() -> None:
    model = net()

    def trained(link: Communicator, frozen: bool) -> list[Any]:
        rank = Training(model, lambda params: AdamW(params, 0.01), link.size)
        rank.params[0].requires_grad_(not (frozen and link.rank == 0))
        rank.flip(ON)
        rank.params[0].requires_grad_(True)
        rank.take(3)
        shared = sum(tensors.nbytes for tensors in tensors_in(list(rank.optimizer.state.values())))
        rank.flip(OFF)
        return [rank.weights(), shared]

    expected = Meeting(3).run(lambda link: trained(link, False))
    assert all(map(same, Meeting(3).run(lambda link: trained(link, True)), expected))


def test_weights_that_lie_otherwise_than_before_are_refused_on_all_ranks() -> None:
    def trained(link: Communicator) -> tuple[str, str]:
        rank = Training(net(), lambda params: AdamW(params, 0.01), link.size)
        rank.flip(ON)
        rank.take(2)
        wide = next(param for param in rank.params if param.dim() == 4)
        wide.data = wide.data.contiguous()  # it was in channels_last
        with pytest.raises(WorkloadError, match="lies otherwise in memory") as in_update:
            rank.take(1)
        with pytest.raises(WorkloadError, match="lies otherwise in memory") as in_flip:
            rank.flip(OFF)
        return str(in_update.value), str(in_flip.value)

    assert len(set(Meeting(2).run(trained))) == 1


def test_ranks_that_come_apart_while_they_give_each_other_weights_get_the_rest_when_they_join_again() -> None:
    model, gathers = net(), 3

    class Leaving(Exception):
        pass

    def trained(link: Communicator, leaves: bool) -> Any:
        training = Training(model, AdamW, link.size)
        training.flip(ON)
        training.take(2)
        form, gather, count = state_of(training.optimizer), link.all_gather, 0

        def leaving(*args: Any) -> Tensor:
            nonlocal count
            count += 1
            if count == gathers and link.rank == 1:
                raise Leaving
            return gather(*args)

        if leaves:
            link.all_gather = leaving  # type: ignore[method-assign,assignment]
            training.take(1)
            link.all_gather = gather  # type: ignore[method-assign]
            assert form.stale
            assert link.separated()
            with pytest.raises(Separated):
                link.any_rank(False, "next")
            link.rejoin()
            training.sharing.rejoined(training.optimizer, 3)
            assert not form.stale
        else:
            training.take(1)
        training.take(1)
        return training.weights()

    expected = Meeting(2).run(lambda link: trained(link, False))[0]
    assert all(same(one, expected) for one in Meeting(2).run(lambda link: trained(link, True)))


def test_a_flip_that_failed_on_one_rank_is_taken_back_on_all() -> None:
    def trained(link: Communicator) -> Any:
        training = Training(net(), AdamW, link.size)
        training.take(2)
        before = in_numbers(Replicas(training.optimizer).gather()) if link.rank == 0 else None
        assert not training.sharing.joins(ON)
        if link.rank == 0:  # the other one ran out of memory before
            training.sharing.apply(training.optimizer, ON, tried=False)
        training.flip(OFF)
        assert state_of(training.optimizer).partition is None
        return before, in_numbers(Replicas(training.optimizer).gather()) if link.rank == 0 else None

    (before, after), _ = Meeting(2).run(trained)
    assert same(before, after)


def test_weights_that_come_into_the_groups_are_shared_too() -> None:
    model = net()

    def trained(link: Communicator) -> Any:
        training = Training(model, AdamW, link.size)
        training.flip(ON if link.size > 1 else OFF)
        training.take(2)
        new = nn.Parameter(torch.ones(1000))
        training.params.append(new)
        training.optimizer.add_param_group({"params": [new], "lr": 0.1})
        state_of(training.optimizer).follow_groups()
        training.take(2)
        whole = state_of(training.optimizer).gather()
        return training.weights(), in_numbers(whole) if link.rank == 0 else None

    weights, state = Meeting(1).run(trained)[0]
    (found, in_all), (others, _) = Meeting(2).run(trained)
    assert same(found, weights)
    assert same(others, weights)
    assert same(in_all, state)


def test_what_ranks_take_to_give_each_other_weights_is_timed_without_changing_any() -> None:
    def timed(link: Communicator) -> Any:
        training = Training(net(), AdamW, link.size)
        before = training.weights()
        assert training.sharing.gather_s(training.params, OFF) == 0
        return bool(training.sharing.gather_s(training.params, ON)), same(training.weights(), before)

    assert Meeting(2).run(timed) == [(True, True)] * 2
    assert Meeting(1).run(timed) == [(False, True)]


def test_an_optimizer_that_is_let_go_of_is_gone_with_its_share() -> None:
    def shared(link: Communicator) -> weakref.ref[Optimizer]:
        training = Training(net(), AdamW, link.size)
        training.flip(ON)
        training.take(1)
        return weakref.ref(training.optimizer)

    found = Meeting(2).run(shared)
    gc.collect()
    assert [one() for one in found] == [None, None]


def test_shares_that_do_not_go_together_are_said_on_all_ranks() -> None:
    def joined(link: Communicator) -> str:
        training = Training(net(), AdamW, link.size)
        training.flip(ON)
        training.take(1)
        if link.rank == 1:
            training.optimizer.state.clear()
        with pytest.raises(WorkloadError, match="rank 1 holds another share of the optimizer's state"):
            state_of(training.optimizer).gather()
        with pytest.raises(WorkloadError, match="rank 1 holds another share") as caught:
            training.flip(OFF)
        training.optimizer.state.clear()
        training.flip(OFF)
        return str(caught.value)

    assert len(set(Meeting(2).run(joined))) == 1
