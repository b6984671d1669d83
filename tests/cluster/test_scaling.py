"""Scaling: steps on some of the ranks alone, which leave no trace, and all-reduces of many sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, InvalidInput, WorkloadError
from gpumem_nb.shared.questions import SWEEP_BYTES
from tests.conftest import weights

pytestmark = pytest.mark.cluster

LOOK = """
import os
def note(*_):
    os.environ[f"GROUP_OF_{hvd.size()}"] = str(hvd.rank())  # what else a step changes is undone with it
watched = model.register_forward_pre_hook(note)
"""
SEEN = "{size: os.environ.pop(f'GROUP_OF_{size}', None) for size in (1, 2, 3, 4)}"


@pytest.fixture
def session(four_ranks: Session) -> Iterator[Session]:
    """Four ranks that have trained, and note with how many others they take a step."""
    four_ranks.load("digits-resnet")
    four_ranks.train(2)
    four_ranks.run(LOOK)
    yield four_ranks
    four_ranks.run(f"watched.remove(), {SEEN}")


@pytest.mark.full
def test_steps_are_taken_by_so_many_ranks_alone_and_training_goes_on_as_if_nothing_had_been(session: Session) -> None:
    before, steps = weights(session), session.history.steps
    told: list[str] = []
    report = session.scaling([1, 3], steps=4, progress=lambda what, done: told.append(what))
    assert [one.ranks for one in report.measured] == [1, 3]
    assert [len(one.each_s) for one in report.measured] == [4, 4]
    assert report.efficiency(1) == 1
    assert "steps on 3 of 4 ranks" in told
    seen = [{size: rank for size, rank in each.items() if rank is not None} for each in session.run(SEEN)]
    assert seen == [{1: "0", 3: "0", 4: "0"}, {3: "1", 4: "1"}, {3: "2", 4: "2"}, {4: "3"}], "all agree first"
    assert session.run("hvd.size()") == [4] * 4
    assert weights(session) == before
    assert session.history.steps == steps
    assert session.train(3).steps == 3
    assert session.check_sync().ok


@pytest.mark.full
def test_by_default_numbers_double_up_to_all(session: Session) -> None:
    session.play()
    with pytest.raises(WorkloadError, match="%hvd_pause first"):
        session.scaling(steps=4)
    session.pause()
    report = session.scaling(steps=4)
    assert [one.ranks for one in report.measured] == [1, 2, 4]
    assert "8 " in str(report)
    assert report.network
    assert list(report.network.seconds) == list(SWEEP_BYTES)


def test_a_step_that_fails_on_some_ranks_is_told_and_all_are_joined_again(session: Session) -> None:
    session.run("def refuse(*_):\n    if hvd.size() == 2: raise ValueError('no pairs')")
    session.run("failing = model.register_forward_pre_hook(refuse)", ranks=[1])
    with pytest.raises(WorkloadError, match=r"A step on 2 ranks failed on rank 1: .*no pairs"):
        session.scaling([1, 2], steps=4)
    session.run("failing.remove()", ranks=[1])
    assert session.run("hvd.size()") == [4] * 4
    assert session.train(2).steps == 2


@pytest.mark.full
def test_what_a_cell_changed_is_agreed_upon_by_all_ranks_and_settings_of_horovod_are_kept(session: Session) -> None:
    session.set(fusion_threshold_mib=2, accumulation_steps=2)
    session.run("for param in list(model.parameters())[:4]: param.requires_grad_(False)")
    session.scaling([1], steps=4)
    session.train(1)
    session.run("for param in list(model.parameters())[:4]: param.requires_grad_(True)")
    session.scaling([2], steps=4)
    assert session.train(3).steps == 3
    assert session.check_sync().ok
    assert session.run("os.environ['HOROVOD_FUSION_THRESHOLD']") == [str(2 * 2**20)] * 4


@pytest.mark.full
def test_a_stall_among_some_ranks_is_told_and_all_are_joined_again(session: Session) -> None:
    session.run("import time\ndef linger(*_):\n    if hvd.size() == 2: time.sleep(600)")
    session.run("stalling = model.register_forward_pre_hook(linger)", ranks=[1])
    session.set(stall_limit_s=2)
    with pytest.raises(GpumemError) as caught:
        session.scaling([2], steps=4)
    assert "rank 0 waited in the gradient reduction of the measuring of scaling for " in str(caught.value)
    assert "They were freed and were joined again" in str(caught.value)
    session.set(stall_limit_s=60)
    session.run("stalling.remove()", ranks=[1])
    assert session.run("hvd.size()") == [4] * 4
    assert session.train(2).steps == 2


@pytest.mark.full
def test_the_network_is_timed_for_each_size(session: Session) -> None:
    report = session.check_network()
    assert list(report.seconds) == list(SWEEP_BYTES)
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert "All-reduces of 4 ranks" in str(report)
    assert "left out" not in str(report)


@pytest.mark.full
def test_on_a_slow_network_large_messages_are_left_out(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpumem_nb.kernel.questions.scaling.LONGEST_MESSAGE_S", 0.01
    )  # which 64 MiB take on any machine
    report = session.check_network()
    assert list(report.seconds) == list(SWEEP_BYTES[: len(report.seconds)])
    assert 0 < len(report.seconds) < len(SWEEP_BYTES)
    assert "were left out: they would take seconds each" in str(report)


@pytest.mark.full
def test_what_cannot_be_measured_gets_a_sentence(session: Session) -> None:
    cases: list[tuple[Any, Any, str]] = [
        ([1, 5], 8, "5 ranks cannot be measured: write numbers from 1 to 4"),
        ([0], 8, "0 ranks cannot"),
        ([], 8, "No number of ranks"),
        ("1,2", 8, r"such as \[1, 2\]"),
        (None, 1, "1 steps cannot be measured"),
        (None, 2.5, "2.5 steps cannot"),
    ]
    for ranks, steps, said in cases:
        with pytest.raises(InvalidInput, match=said):
            session.scaling(ranks, steps)
