"""Which flips are offered side by side, and which settings of the caching allocator are advised."""

from __future__ import annotations

import pytest

from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from gpumem_nb.planning.what_if import AllocatorWhatIf, single_flips
from gpumem_nb.shared.allocator_settings import DEFAULT, AllocatorSettings
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import WorkloadInfo


@pytest.mark.parametrize(("now", "others"), [(16, [8, 32]), (0.5, [0.25, 1]), (2.5, [1.25, 5])])
def test_half_and_twice_a_number_are_offered_whole_or_not(now: float, others: list[float]) -> None:
    workload = WorkloadInfo("mine", 1, 4, dataset_len=None, blocks=3)
    flips = single_flips(Settings(fusion_threshold_mib=now), workload)
    assert [after.fusion_threshold_mib for name, after in flips if name == "fusion_threshold_mib"] == others


@pytest.mark.parametrize(
    ("now", "then", "advised"),
    [
        ((900, FITS), (1100, DOES_NOT_FIT), False),
        ((900, FITS), (990, TIGHT), False),
        ((900, FITS), (700, FITS), True),
        ((990, TIGHT), (985, FITS), True),
        ((1200, DOES_NOT_FIT), (1199, DOES_NOT_FIT), False),
    ],
)
def test_another_allocator_is_advised_for_less_memory_or_for_what_fits(
    now: tuple[int, str], then: tuple[int, str], advised: bool
) -> None:
    def said(mib: int, verdict: str) -> Prediction:
        size, limit = mib * 2**20, 1000 * 2**20
        return Prediction(Settings(), size, size, None, size, size, limit, verdict, {}, "", "", "", 0.1)

    growing = AllocatorSettings(expandable_segments=True)
    one = AllocatorWhatIf((growing, said(*now)), ((DEFAULT, said(*then)),), False, True, "PYTORCH_CUDA_ALLOC_CONF")
    assert ("%hvd_restart" in one.sentences[-1]) is advised
