"""What every link between ranks must do; run on threads, on a rank by itself, and on Horovod's ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpumem_nb.engine.link.communicator import ADASUM, AVERAGE, SUM, Communicator, Separated

SHORT = (torch.bool, torch.uint8, torch.uint16, torch.bfloat16, torch.float16)
ODD_TYPES = (*SHORT, torch.int64, torch.float64, torch.complex64)


def sums_and_averages_are_the_same_on_all_ranks(link: Communicator) -> None:
    mine = [torch.arange(4.0) + link.rank, torch.full((2, 3), float(link.rank), dtype=torch.float64)]
    places = [tensor.data_ptr() for tensor in mine]
    link.all_reduce(mine, "promise.sum", SUM)
    ranks = sum(range(link.size))
    assert torch.equal(mine[0], link.size * torch.arange(4.0) + ranks)
    assert torch.equal(mine[1], torch.full((2, 3), float(ranks), dtype=torch.float64))
    assert [tensor.data_ptr() for tensor in mine] == places, "in place"
    averaged = [torch.full((3,), float(link.rank))]
    link.all_reduce(averaged, "promise.average", AVERAGE)
    assert torch.equal(averaged[0], torch.full((3,), ranks / link.size))


def several_reductions_are_under_way_at_once(link: Communicator) -> None:
    for _ in range(2):  # under the same names again
        groups = [[torch.full((5,), float(link.rank + place))] for place in range(3)]
        transfers = [link.start_reduction(group, f"promise.many.{place}", SUM) for place, group in enumerate(groups)]
        for place, (group, transfer) in enumerate(zip(groups, transfers, strict=True)):
            transfer.wait()
            assert transfer.done()
            assert torch.equal(group[0], torch.full((5,), float(sum(rank + place for rank in range(link.size)))))


def adasum_of_equal_gradients_is_that_gradient(link: Communicator) -> None:
    mine = [torch.arange(1.0, 9.0)]
    link.all_reduce(mine, "promise.adasum", ADASUM)
    assert torch.allclose(mine[0], torch.arange(1.0, 9.0))


def rows_are_gathered_in_rank_order_also_of_other_lengths(link: Communicator) -> None:
    gathered = link.all_gather(torch.full((link.rank + 1, 2), link.rank), "promise.gather")
    assert gathered[:, 0].tolist() == [rank for rank in range(link.size) for _ in range(rank + 1)]
    rows = torch.full((16 * (link.rank + 1),), link.rank, dtype=torch.uint8)
    room = torch.empty(8 * link.size * (link.size + 1), dtype=torch.uint8)
    place = room.data_ptr()
    gathered = link.all_gather(rows, "promise.gather in place", room)
    assert gathered.tolist() == [rank for rank in range(link.size) for _ in range(16 * (rank + 1))]
    assert link.size == 1 or gathered.data_ptr() == place
    assert link.numbers([link.rank, 2**62], "promise.numbers") == [[rank, 2**62] for rank in range(link.size)]
    assert link.of_each(b"x" * link.rank, "promise.each") == [b"x" * rank for rank in range(link.size)]


def each_rank_gets_its_rows_of_the_sum(link: Communicator) -> None:
    rows = 2 * link.size + 1
    mine = link.reduce_scatter(torch.arange(float(rows)).reshape(rows, 1) + link.rank, "promise.scatter")
    total = link.size * torch.arange(float(rows)) + sum(range(link.size))
    first = sum(2 + (rank < 1) for rank in range(link.rank))
    assert torch.equal(mine[:, 0], total[first : first + 2 + (link.rank < 1)])


def every_rank_gets_the_first_ones_bits(link: Communicator) -> None:
    generator = torch.Generator().manual_seed(link.rank)
    sent: dict[str, Tensor] = {}
    for dtype in ODD_TYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8, generator=generator)
        sent[str(dtype)] = raw.view(dtype)
    sent |= {"transposed": torch.full((3, 4), float(link.rank)).t(), "empty": torch.empty(0)}
    sent |= {"number": torch.tensor(link.rank), "same memory": torch.full((1, 3), float(link.rank)).expand(2, 3)}
    link.broadcast(sent)
    as_first = torch.Generator().manual_seed(0)
    for dtype in ODD_TYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8, generator=as_first)
        assert torch.equal(sent[str(dtype)].view(torch.uint8), raw)
    assert not sent["transposed"].any()
    assert sent["transposed"].stride() == (1, 4)
    assert (sent["number"].item(), sent["same memory"].any().item()) == (0, False)
    assert link.from_first(b"of rank %d" % link.rank, "promise.bytes") == b"of rank 0"
    assert link.from_first(b"", "promise.nothing") == b""


def one_vote_is_heard_by_all_whatever_torchs_defaults_are(link: Communicator) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert link.any_rank(link.rank == link.size - 1, "promise.yes")
        assert not link.any_rank(False, "promise.no")
    finally:
        torch.set_default_dtype(torch.float32)


PROMISES: tuple[Callable[[Communicator], None], ...] = (
    sums_and_averages_are_the_same_on_all_ranks,
    several_reductions_are_under_way_at_once,
    adasum_of_equal_gradients_is_that_gradient,
    rows_are_gathered_in_rank_order_also_of_other_lengths,
    each_rank_gets_its_rows_of_the_sum,
    every_rank_gets_the_first_ones_bits,
    one_vote_is_heard_by_all_whatever_torchs_defaults_are,
)


def who_leaves_ends_the_wait_of_the_others_and_all_join_again(link: Communicator) -> None:
    """Promises of links between several ranks; a single rank has no others to leave."""
    last = link.rank == link.size - 1
    if last:
        link.leave("promise")
    else:
        with pytest.raises(Separated) as caught:
            link.all_reduce([torch.ones(3)], "promise.alone")
        assert link.is_separation(caught.value)
    assert link.separated()
    rank, size = link.rank, link.size
    link.rejoin()
    assert (link.rank, link.size, link.separated()) == (rank, size, False)
    sums_and_averages_are_the_same_on_all_ranks(link)
