"""``offload_optimizer=on`` is foreseen: peaks of the device, and what waits in host memory."""

from __future__ import annotations

import gc
import itertools

import pytest
from torch.optim import AdamW

from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.step import DryStep
from gpumem_nb.engine.step import pieces
from gpumem_nb.memory import host_pool
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.categories import CATEGORIES, OPTIMIZER_STATE
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.forecast import Kernels
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.tiers import every, first_tier
from tests.unit.test_muon import MODELS, trainer
from tests.unit.test_narrow_weights import Net, data, made, run, seen_loss
from tests.unit.test_offload_optimizer import OFF, ON, Sum, state_of, waiting
from tests.unit.test_offload_optimizer import small_pieces as small_pieces  # a fixture
from tests.unit.test_one_rank import alone as alone  # a fixture

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    first_tier(itertools.product(MODELS, ["adamw", "momentum", "adafactor"]), every(4)),  # each on another model
)
def test_the_peak_after_a_flip_is_the_one_that_was_predicted_and_off_again_is_as_before(
    gpu: VirtualGPU, alone: Overheard, name: str, optimizer: str
) -> None:
    gc.collect()
    alone.keeps = False
    one, off = trainer(gpu, name), Settings(batch_size=2, optimizer=optimizer)
    on = off.replace(offload_optimizer="on")
    assert one.run(Chunk(off, 1, 3, ledger_steps=1)).failure is None
    flips = [on, on.replace(optimizer_impl="loop"), off, on.replace(checkpointing="blocks", clip_norm=1.0), off]
    peaks = []
    for number, now in enumerate(flips, start=2):
        found = one.trials.forecast(now, [2], [2], 0)
        assert found.failure is None
        reply = one.run(Chunk(now, number, 3, ledger_steps=1))
        assert reply.failure is None
        peaks.append(reply.samples[-1].live_peak_bytes)
        assert peaks[-1] == pytest.approx(found.of[0].live_peak_bytes, abs=64)
        ledger = reply.samples[-1].ledger
        assert ledger is not None
        held = sum(value.nbytes for value in state_of(one)) - waiting(one)
        assert ledger.at_rest.get(OPTIMIZER_STATE, 0) == held
        assert ledger.host_bytes == ledger.host_state_bytes == waiting(one)
    assert peaks[2] == peaks[4] >= peaks[0]


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adafactor", "muon", "adamw8bit"])
def test_a_state_that_there_is_not_yet_is_foreseen_as_later_updates_bring_it(
    gpu: VirtualGPU, alone: Overheard, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    gc.collect()
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 4096)
    alone.keeps = False
    one = trainer(gpu, "gpt2")
    assert one.run(Chunk(OFF.replace(optimizer="sgd"), 1, 2)).failure is None
    on = ON.replace(optimizer=optimizer, offload_activations="on", batch_size=1)
    found = one.trials.forecast(on, [1], [1], 0).of[0]
    reply = one.run(Chunk(on, 2, 4, ledger_steps=1))
    assert reply.failure is None
    assert reply.samples[-1].live_peak_bytes == pytest.approx(found.live_peak_bytes, abs=64)
    assert reply.samples[-1].ledger is not None
    assert reply.samples[-1].ledger.host_bytes == found.host_bytes


def test_the_state_of_ones_own_optimizer_is_counted_where_it_lies_beside_another(
    gpu: VirtualGPU, alone: Overheard
) -> None:
    alone.keeps = False
    one = made(optimizer=lambda params: AdamW(params, lr=1e-3))
    run(one, ON.replace(optimizer="own"), 1, 2)
    flips = [(ON, "adam"), (ON, "own"), (OFF, "adam"), (OFF, "own"), (ON, "own"), (ON, "adam"), (OFF, "adam")]
    for number, (settings, optimizer) in enumerate(flips, start=2):
        now = settings.replace(optimizer=optimizer)
        found = one.trials.forecast(now, [4], [4], 0).of[0]
        reply = one.run(Chunk(now, number, 3, ledger_steps=1))
        assert reply.failure is None
        last = reply.samples[-1]
        assert last.ledger is not None
        assert last.live_peak_bytes == pytest.approx(found.live_peak_bytes, abs=1024), "a state has 45 KiB"
        assert last.ledger.host_bytes == found.host_bytes


def test_a_state_that_some_weights_have_not_yet_is_foreseen_as_well(
    gpu: VirtualGPU, alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 4096)
    alone.keeps = False
    one, on = trainer(gpu, "gpt2"), ON.replace(optimizer="adamw", offload_activations="on", batch_size=1)
    weights = list(one.live.model.parameters())
    for weight in weights[:-2]:
        weight.requires_grad_(False)
    assert one.run(Chunk(on, 1, 2)).failure is None
    for weight in weights:
        weight.requires_grad_(True)
    found = one.trials.forecast(on, [1], [1], 0).of[0]
    reply = one.run(Chunk(on, 2, 4, ledger_steps=1))
    assert reply.failure is None
    assert reply.samples[-1].live_peak_bytes == pytest.approx(found.live_peak_bytes, abs=64)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adamw8bit", "muon"])
def test_without_ranks_it_is_predicted_as_well(optimizer: str) -> None:
    given, kernels = Workload("net", Net, data, seen_loss([])), Kernels(True, 1024)
    off, on = (
        DryStep(given, Batches(data()), now.replace(optimizer=optimizer), kernels, ranks=2).trace(4)
        for now in (OFF, ON)
    )
    state, left = (one.settled().bytes_by_category()[CATEGORIES.index(OPTIMIZER_STATE)] for one in (off, on))
    small = sum(weight.numel() for weight in Net().parameters() if weight.dim() == 1 or weight.numel() < 256)
    assert state > left
    assert left <= 3 * 4 * small + 64
    own = Workload("net", Net, data, seen_loss([]), optimizer=lambda params: Sum(params, lr=0.1))
    with pytest.raises(InvalidInput, match="Sum is none of them"):
        DryStep(own, Batches(data()), ON.replace(optimizer="own"), kernels, ranks=1)


def test_a_prediction_counts_what_would_wait_beside_the_device(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, settings = made(), ON
    run(one, OFF, 1, 2)
    state = sum(value.nbytes for value in state_of(one) if value.nbytes > 1024)
    for _ in range(2):  # it waits in the second turn
        found = one.trials.forecast(settings, [2, 4], [4, 16], 0)
        assert [each.host_bytes for each in found.of] == [state, state]
        assert not found.of[0].host_is_short
        assert one.trials.forecast(OFF, [2], [2], 0).of[0].host_bytes == 0
        both = one.trials.forecast(ON.replace(offload_activations="on"), [4], [4], 0).of[0].host_bytes
        assert both > state
        run(one, ON, 2, 1)
    run(one, OFF, 3, 1)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: state)
    assert one.trials.forecast(settings, [2], [2], 0).of[0].host_is_short
