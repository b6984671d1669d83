"""Settings and what is loaded: refused when they are asked for, adapted when something else is loaded."""

from __future__ import annotations

import pytest

from gpumem_nb.kernel import compatibility
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import WorkloadInfo

PLAIN = WorkloadInfo("plain", 1, 4, dataset_len=100, blocks=0, own_optimizer=None, own_learning_rate=None)
OWN = WorkloadInfo("own", 1, 4, dataset_len=100, blocks=3, own_optimizer="RMSprop", own_learning_rate=0.5)


def test_what_a_workload_lacks_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidInput, match=r"plain brings no optimizer .*=sgd, momentum, adam, adamw, adamw8bit, adafactor or muon\."
    ):
        compatibility.check(Settings(optimizer="own"), PLAIN, 2)
    with pytest.raises(InvalidInput, match="batch_size × accumulation_steps up to 50"):
        compatibility.check(Settings(batch_size=51), PLAIN, 2)
    with pytest.raises(InvalidInput, match=r"no torch.nn.Linear with more outputs than inputs makes .* plain"):
        compatibility.check(Settings(loss_head="chunked"), PLAIN, 2)
    compatibility.check(Settings(optimizer="own", batch_size=50), OWN, 2)


def test_loading_takes_what_comes_with_the_workload_and_leaves_what_does_not() -> None:
    chosen = Settings(precision="bf16", checkpointing="sqrt", optimizer_impl="fused")
    own = compatibility.adapted(chosen, OWN)
    assert own == Settings(precision="bf16", checkpointing="sqrt", optimizer="own", learning_rate=0.5)
    assert compatibility.adapted(own, PLAIN) == Settings(precision="bf16")
    assert compatibility.adapted(chosen, PLAIN) == chosen.replace(checkpointing="none")


def test_an_optimizer_of_its_own_is_offered_only_by_a_workload_that_brings_one() -> None:
    refuses = KNOBS["optimizer"].refuses
    assert refuses is not None
    assert [bool(refuses("own", workload)) for workload in (None, PLAIN, OWN)] == [True, True, False]
    assert not any(refuses(name, None) for name in KNOBS["optimizer"].choices if name != "own")


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "fitting"),
    [(8, 8, (8, 6)), (64, 8, (50, 1)), (8, 2, (8, 2)), (50, 1, (50, 1))],
)
def test_of_a_small_dataset_fewer_micro_batches_are_taken_before_smaller_ones(
    batch_size: int, accumulation_steps: int, fitting: tuple[int, int]
) -> None:
    asked = Settings(batch_size=batch_size, accumulation_steps=accumulation_steps)
    within = compatibility.within_dataset(asked, PLAIN, 2)
    assert (within.batch_size, within.accumulation_steps) == fitting
    compatibility.check(within, PLAIN, 2)


def test_what_is_kept_from_before_is_told_as_it_fits_the_data() -> None:
    said = compatibility.kept(Settings(batch_size=8, accumulation_steps=8), PLAIN, 2)
    assert said.startswith("Kept from before: batch_size=8 accumulation_steps=6 ")
    small = WorkloadInfo("plain", 1, 4, dataset_len=20, blocks=0)
    assert compatibility.kept(Settings(), small, 2) == "", "any load would begin with the same"


def test_an_optimizer_without_fused_kernels_takes_torchs_default_unless_they_are_asked_for() -> None:
    fused = Settings(optimizer_impl="fused")
    assert compatibility.asked(fused, {"optimizer": "adafactor"}, 2) == Settings(optimizer="adafactor")
    assert compatibility.asked(fused, {"optimizer": "sgd"}, 2) == fused.replace(optimizer="sgd")
    looped = Settings(optimizer_impl="loop")
    assert compatibility.asked(looped, {"optimizer": "adafactor"}, 2) == looped.replace(optimizer="adafactor")
    for before, named in (
        (fused, {"optimizer": "adafactor", "optimizer_impl": "fused"}),
        (Settings(optimizer="adafactor"), {"optimizer_impl": "fused"}),
    ):
        with pytest.raises(InvalidInput, match=r"no adafactor with optimizer_impl=fused\. Use .*foreach or loop\."):
            compatibility.check(compatibility.asked(before, named, 2), WorkloadInfo("net", 1, 4, 100, blocks=4), 2)
