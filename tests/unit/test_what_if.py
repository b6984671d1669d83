"""Which flips are offered side by side."""

from __future__ import annotations

import pytest

from gpumem_nb.planning.what_if import single_flips
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import WorkloadInfo


@pytest.mark.parametrize(("now", "others"), [(16, [8, 32]), (0.5, [0.25, 1]), (2.5, [1.25, 5])])
def test_half_and_twice_a_number_are_offered_whole_or_not(now: float, others: list[float]) -> None:
    workload = WorkloadInfo("mine", 1, 4, dataset_len=None, blocks=3)
    flips = single_flips(Settings(fusion_threshold_mib=now), workload)
    assert [after.fusion_threshold_mib for name, after in flips if name == "fusion_threshold_mib"] == others
