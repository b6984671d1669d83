"""Where the allocator cannot be built the Python stand-in counts, enforces the limit, and says so."""

from __future__ import annotations

import pytest

import gpumem_nb
from gpumem_nb.memory.device import STAND_IN_VARIABLE
from tests.conftest import SMALL, weights

pytestmark = pytest.mark.cluster


def test_the_stand_in_trains_limits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAND_IN_VARIABLE, "python")
    with gpumem_nb.start(2, device="cpu", memory_limit="8MiB") as session:
        assert "stands in" in str(session.status()) or "stand-in" in str(session.status())
        session.load("digits-resnet", **SMALL)
        frame = session.train(3).frame()
        assert (frame.live_peak_bytes > frame.live_bytes).all()
        assert frame.reserved_peak_bytes.isna().all()
        assert "n/a" in str(session.memory())
        session.set(batch_size=700)
        assert "ran out of memory" in str(session.train(1))
        assert session.settings.batch_size == 32
        assert len(weights(session)) == 1
