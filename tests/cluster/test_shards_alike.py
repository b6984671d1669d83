"""Ranks that share an optimizer's state stay alike, or say why not, whatever happens on one of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.cluster.test_shards import BETWEEN, FAILS, NO_ROOM, loaded, losses
from tests.conftest import weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def impatient(two_ranks: Session) -> Iterator[Session]:
    two_ranks.set(stall_limit_s=5)
    yield two_ranks
    two_ranks.set(stall_limit_s=30)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("own.param_groups[1]['lr'] = 0.5", "the option lr of AdamW"),
        ("own.param_groups[0]['betas'] = (0.5, 0.9)", "the option betas of AdamW"),
        ("for one in net.mix: own.state[one.weight]['step'] += 100", "the number of steps in the state of AdamW"),
    ],
)
def test_what_a_cell_sets_on_one_rank_pauses_training_and_sync_goes_on_with_that_of_the_first(
    two_ranks: Session, cell: str, named: str
) -> None:
    session = loaded(two_ranks, shard_optimizer="on")
    expected = losses(session, 6)
    session = loaded(two_ranks, shard_optimizer="on")
    found = losses(session, 3)
    before = weights(session)
    session.run(cell, ranks=[1])
    with pytest.raises(TrainingFailed, match=f"{named} is not the same on rank 1 .*A cell ran on rank 1 alone"):
        session.train(3)
    assert weights(session) == before
    session.sync()
    assert found + losses(session, 3) == expected
    assert len(weights(session)) == 1


def test_another_workload_is_loaded_whatever_became_of_the_shares(two_ranks: Session) -> None:
    session = loaded(two_ranks, shard_optimizer="on")
    session.train(2)
    session.run("own.state.clear()", ranks=[1])
    session.load("digits-resnet", width=8, depth=1, resolution=8)
    notes = " ".join(session.workload.notes if session.workload else ())
    assert "The state of the AdamW that you attached is gone" in notes
    assert "rank 1 holds another share" in notes
    assert session.run("len(own.state)") == [0, 0]
    session.set(shard_optimizer="off")
    assert session.train(2).steps == 2


def test_after_a_flip_that_failed_on_one_rank_the_state_is_saved_and_synchronized(
    impatient: Session, tmp_path: Path
) -> None:
    session = loaded(impatient)
    expected = losses(session, 5)
    session = loaded(impatient)
    found = losses(session, 2)
    in_flip = "import gpumem_nb.engine.step.sharing as it; holder, name = it.Sharing, '_share'"
    session.run(FAILS.format(what=NO_ROOM, where=in_flip))
    with pytest.raises(TrainingFailed, match="went back to shard_optimizer=off"):
        session.set(shard_optimizer="on")
    session.save(tmp_path / "state")
    session.sync()
    found += losses(session, 1)
    assert found == expected[:3]
    session.resume(tmp_path / "state")
    assert losses(session, 3) == expected[2:]


LOST = """
if rank == 1:
    from gpumem_nb.engine.link.horovod import OfHorovod
    def lost(link, vote, about):
        found = super(OfHorovod, link).any_rank(vote, about)
        if about == "update":
            del OfHorovod.any_rank
            raise RuntimeError("the answer was lost")
        return found
    OfHorovod.any_rank = lost
"""


@pytest.mark.parametrize("value", ["on", "off"])
def test_an_update_whose_vote_one_rank_lost_leaves_no_mixture_of_two_steps_unsaid(
    impatient: Session, value: str
) -> None:
    session = loaded(impatient, shard_optimizer=value)
    losses(session, 3)
    session.run(LOST)
    with pytest.raises(TrainingFailed):
        session.train(3)
    with pytest.raises(TrainingFailed, match="the ranks hold different weights"):
        session.train(3)
    session.sync()
    assert len(weights(session)) == 1
    losses(session, 3)
    assert len(weights(session)) == 1


@pytest.mark.full
def test_what_ranks_take_to_give_each_other_weights_is_part_of_the_update_wherever_it_is_told(
    two_ranks: Session,
) -> None:
    session = loaded(two_ranks, shard_optimizer="on")
    session.train(2)
    session.run(FAILS.format(what="import time; time.sleep(1)", where=BETWEEN))
    frame = session.train(1).frame()  # a careful step, for the cell
    assert frame.update_s.min() > 0.9
    session.run(
        "from gpumem_nb.engine.step.sharing import Sharing\n"
        "before, Sharing.gather_s = Sharing.gather_s, lambda *_: 3.0 if hvd.size() > 1 else 0.0"
    )
    try:
        report = session.scaling([1, 2], steps=4)
    finally:
        session.run("Sharing.gather_s = before")
    one, two = report.measured
    assert max(one.each_s) < 2.5
    assert min(two.each_s) > 3
