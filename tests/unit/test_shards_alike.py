"""Ranks that share an optimizer's state stay alike whatever a cell, a failure or missing memory does to one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpumem_nb.engine import copies
from gpumem_nb.engine.link.communicator import Communicator, here
from gpumem_nb.engine.step import partition
from gpumem_nb.engine.step.ballot import WeightWatch
from gpumem_nb.engine.step.optimizer_state import Replicas, state_of
from gpumem_nb.engine.step.partition import laid_as
from gpumem_nb.engine.step.parts import Parts
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.shared.errors import WorkloadError
from tests.threads import Meeting
from tests.unit.test_shards import OFF, ON, Training, in_numbers, net, same
from tests.unit.test_shards_flips import live


@pytest.fixture(autouse=True)
def _ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checksums of processes may use the same room each time, and a rank computes on one thread."""
    monkeypatch.setattr(copies, "_workplace", copies._workplace.__wrapped__)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def out_of_room_on_rank_1(monkeypatch: pytest.MonkeyPatch, name: str, least: int) -> None:
    """On the second rank torch's function of this name finds no memory for so many numbers."""
    before = getattr(torch, name)

    def limited(*args: Any, **more: Any) -> Tensor:
        made: Tensor = before(*args, **more)
        if here().size > 1 and here().rank == 1 and made.numel() >= least:
            raise torch.OutOfMemoryError("no room")
        return made

    monkeypatch.setattr(torch, name, limited)


def rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def betas(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def steps(optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        values["step"] += 100


def no_state(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def laid_otherwise(optimizer: Optimizer) -> None:
    wide = next(param for param in optimizer.param_groups[0]["params"] if param.dim() == 4)
    wide.data = wide.data.contiguous()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rate, "the option lr of AdamW"),
        (betas, "the option betas of AdamW"),
        (steps, "the number of steps in the state of AdamW"),
        (no_state, "the number of steps in the state of AdamW"),
        (laid_otherwise, "the order of weights in memory"),
    ],
)
def test_what_a_cell_sets_on_one_rank_alone_is_noticed_and_named_while_the_state_is_shared(
    change: Callable[[Optimizer], None], named: str, shared: bool
) -> None:
    model = net()

    def compared(link: Communicator) -> tuple[list[float], list[float], str]:
        own = copy.deepcopy(model)
        optimizer = AdamW(own.parameters())
        training = Training(own, lambda _: optimizer, link.size)
        training.params = list(own.parameters())
        training.flip(ON if shared else OFF)
        training.take(2)
        watch = WeightWatch(Parts(own, lambda model, batch: model), lambda: state_of(optimizer))

        def digest() -> list[float]:
            watch.begin()
            return watch.digest().tolist()

        before = digest()
        if link.rank == 1:
            change(optimizer)
        return before, digest(), watch.examine()

    (before, after, said), (before_too, after_too, said_too) = Meeting(2).run(compared)
    assert before == before_too
    assert said == said_too
    if not shared:  # then weights would differ after the next update
        assert (after, said) == (after_too, "")
        return
    assert after != after_too
    assert f"would update their shares in different ways: {named} is not the same on rank 1" in said


def test_weights_are_compared_once_ranks_share_the_state_by_other_borders() -> None:
    def due(link: Communicator) -> list[bool]:
        training = Training(net(), AdamW, link.size)
        watch = WeightWatch(Parts(nn.Linear(1, 1), lambda model, batch: model), lambda: state_of(training.optimizer))
        watch.agreed(1)
        found = [watch.due(2)]
        training.flip(ON)
        found.append(watch.due(2))
        watch.agreed(2)
        return [*found, watch.due(3)]

    assert Meeting(2).run(due) == [[False, True, False]] * 2


def test_after_a_flip_that_failed_on_one_rank_the_state_is_saved_and_synchronized() -> None:
    def trained(link: Communicator) -> Any:
        training = Training(net(), AdamW, link.size)
        training.take(2)
        before = in_numbers(Replicas(training.optimizer).gather()) if link.rank == 0 else None
        training.sharing.joins(ON)
        if link.rank == 0:  # the other one ran out of memory before
            training.sharing.apply(training.optimizer, ON, tried=False)
        whole = training.sharing.agreed(training.optimizer).gather()
        training.sharing.agreed(training.optimizer).follow_first()
        return before, in_numbers(whole) if link.rank == 0 else None

    (before, after), _ = Meeting(2, timeout_s=10).run(trained)
    assert same(before, after)


def test_a_rank_without_room_for_its_share_lets_no_other_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(value: Tensor, param: Tensor) -> Tensor:
        if here().rank == 1:
            raise torch.OutOfMemoryError("no room")
        return laid_as(value, param)

    trainings = [Training(net(), AdamW, 2) for _ in range(2)]
    for one in trainings:
        one.take(1)
    monkeypatch.setattr(partition, "laid_as", limited)

    def agreed(link: Communicator) -> str:
        training = trainings[link.rank]
        training.sharing.joins(ON)
        if link.rank == 0:
            training.sharing.apply(training.optimizer, ON, tried=False)
        with pytest.raises((WorkloadError, torch.OutOfMemoryError)) as caught:
            training.sharing.agreed(training.optimizer)
        return str(caught.value)

    found = Meeting(2, timeout_s=10).run(agreed)
    assert found == ["another rank has no room for its share of the optimizer's state", "no room"]


def test_a_rank_without_room_for_what_was_put_aside_lets_no_other_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [live(2) for _ in range(2)]

    def ended(link: Communicator) -> str:
        model = models[link.rank]
        for param in model.parameters:
            param.grad = torch.ones_like(param)
        model.optimizer.step()
        for changed in (ON, ON.replace(optimizer="sgd")):
            model.join_shards(changed)
            model.apply(changed)
        with pytest.raises((WorkloadError, torch.OutOfMemoryError)) as caught:
            model.join_shards(OFF.replace(optimizer="sgd"))
        return str(caught.value)

    out_of_room_on_rank_1(monkeypatch, "empty_strided", 100)
    found = Meeting(2, timeout_s=10).run(ended)
    assert found == ["another rank has no room for the state of the optimizer that was in use before", "no room"]


def test_weights_on_trial_for_which_a_rank_has_no_room_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [Training(net(), AdamW, 2) for _ in range(2)]

    def timed(link: Communicator) -> float | str | None:
        try:
            return trainings[link.rank].sharing.gather_s(trainings[link.rank].params, ON)
        except torch.OutOfMemoryError as error:
            return str(error)

    out_of_room_on_rank_1(monkeypatch, "empty", 1000)
    assert Meeting(2, timeout_s=10).run(timed) == [None, "no room"]


def test_an_optimizer_whose_whole_state_has_no_room_is_handed_back_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def handed_back(link: Communicator) -> Any:
        training = Training(net(), AdamW, link.size)
        training.flip(ON)
        training.take(1)
        if link.rank == 1:
            out_of_room_on_rank_1(monkeypatch, "empty_like", 100)
        link.any_rank(False, "patched")
        said = training.sharing.hand_back(training.optimizer)
        return said, len(training.optimizer.state), state_of(training.optimizer).partition

    for said, count, shared in Meeting(2, timeout_s=10).run(handed_back):
        assert "The state of the AdamW that you attached is gone" in said
        assert "no room" in said
        assert (count, shared) == (0, None)


@pytest.mark.parametrize("ends", [False, True])
def test_a_group_that_a_cell_takes_out_and_adds_again_goes_on_with_its_state(ends: bool) -> None:
    """Also one of small weights, of which the poorest rank has all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 5), nn.Linear(70, 64), nn.Linear(5, 3), nn.Linear(64, 61))

    def trained(link: Communicator) -> Any:
        training = Training(model, lambda params: AdamW([{"params": [one]} for one in params]), link.size)
        shared = ON if link.size > 1 else OFF
        optimizer, params = training.optimizer, training.params
        training.flip(shared)
        training.take(2)
        out = [optimizer.param_groups.pop(0) for _ in range(3)]
        training.params = params[3:]
        state_of(optimizer).follow_groups()
        training.take(2)
        for group in reversed(out):
            optimizer.add_param_group(group)
        training.params = params
        state_of(optimizer).follow_groups()
        training.take(2)
        if ends:
            training.flip(OFF)
            training.take(1)
        whole = state_of(optimizer).gather()
        return training.weights(), in_numbers(whole) if link.rank == 0 else None

    expected = Meeting(1).run(trained)[0]
    first, second = Meeting(2).run(trained)
    assert same(first[0], expected[0])
    assert same(second[0], expected[0])
    assert same(dict(sorted(first[1].items())), dict(sorted(expected[1].items())))


def test_a_group_that_comes_with_its_whole_state_is_shared_too() -> None:
    model = net()

    def trained(link: Communicator) -> Any:
        training = Training(model, lambda params: AdamW([{"params": [one]} for one in params]), link.size)
        training.take(2)
        out = training.optimizer.param_groups.pop(0)
        training.flip(ON if link.size > 1 else OFF)
        training.optimizer.add_param_group(out)
        state_of(training.optimizer).follow_groups()
        training.take(2)
        held = sum(one.numel() for one in tensors_in(dict(training.optimizer.state[training.params[0]])))
        return training.weights(), held

    (expected, whole), *_ = Meeting(1).run(trained)
    for weights, held in Meeting(2).run(trained):
        assert same(weights, expected)
        assert held == pytest.approx(whole / 2, rel=0.2)


def test_ranks_of_which_one_lost_the_vote_on_an_update_get_no_weights_of_two_steps() -> None:
    def rejoined(link: Communicator) -> Any:
        training = Training(net(), AdamW, link.size)
        training.flip(ON)
        training.take(1)
        weights = training.weights()
        form = state_of(training.optimizer)
        form.stale = link.rank == 0
        training.sharing.rejoined(training.optimizer, 2 - link.rank)
        stale = form.stale
        form.follow_first()  # rank 0's weights were given to all by then
        return stale, form.stale, same(training.weights(), weights)

    assert Meeting(2).run(rejoined) == [(True, False, True), (False, False, True)]
