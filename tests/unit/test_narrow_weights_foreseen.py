"""``precision=bf16_weights``: what it needs is predicted, with ranks and without, and who proposes it."""

from __future__ import annotations

import gc

import pytest

from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.hollow import Hollow
from gpumem_nb.engine.dry.step import DryStep
from gpumem_nb.engine.packing import emptied
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.planning.tuning.space import space
from gpumem_nb.shared.categories import CASTS, CATEGORIES, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from gpumem_nb.shared.forecast import Kernels
from gpumem_nb.shared.knobs import KNOBS, Need
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Handles, Workload, WorkloadInfo
from tests.links import Overheard
from tests.tiers import every, first_tier
from tests.unit.test_muon import MODELS, trainer
from tests.unit.test_narrow_weights import NARROW, WIDE, Net, bits, data, made, run, same, seen_loss
from tests.unit.test_one_rank import alone as alone  # a fixture

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("name", first_tier(MODELS, every(3)))
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adafactor"])
def test_the_peak_after_a_flip_is_the_one_that_was_predicted(
    gpu: VirtualGPU, alone: Overheard, name: str, optimizer: str
) -> None:
    gc.collect()
    alone.keeps = False
    one, wide = trainer(gpu, name), Settings(batch_size=2, optimizer=optimizer)
    narrow = wide.replace(precision="bf16_weights")
    assert one.run(Chunk(wide, 1, 3, ledger_steps=1)).failure is None
    lying = bits(one.live.model)
    flips = [narrow, narrow.replace(optimizer_impl="loop"), wide, narrow.replace(checkpointing="blocks", clip_norm=1.0)]
    for number, now in enumerate(flips, start=2):
        found = one.trials.forecast(now, [2], [2], 0)
        assert found.failure is None
        if number == 2:
            assert same(bits(one.live.model), lying)
        reply = one.run(Chunk(now, number, 3, ledger_steps=1))
        assert reply.failure is None
        assert reply.samples[-1].live_peak_bytes == pytest.approx(found.of[0].live_peak_bytes, abs=64)
        held = sum(value.nbytes for kept in one.live.optimizer.state.values() for value in kept.values())
        assert found.of[0].at_peak.get(OPTIMIZER_STATE, 0) == held
        assert found.of[0].at_peak[PARAMETERS] == sum(weight.nbytes for weight in one.live.model.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_without_ranks_it_is_predicted_as_well_also_of_what_lies_in_bf16_by_then(optimizer: str) -> None:
    one = made()
    settings = NARROW.replace(optimizer=optimizer)
    given = Workload("net", Net, data, seen_loss([]))
    kernels = Kernels(True, 1024)
    wide, narrow = (
        DryStep(given, Batches(data()), now, kernels, ranks=2).trace(4)
        for now in (settings.replace(precision="bf16"), settings)
    )
    of_wide, of_narrow = (dict(zip(CATEGORIES, one.bytes_by_category(), strict=True)) for one in (wide, narrow))
    matrices = sum(weight.numel() for weight in Net().parameters() if weight.dim() > 1)
    assert of_wide[PARAMETERS] - of_narrow[PARAMETERS] == 2 * matrices
    assert of_wide[OPTIMIZER_STATE] == of_narrow[OPTIMIZER_STATE]

    run(one, settings, 1, 1)
    objects = emptied((one.live.model, seen_loss([]), None, None, None))
    places = one.live.narrowed.places(one.live.parts.parameters())
    hollow = Hollow("net", objects, Batches(data()), narrow=places)
    for now, expected in ((settings.replace(precision="bf16"), wide), (settings, narrow)):
        found = DryStep(hollow, Batches(data()), now, kernels, ranks=2).trace(4)
        assert found.bytes_by_category() == expected.bytes_by_category()


def test_a_tuner_tries_it_where_it_is_in_use_and_other_mathematics_are_allowed() -> None:
    def candidates(start: Settings, same: bool) -> set[str]:
        info = WorkloadInfo("net", 1, 4, dataset_len=None, blocks=0)
        found = space(start, info, 2, lambda changes: start.replace(**changes), same_mathematics=same)
        return {one.precision for one in found.candidates}

    assert candidates(WIDE, same=False) == {"fp32", "fp16", "bf16"}
    assert candidates(NARROW, same=False) == {"fp32", "fp16", "bf16", "bf16_weights"}
    assert candidates(WIDE, same=True) == {"fp32"}
    assert candidates(NARROW, same=True) == {"bf16_weights"}


@pytest.mark.parametrize("category", [PARAMETERS, GRADIENTS, CASTS])
def test_it_is_offered_where_weights_gradients_or_their_casts_fill_the_memory(category: str) -> None:
    flip = {"precision": "bf16_weights"}
    lighter = KNOBS["precision"].lighter
    assert lighter
    bf16 = WIDE.replace(precision="bf16")
    assert flip in list(lighter(Need(category, "backward", bf16, Handles(), tried_out=True)))
    for settings in (NARROW, bf16.replace(shard_optimizer="on")):
        assert flip not in list(lighter(Need(category, "backward", settings, Handles(), tried_out=True)))
    assert flip not in list(lighter(Need("activations", "backward", bf16, Handles(), tried_out=True)))
