"""NVML's account of the ranks' devices on its way to the notebook, and torch's snapshot of a GPU's memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.messages import DeviceUse
from tests.internals import DEVICE, FORGET_DEVICE_USE, claim
from tests.timing import until

pytestmark = pytest.mark.cluster

# A device that NVML could read: what it says counts how often it was asked, and on which thread.
READABLE = f"""
import itertools, threading
from gpumem_nb.shared.messages import DeviceUse
_asked = []
def _use():
    _asked.append(threading.current_thread().name)
    return DeviceUse(used_bytes=len(_asked), own_bytes=rank, missing={{"power_w": "of no interest"}})
{DEVICE}.use = _use
"""

# torch's functions of that name need a GPU: what is asked of them, and how many steps are recorded meanwhile.
RECORDED = """
from unittest.mock import patch
from gpumem_nb.engine import rank as _rank
_calls, _recorded = [], 0
def _record_step(really=_rank.record_step):
    global _recorded
    _recorded += 1
    return really()
_patches = [
    patch("torch.cuda.memory._record_memory_history", lambda enabled, **_: _calls.append(enabled)),
    patch("torch.cuda.memory._dump_snapshot", lambda path: _calls.append(path)),
    patch("gpumem_nb.engine.rank.record_step", _record_step),
]
for _each in _patches:
    _each.start()
"""


@pytest.fixture
def readable(two_ranks: Session) -> Iterator[Session]:
    two_ranks.run(READABLE)
    yield two_ranks
    two_ranks.run(f"del {DEVICE}.use\n{FORGET_DEVICE_USE}")


def uses(session: Session) -> list[DeviceUse | None]:
    return list(session.history.device_uses)


def latest(session: Session, rank: int) -> int:
    """How often the device had been asked when the notebook last heard of it."""
    use = uses(session)[rank]
    return use.used_bytes or 0 if use else 0


def forget(session: Session) -> None:
    session.run("_asked.clear()")
    session.history.device_uses = [None, None]


def test_of_a_virtual_gpu_nothing_is_invented(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    fresh(two_ranks).train(2)
    until(lambda: None not in two_ranks.history.readings)
    assert uses(two_ranks) == [None, None]


@pytest.mark.full
def test_while_nothing_trains_the_notebook_asks_about_once_a_second(readable: Session) -> None:
    forget(readable)
    began = time.monotonic()
    until(lambda: latest(readable, 1) >= 2)
    assert readable.run("len(_asked)", ranks=[1])[0] <= 2 + 2 * (time.monotonic() - began)
    assert [use.own_bytes for use in uses(readable) if use] == [0, 1]
    assert uses(readable)[0].missing == {"power_w": "of no interest"}  # type: ignore[union-attr]


@pytest.mark.full
def test_while_training_it_comes_with_the_chunks_and_is_asked_beside_the_steps(
    readable: Session, fresh: Callable[..., Session]
) -> None:
    fresh(readable)
    forget(readable)
    began = time.monotonic()
    readable.play()
    until(lambda: latest(readable, 0) >= 3)
    readable.pause()
    asked = readable.run("list(_asked)", ranks=[0])[0]
    assert len(asked) <= 2 + 2 * (time.monotonic() - began)
    assert asked.count("gpumem_nb pulse") >= 2


@pytest.mark.full
def test_of_a_rank_in_a_long_cell_it_comes_with_the_pulses(readable: Session) -> None:
    forget(readable)
    readable.run("import time\nwhile len(_asked) < 4: time.sleep(0.02)", ranks=[1])
    assert "gpumem_nb pulse" in readable.run("_asked", ranks=[1])[0]
    assert latest(readable, 1) >= 2


def test_a_snapshot_of_virtual_gpus_is_refused_in_one_sentence(two_ranks: Session, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="of real GPUs only, and these ranks have virtual ones"):
        two_ranks.memory_snapshot(tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())


def test_a_snapshot_of_a_real_gpu_is_of_one_step_that_is_undone(
    two_ranks: Session, fresh: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    claim(monkeypatch, two_ranks, [dataclasses.replace(info, virtual=False) for info in two_ranks.ranks])
    fresh(two_ranks).train(2)
    two_ranks.run(RECORDED)
    try:
        assert two_ranks.memory_snapshot(tmp_path / "step.pickle") == tmp_path / "step.pickle"
        assert two_ranks.run("_calls") == [["all", str(tmp_path / "step.pickle"), None], []]
        assert two_ranks.run("_recorded") == [1, 1]
        assert two_ranks.history.steps == 2
    finally:
        two_ranks.run("[each.stop() for each in _patches] and None")
