"""``shard_optimizer``: what an update of a share takes is foreseen, also under settings that are not in use."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

import gpumem_nb as gm
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.hollow import Hollow
from gpumem_nb.engine.dry.step import DryStep
from gpumem_nb.engine.packing import emptied
from gpumem_nb.engine.step.dry_update import AskedUpdate, foresee, timed_on_scratch
from gpumem_nb.engine.step.partition import Partition
from gpumem_nb.memory.ledger.trace import CODE
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.categories import GRADIENTS, OPTIMIZER_STATE
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.forecast import Kernels
from gpumem_nb.shared.settings import Settings

SENT_BYTES = 2**14


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(300, 71), nn.Linear(71, 1))


def with_gradients(net: nn.Module) -> None:
    for param in net.parameters():
        param.grad = torch.ones_like(param)


def highest_and_left(changes: list[int]) -> tuple[int, int]:
    highest = live = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest, live


@pytest.mark.parametrize("implementation", ["foreach", "loop"])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, RMSprop, Adagrad])
def test_an_update_of_a_share_is_foreseen_to_the_byte_state_there_or_not(
    gpu: VirtualGPU, kind: type[Optimizer], implementation: str
) -> None:
    net = network()
    optimizer: Any = kind(list(net.parameters()), foreach=implementation == "foreach")  # type: ignore[call-arg]
    partition = Partition.of(list(net.parameters()), 2, 1)
    partition.divide(optimizer)
    asked = AskedUpdate(optimizer, sent_bytes=SENT_BYTES, held=partition, wanted=partition)
    for _ in range(2):
        with_gradients(net)
        log = gpu.event_log()
        log.begin([])
        foreseen = foresee(asked, gpu.torch_device, log.allocation)
        log.end()
        log = gpu.event_log()
        log.begin([])
        asked.take(optimizer, None, optimizer.step)
        real = log.end()
        assert highest_and_left([row[1] for row in foreseen.rows]) == highest_and_left(real.bytes.tolist())
        held = sum(value.nbytes for kept in optimizer.state.values() for value in kept.values())
        assert sum(nbytes for _, nbytes, _ in foreseen.owned) == held
    assert timed_on_scratch(asked, gpu) is not None


@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_a_state_in_another_form_is_foreseen_as_what_comes_after_the_flip(
    gpu: VirtualGPU, kind: type[Optimizer]
) -> None:
    net = network()
    shared: Any
    whole: Any
    whole = kind(list(net.parameters()))  # type: ignore[call-arg]
    with_gradients(net)
    whole.step()
    partition = Partition.of(list(net.parameters()), 2, 0)
    shared = kind(list(net.parameters()))  # type: ignore[call-arg]
    for param, kept in whole.state.items():
        shared.state[param] = copy.deepcopy(kept)
    partition.divide(shared)

    def owned(asked: AskedUpdate) -> int:
        log = gpu.event_log()
        log.begin([])
        foreseen = foresee(asked, gpu.torch_device, log.allocation)
        log.end()
        return sum(nbytes for _, nbytes, _ in foreseen.of_new().owned)

    def held(optimizer: Any) -> int:
        return sum(value.nbytes for kept in optimizer.state.values() for value in kept.values() if value.dim())

    counts = 4 * len(whole.state)
    to_share = owned(AskedUpdate(whole, sent_bytes=SENT_BYTES, wanted=partition))
    to_whole = owned(AskedUpdate(shared, sent_bytes=SENT_BYTES, held=partition))
    assert to_share == pytest.approx(held(shared), abs=counts)
    assert to_whole == pytest.approx(held(whole), abs=counts)
    assert held(shared) == pytest.approx(held(whole) / 2, rel=0.01)
    assert timed_on_scratch(AskedUpdate(whole, sent_bytes=SENT_BYTES, wanted=partition), gpu) is not None
    assert timed_on_scratch(AskedUpdate(shared, sent_bytes=SENT_BYTES, held=partition), gpu) is not None


def rows() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(64), index % 64) for index in range(8)]


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def dry_state(ranks: int, given: Any = None, **knobs: Any) -> int:
    given = given or gm.Workload("mine", layers, rows, loss)
    step = DryStep(given, Batches(rows()), Settings(**knobs), Kernels(True, 1024), ranks)
    trace = step.trace(2)
    return int(trace.size[trace.category == CODE[OPTIMIZER_STATE]].sum())


def test_without_ranks_a_share_is_predicted_too() -> None:
    whole = dry_state(4)
    assert dry_state(4, shard_optimizer="on") == pytest.approx(whole / 4, rel=0.01)
    with pytest.raises(InvalidInput, match="frees nothing here: there is one rank"):
        dry_state(1, shard_optimizer="on")
    own = dataclasses.replace(gm.Workload("mine", layers, rows, loss), optimizer=Adafactor)
    with pytest.raises(WorkloadError, match="Adafactor is none of them"):
        dry_state(2, own, optimizer="own", shard_optimizer="on")


def whole_gradients(value: str, **knobs: Any) -> tuple[int, int]:
    """The most bytes of gradients in a step of 16 layers, and their size."""
    model = gm.Workload("deep", lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))), rows, loss)
    shared = {"shard_optimizer": "on", "shard_gradients": value, "bucket_mib": 0.01} | knobs
    trace = DryStep(model, Batches(rows()), Settings(**shared), Kernels(True, 1024), 4).trace(2)
    live = most = 0
    for event in trace.event.tolist():
        number = abs(event) - 1
        if trace.category[number] == CODE[GRADIENTS]:
            live += int(trace.size[number]) * (1 if event > 0 else -1)
            most = max(most, live)
    return most, 16 * 65 * 64 * 4


@pytest.mark.parametrize("knobs", [{}, {"clip_norm": 1.0, "precision": "bf16"}, {"optimizer": "sgd"}])
def test_without_ranks_it_is_predicted_that_few_gradients_are_whole(knobs: dict[str, Any]) -> None:
    most, size = whole_gradients("off", **knobs)
    assert most == pytest.approx(size, rel=0.05)
    most, _ = whole_gradients("on", **knobs)
    assert size / 4 < most < size / 4 + 4 * size / 16, "two buckets are under way, and one is filled"
    most, _ = whole_gradients("on", accumulation_steps=2, **knobs)
    assert most > size


def test_an_own_optimizer_that_ranks_share_is_whole_again_where_it_is_predicted_so() -> None:
    model = layers()
    optimizer = Adagrad(model.parameters())
    partition = Partition.of(list(model.parameters()), 2, 1)
    whole = sum(kept["sum"].nbytes for kept in optimizer.state.values())
    partition.divide(optimizer)
    hollow = Hollow("mine", emptied((model, loss, optimizer, None, None)), Batches(rows()), partition)
    assert dry_state(2, hollow, optimizer="own") == pytest.approx(whole, rel=0.01)
    assert dry_state(2, hollow, optimizer="own", shard_optimizer="on") == pytest.approx(whole / 2, rel=0.01)
