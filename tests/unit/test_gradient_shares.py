"""``shard_gradients``: each rank keeps its share of averaged gradients, with the bits of those that are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW

from gpumem_nb.engine.link.communicator import Communicator
from gpumem_nb.engine.step import gradient_shares, optimizers
from gpumem_nb.engine.step.buckets import ReductionConfig
from gpumem_nb.engine.step.gradient_shares import GradientShares
from gpumem_nb.engine.step.optimizer_state import Replicas, hold_as, state_of
from gpumem_nb.engine.step.partition import Partition, laid_as
from gpumem_nb.engine.step.reduction import GradientReduction
from gpumem_nb.engine.step.shards import Shards
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import BACKWARD, REDUCTION
from tests.threads import Meeting
from tests.unit.test_shards import _one_thread as _one_thread
from tests.unit.test_shards import same

SHARED, WHOLE = ReductionConfig(1, False, "average", shared=True), ReductionConfig(1, False, "average")


def weights(kind: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((90, 70), (5,), (64, 4, 3, 3), (7, 200), (0,), (300,), (1000,))
    made = [nn.Parameter(torch.randn(shape).to(kind)) for shape in shapes]
    made[2].data = made[2].data.contiguous(memory_format=torch.channels_last)
    return made


class Rank:
    """One rank's weights, with gradients of its own in each step."""

    def __init__(self, link: Communicator, params: Sequence[nn.Parameter], config: ReductionConfig) -> None:
        self.link, self.config, self.shares = link, config, GradientShares()
        self.params = [nn.Parameter(param.detach().clone()) for param in params]
        self.partition = Partition.of(self.params, link.size, link.rank)
        self.reduction = GradientReduction(self.params, (), link.size, config, torch.device("cpu"), self.shares)
        self.most_whole, self.parts = 0, list[str]()
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        self.most_whole = max(self.most_whole, sum(one.grad is not None for one in self.params if one.numel()))

    def backward(self, step: int = 0, order: Sequence[int] | None = None, failed: bool = False) -> Any:
        """Compute gradients in this order, the last weights first by default, and bring them to the other ranks."""
        for param in self.params:
            param.grad = None
        spans = self.partition.kept(self.params) if self.config.shared else {}
        self.reduction.begin(self.config, False, True, spans)
        self.reduction.arm(self.parts.append)
        generator = torch.Generator().manual_seed(100 * step + self.link.rank)
        factors = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in self.params]
        for place in reversed(range(len(self.params))) if order is None else order:
            (self.params[place] * factors[place]).sum().backward()
        self.reduction.look_at_rest()
        self.reduction.ballot[0] = float(failed)
        return self.reduction.finish(failed)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_share_has_the_bits_of_the_average_and_few_gradients_are_whole_at_once(kind: torch.dtype) -> None:
    params = weights(kind)

    def averaged(link: Communicator, config: ReductionConfig) -> Any:
        rank = Rank(link, params, config)
        assert rank.backward().error is None
        square = rank.reduction.average_square()
        assert square is not None
        if not config.shared:
            grads = [param.grad for param in rank.params]
            return [None if grad is None else grad.as_strided((grad.numel(),), (1,)) for grad in grads], square.item()
        assert [param.grad for param in rank.params if param.numel()] == [None] * 6
        rows, _ = rank.shares.of(rank.params)
        return rows, [rank.partition.mine(place) for place in rows or ()], square.item(), rank.most_whole

    whole, square = Meeting(3).run(lambda link: averaged(link, WHOLE))[0]
    for rows, spans, square_of_shares, most_whole in Meeting(3).run(lambda link: averaged(link, SHARED)):
        assert all(same(rows[place], whole[place][begin:end]) for place, begin, end in spans)
        assert sorted(rows) == [0, 1, 2, 3, 5, 6]
        assert square_of_shares == square
        assert most_whole <= 3  # two under way, and the one that has come


def test_norms_add_up_to_the_bits_of_whole_gradients_of_several_types_and_of_none() -> None:
    kinds = torch.float32, torch.float64

    def of_rank(link: Communicator, params: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        totals = []
        for config in (SHARED, WHOLE):
            rank = Rank(link, params, config)
            rank.backward()
            if config.shared:
                _, norms = rank.shares.of(rank.params)
                totals.append(torch.linalg.vector_norm(torch.stack(norms)))
            else:
                totals.append(nn.utils.clip_grad_norm_(rank.params, 1.0))
        return totals[0], totals[1]

    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        sizes = [*torch.randint(1, 300, (30,), generator=generator).tolist(), 0, 0]
        params = [nn.Parameter(torch.zeros(size, dtype=kinds[size % 2])) for size in sizes]
        of_shares, of_whole = Meeting(2).run(lambda link, params=params: of_rank(link, params))[0]  # type: ignore[misc]
        assert torch.equal(of_shares, of_whole)


def trained(rank: Rank, steps: int, clip_norm: float | None, scaler: GradScaler | None) -> list[Tensor]:
    settings = Settings(bucket_mib=0.01)
    optimizer = AdamW(rank.params, lr=0.01)
    form = Shards(optimizer, rank.link.size) if rank.config.shared else Replicas(optimizer)
    hold_as(optimizer, form)
    for step in range(steps):
        rank.backward(step)
        rows, norms = rank.shares.of(rank.params)
        update = (lambda: scaler.step(optimizer)) if scaler else optimizer.step
        optimizers.update_share(optimizer, scaler, clip_norm, update, state_of(optimizer).updating, rows, norms)
        form.spread(form.after_update(settings, rows))
    return [param.detach().clone() for param in rank.params]


@pytest.mark.parametrize(("clip_norm", "scaled"), [(None, False), (0.5, False), (0.5, True), (None, True)])
def test_weights_are_those_of_whole_gradients_to_the_bit_also_clipped_and_scaled(
    clip_norm: float | None, scaled: bool
) -> None:
    params = weights()

    def of_rank(link: Communicator, config: ReductionConfig) -> Any:
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None
        if scaler:
            scaler.scale(torch.ones(()))
        return trained(Rank(link, params, config), 4, clip_norm, scaler)

    expected = Meeting(3).run(lambda link: of_rank(link, WHOLE))[0]
    for found in Meeting(3).run(lambda link: of_rank(link, SHARED)):
        assert same(found, expected)


def test_an_overflow_in_the_share_of_one_rank_is_skipped_by_the_scaler_of_all() -> None:
    params = weights()

    def of_rank(link: Communicator) -> tuple[float, bool]:
        rank = Rank(link, params, SHARED)
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer = AdamW(rank.params)
        hold_as(optimizer, Shards(optimizer, link.size))
        rank.params[0].register_hook(lambda grad: grad.index_fill(0, torch.tensor([89]), torch.inf))
        before = [param.detach().clone() for param in rank.params]
        rank.backward()
        rows, norms = rank.shares.of(rank.params)
        updating = state_of(optimizer).updating
        optimizers.update_share(optimizer, scaler, None, lambda: scaler.step(optimizer), updating, rows, norms)
        return scaler.get_scale(), same([param.detach() for param in rank.params], before)

    assert Meeting(3).run(of_rank) == [(2.0, True)] * 3


def test_what_a_rank_waits_for_gradients_in_backward_is_told_apart_from_computing() -> None:
    params = weights()

    def of_rank(link: Communicator) -> list[str]:
        rank = Rank(link, params, SHARED)
        rank.backward()
        return rank.parts

    assert Meeting(2).run(of_rank) == [[REDUCTION, BACKWARD] * 3] * 2


def test_ranks_whose_gradients_come_in_another_order_do_not_wait_for_each_other_for_ever() -> None:
    params = weights()

    def of_rank(link: Communicator) -> Any:
        rank = Rank(link, params, SHARED)
        order = list(range(len(params)))
        rank.backward(order=order if link.rank else order[::-1])
        return rank.shares.of(rank.params)[1]

    norms = Meeting(2, timeout_s=10).run(of_rank)
    assert same(norms[0], norms[1])


@pytest.mark.parametrize("first", [0, 3])
def test_a_rank_that_fails_half_way_takes_part_in_what_was_not_sent(first: int) -> None:
    params = weights()

    def of_rank(link: Communicator) -> list[int]:
        rank = Rank(link, params, SHARED)
        failed = link.rank == 1
        order = list(range(len(params)))[::-1]
        return [rank.backward(0, order[first:] if failed and first else order, failed).sums[0], rank.most_whole]

    found = Meeting(2, timeout_s=10).run(of_rank)
    assert [failures for failures, _ in found] == [1, 1]
    assert found[0][1] <= 3


def test_a_rank_that_fails_has_let_go_of_its_shares_before_it_takes_memory_for_what_it_still_sends() -> None:
    params, kept = weights(), list[Any]()

    def of_rank(link: Communicator) -> None:
        rank = Rank(link, params, SHARED)
        if link.rank == 1:
            start = link.start_reduction

            def noting(wires: Sequence[Tensor], *args: Any) -> Any:
                kept.append(rank.shares.of(rank.params)[0])
                return start(wires, *args)

            link.start_reduction = noting  # type: ignore[method-assign, assignment]
        rank.backward(0, [6, 5, 3, 2, 1][: 5 - link.rank], failed=True)

    Meeting(2, timeout_s=10).run(of_rank)
    assert sorted(kept[3]) == [5, 6]
    assert kept[4:] == [None] * (len(kept) - 4)
    assert len(kept) == 6


def test_a_weight_without_a_gradient_holds_the_others_up_in_the_first_step_alone() -> None:
    params = weights()
    used = [6, 3, 2, 1, 0]

    def of_rank(link: Communicator) -> Any:
        rank = Rank(link, params, SHARED)
        found = []
        for step in range(2):
            rank.most_whole = 0
            rank.backward(step, used)
            rows, _ = rank.shares.of(rank.params)
            found.append((rank.most_whole, sorted(rows or ())))
        late = rank.backward(2, [*used, 5])  # which comes after its bucket has left
        return found, late.missed or rank.reduction.torn

    for found, torn in Meeting(2, timeout_s=10).run(of_rank):
        assert [places for _, places in found] == [[0, 1, 2, 3, 6]] * 2
        assert [most for most, _ in found] == [5, 3]
        assert torn


@pytest.mark.parametrize("ready_before", [1, 2])
def test_a_gradient_that_comes_after_its_bucket_has_left_is_not_lost_where_that_is_cut_in_backward(
    ready_before: int,
) -> None:
    params = weights()
    used = [5, 3, 2, 1, 0]

    def of_rank(link: Communicator) -> Any:
        rank = Rank(link, params, SHARED)
        for step in range(2):
            rank.backward(step, used)
        rank.backward(2, [*used[:ready_before], 6, *used[ready_before:]])  # the last weight, which had none before
        torn = rank.reduction.torn
        rank.reduction.wait_for_backward()
        again = rank.backward(2, [*used, 6])
        return torn, rank.reduction.torn, again.missed, sorted(rank.shares.of(rank.params)[0] or ())

    assert Meeting(2, timeout_s=10).run(of_rank) == [(True, False, False, [0, 1, 2, 3, 5, 6])] * 2


def test_a_weight_that_gets_a_gradient_now_and_then_is_waited_for_and_costs_the_memory_of_no_other_step() -> None:
    params = weights()
    used = [5, 3, 2, 1, 0]

    def of_rank(link: Communicator) -> Any:
        rank, found = Rank(link, params, SHARED), list[tuple[bool, int]]()
        late = [5, 3, 6, 2, 1, 0]
        for step, order in enumerate((used, used, late, late, used, late)):
            rank.most_whole = 0
            rank.backward(step, order)
            found.append((rank.reduction.torn, rank.most_whole))
            if rank.reduction.torn:
                rank.reduction.wait_for_backward()  # as the step is taken again
        return found

    torn, not_torn = True, False
    for found in Meeting(2, timeout_s=10).run(of_rank):
        assert found[:2] == [(not_torn, 5), (not_torn, 3)]
        assert found[2][0] is torn
        assert found[3:] == [(not_torn, 3), (not_torn, 5), (not_torn, 3)]


class NoRoom(Tensor):
    """A tensor of a GPU that has no memory left for a copy of it."""

    def clone(self, **_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_where_there_is_no_room_for_a_copy_of_a_share_it_stays_where_it_came_because_ranks_have_voted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = weights()
    config = ReductionConfig(2**30, False, "average", shared=True)  # one bucket, which carries the ballot

    def of_rank(link: Communicator) -> list[Any]:
        rank = Rank(link, params, config)
        error = rank.backward().error
        return [error, *(rank.shares.of(rank.params)[0] or {}).values()]

    expected = Meeting(2, timeout_s=10).run(of_rank)
    monkeypatch.setattr(gradient_shares, "laid_as", lambda *args: laid_as(*args).as_subclass(NoRoom))
    assert [len(of) for of in expected] == [7, 7]
    assert same(Meeting(2, timeout_s=10).run(of_rank), expected)
