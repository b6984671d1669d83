"""A Horovod that was built elsewhere, which would end its process when ranks are joined again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.install.horovod_source import MARK
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed, WorkloadError
from tests.cluster.test_communication import communication
from tests.conftest import weights
from tests.timing import in_time

pytestmark = pytest.mark.cluster

WITHOUT_MARK = f"""
import horovod, os
mark, cycle = vars(horovod).pop({MARK!r}), os.environ.pop("HOROVOD_CYCLE_TIME", None)
"""
WITH_MARK = f"""
setattr(horovod, {MARK!r}, mark)
if cycle:
    os.environ["HOROVOD_CYCLE_TIME"] = cycle
"""


@pytest.mark.full
def test_a_horovod_built_elsewhere_refuses_what_would_end_it_and_training_goes_on(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    session.run(WITHOUT_MARK)
    with pytest.raises(TrainingFailed, match=r"horovod_build.*%hvd_restart"):
        session.set(cycle_time_ms=2)
    assert session.settings.cycle_time_ms is None
    session.set(fusion_threshold_mib=2)
    assert communication(session.train(2)) == pytest.approx(2, abs=0.5)
    session.run(WITH_MARK)


@pytest.mark.full
@pytest.mark.parametrize("knobs", [{}, {"fusion_threshold_mib": 3}], ids=str)
def test_one_such_rank_lets_all_refuse_to_be_joined_again(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, knobs: dict[str, Any]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    session.run(WITHOUT_MARK + "os.environ['HOROVOD_CYCLE_TIME'] = '1'", ranks=1)
    began_s, steps = time.monotonic(), session.history.steps
    try:
        with pytest.raises((TrainingFailed, WorkloadError), match=r"horovod_build.*%hvd_restart"):
            session.set(**knobs) if knobs else session.trace(tmp_path / "a.json", steps=1)
        assert in_time(time.monotonic() - began_s, 2)
        assert session.history.steps == steps
    finally:
        session.run("del os.environ['HOROVOD_CYCLE_TIME']" + WITH_MARK, ranks=1)
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1
