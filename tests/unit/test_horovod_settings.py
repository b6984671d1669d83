"""Horovod's own settings, on a rank by itself."""

from __future__ import annotations

import horovod
import pytest

from gpumem_nb.cluster.launchers import mpi
from gpumem_nb.engine.link import settings as link_settings
from gpumem_nb.install.horovod_source import MARK
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.settings import Settings
from tests.links import Overheard
from tests.unit.test_one_rank import alone as alone


def test_a_horovod_that_would_end_its_process_is_left_as_it_is(
    alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(horovod, MARK, raising=False)
    monkeypatch.setattr(alone, "rejoin", lambda: pytest.fail("joined again"))
    with pytest.raises(WorkloadError, match=r"horovod_build.*%hvd_restart"):
        link_settings.follow(Settings(cycle_time_ms=2), opened())
    link_settings.follow(Settings(), opened())


def test_what_people_set_of_horovod_is_given_to_ranks_on_other_hosts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    monkeypatch.delenv("HOROVOD_CACHE_CAPACITY", raising=False)
    given = mpi.environment(1, "cpu")
    assert given["HOROVOD_CYCLE_TIME"] == "3"
    assert "HOROVOD_CACHE_CAPACITY" not in given


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("fusion_threshold_mib", "16", 16),
        ("fusion_threshold_mib", 0.5, 0.5),
        ("fusion_threshold_mib", "default", None),
        ("cycle_time_ms", "2.5", 2.5),
        ("cache_capacity", "0", 0),
        ("bucket_mib", 25, 25),
    ],
)
def test_numbers_are_read_as_people_write_them(name: str, given: object, stored: object) -> None:
    assert getattr(Settings(**{name: given}), name) == stored


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fusion_threshold_mib", 0),
        ("fusion_threshold_mib", 5000),
        ("cycle_time_ms", 101),
        ("cycle_time_ms", 0),
        ("cache_capacity", -1),
        ("bucket_mib", True),
    ],
)
def test_numbers_out_of_range_are_refused_with_what_is_allowed(name: str, given: object) -> None:
    with pytest.raises(InvalidInput, match=rf"{name}=.* must be a .*number"):
        Settings(**{name: given})
