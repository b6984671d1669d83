"""Gradients of a GPU on their way through the host: right in any order of streams, and what becomes of them if not."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.link import staging
from gpumem_nb.engine.link.communicator import AVERAGE, SUM, Communicator, Separated, Transfer
from gpumem_nb.engine.link.staging import HostStage
from gpumem_nb.engine.step.buckets import ReductionConfig
from gpumem_nb.engine.step.reduction import GradientReduction
from tests.link_promises import PROMISES
from tests.streams import Machine, instead_of_cuda
from tests.threads import Meeting, OfThread


class ByHost(OfThread):
    """A thread's link that carries its tensors through the host."""

    on_host = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.stage = HostStage(super().start_reduction)

    def start_reduction(self, tensors: Sequence[Tensor], name: str, operation: str = AVERAGE) -> Transfer:
        """Carry them to the host first."""
        return self.stage.start(tensors, name, operation)


@pytest.mark.parametrize("promise", PROMISES, ids=[promise.__name__ for promise in PROMISES])
def test_the_promises_of_every_link_are_kept(promise: Callable[[Communicator], None]) -> None:
    Meeting(2, link=ByHost).run(promise)


@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_those_of_all_ranks_in_any_order_of_streams(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    instead_of_cuda(monkeypatch)

    def value(step: int, bucket: int, rank: int) -> float:
        return 100.0 * step + 10 * bucket + rank

    def train(link: Communicator) -> list[list[float]]:
        found: list[list[float]] = []
        with Machine(2 * seed + link.rank) as machine:
            for step in range(3):
                gradients = [torch.full((3, bucket + 1), math.nan) for bucket in range(4)]
                transfers = []
                for bucket, gradient in enumerate(gradients):
                    machine.compute(partial(gradient.fill_, value(step, bucket, link.rank)))
                    transfers.append(link.start_reduction([gradient], f"bucket.{bucket}", SUM))
                    transfers[0].done()
                for transfer in transfers:
                    transfer.wait()
                machine.compute(lambda g=gradients: found.append([one.mean().item() for one in g]))
                for gradient in gradients:  # the next step's tensors may lie here
                    machine.compute(partial(gradient.fill_, math.inf))
            machine.synchronize()
        return found

    wanted = [[2 * value(step, bucket, 0) + 1 for bucket in range(4)] for step in range(3)]
    assert Meeting(2, link=ByHost).run(train) == [wanted, wanted]


class Noted:
    """A reduction of which a test says when it is done."""

    arrived_s: float | None = None

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.name, self.tensors, self.ready, self.awaited = name, list(tensors), False, False

    def done(self) -> bool:
        return self.ready

    def wait(self) -> None:
        self.awaited = True


class Backend:
    """What a stage sends."""

    def __init__(self) -> None:
        self.sent: list[Noted] = []
        self.stage = HostStage(self._send)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.sent]

    def _send(self, tensors: Sequence[Tensor], name: str, operation: str) -> Transfer:
        self.sent.append(Noted(name, tensors))
        return self.sent[-1]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    instead_of_cuda(monkeypatch)
    return Backend()


def test_a_group_is_sent_when_it_is_on_the_host_and_who_waits_for_one_sends_all(backend: Backend) -> None:
    with Machine(1) as machine:
        groups = [[torch.ones(2), torch.ones(3)] for _ in range(3)]
        carried = [backend.stage.start(group, str(place), SUM) for place, group in enumerate(groups)]
        assert not backend.sent
        while not backend.sent:
            assert not carried[0].done()
        assert [tensor.shape for tensor in backend.sent[0].tensors] == [(5,)], "as one tensor"
        carried[1].wait()  # others may wait for the third, or for the first
        assert backend.names == ["0", "1", "2"]
        assert [one.awaited for one in backend.sent] == [False, True, False]
        assert carried[0].arrived_s is None
        backend.sent[0].ready = True
        assert carried[0].done()
        first_seen_s = carried[0].arrived_s
        carried[0].wait()
        assert carried[0].arrived_s == first_seen_s
        machine.synchronize()


def test_memory_is_made_once_and_anew_where_groups_change(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, torch.dtype, bool]] = []

    def make(*asked: Any) -> Tensor:
        made.append(asked)
        return torch.empty(asked[0], dtype=asked[1])

    monkeypatch.setattr(staging, "_memory", make)

    def step(*sizes: int, dtype: torch.dtype = torch.float32) -> None:
        for place, size in enumerate(sizes):
            backend.stage.start([torch.ones(size, dtype=dtype)], f"bucket.{place}", SUM).wait()

    with Machine(1):
        for _ in range(3):
            step(4, 6)
        assert made == [(4, torch.float32, True), (6, torch.float32, True)]
        for _ in range(2):
            step(10)
        assert list(backend.stage._rooms) == ["bucket.0"], "that of the second one is not held for nothing"
        step(10, dtype=torch.float16)
        assert made[2:] == [(10, torch.float32, True), (10, torch.float16, True)]


def test_a_group_that_is_given_up_is_not_sent_and_the_next_step_is_right(backend: Backend) -> None:
    with Machine(3) as machine:
        given_up = backend.stage.start([torch.ones(4)], "bucket.0", SUM)
        del given_up
        gc.collect()
        gradient = torch.zeros(4)
        machine.compute(lambda: gradient.fill_(7))
        carried = backend.stage.start([gradient], "bucket.0", SUM)
        carried.wait()
        machine.synchronize()
        assert backend.names == ["bucket.0"]
        assert gradient.tolist() == [7] * 4


def test_after_the_ranks_came_apart_nothing_is_copied_or_sent(backend: Backend) -> None:
    with Machine(3) as machine:
        carried = backend.stage.start([torch.ones(4)], "bucket.0", SUM)
        backend.stage.forget()
        assert not any(stream.waiting for stream in machine.streams), "memory of gradients may go back to the device"
        with pytest.raises(Separated):
            carried.wait()
    assert not backend.sent
    assert not backend.stage._rooms


def test_copies_go_by_pageable_memory_where_the_host_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: int, **options: object) -> Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(*sizes, dtype=torch.float16)

    monkeypatch.setattr(torch, "empty", refuse)
    assert staging._memory(3, torch.float16, pinned=True).tolist() == [0, 0, 0]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_rank_that_failed_takes_part_from_the_host(monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    config = ReductionConfig(64, compressed, "average")
    asked: list[tuple[int, object]] = []
    usual = torch.empty

    def of_rank(link: Communicator) -> int:
        params = [nn.Parameter(torch.ones(8)) for _ in range(4)]
        reduction = GradientReduction(params, (), 2, config, torch.device("cpu"))
        reduction.begin(config, False, False)
        reduction.arm()
        if link.rank == 0:
            for param in reversed(params):
                param.sum().backward()
            reduction.look_at_rest()
        reduction.ballot[0] = float(link.rank == 1)
        return reduction.finish(link.rank == 1).sums[0]

    def make(size: int, **options: Any) -> Tensor:
        asked.append((size, options["device"]))
        return usual(size, **options)

    monkeypatch.setattr(torch, "empty", make)
    assert Meeting(2, link=ByHost).run(of_rank) == [1, 1]
    assert (8 * (2 if compressed else 4), torch.device("cpu")) in asked
