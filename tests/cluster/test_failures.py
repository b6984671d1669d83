"""A step that cannot be finished leaves the session usable and says what happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, TrainingFailed
from tests.cluster.test_stalls import attach, goes_on, limited
from tests.conftest import about, weights
from tests.internals import COLLECT, LIVE, RESERVED, hooks_expression, wait_for_steps
from tests.timing import HANG_S

pytestmark = pytest.mark.cluster


def test_out_of_memory_on_all_ranks_goes_back_and_goes_on(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(2)
    reserved = session.run(RESERVED)
    session.run(COLLECT)
    before = session.run(LIVE)
    session.set(batch_size=256)
    run = session.train(3)
    assert run.steps == 3
    assert "ran out of memory" in str(run)
    assert "went back to batch_size=32" in str(run)
    assert session.settings.batch_size == 32
    after = session.run(LIVE)
    assert after == about(before), "the failed step must leave nothing behind"
    assert len(weights(session)) == 1
    session.train(1)
    assert session.run(RESERVED) == about(reserved), "what did not fit keeps no memory from others"
    assert [event.kind for event in session.history.events][-3:] == ["flip", "oom", "note"]
    outcomes = list(session.runs.frame().outcome)
    assert outcomes[-4:] == ["ok", "oom", "ok", "ok"], "the cells before the last step begin a run of their own"


def test_what_is_loaded_does_not_begin_with_the_memory_of_what_was_there_before(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    small = session.run(RESERVED)
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(2)
    assert min(session.run(RESERVED)) > 2 * max(small)
    session = fresh(two_ranks)
    session.train(2)
    assert session.run(RESERVED) == about(small)
    with pytest.raises(GpumemError, match="memory"):
        fresh(two_ranks, "digits-resnet", width=1024, depth=2, resolution=8)
    session = fresh(two_ranks)
    session.train(2)
    assert session.run(RESERVED) == about(small)


@pytest.mark.full
def test_out_of_memory_from_the_first_step_stops_with_advice(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=64, depth=6, resolution=16)
    with pytest.raises(TrainingFailed, match=r"ran out of memory .*Tried to allocate") as caught:
        session.train(1)
    assert "%hvd_set" in str(caught.value)
    session.set(batch_size=1, checkpointing="blocks")
    assert session.train(1).steps == 1


@pytest.mark.full
def test_out_of_memory_on_one_rank_is_survived_by_all(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(2)
    session.run("hog = torch.empty(40 * 2**20, dtype=torch.uint8) if rank == 1 else None")
    session.set(batch_size=64)
    run = session.train(2)
    assert "rank 1 ran out of memory" in str(run)
    assert len(weights(session)) == 1
    session.run("hog = None")


def test_a_loss_that_is_not_a_scalar_is_named(two_ranks: Session) -> None:
    session = two_ranks
    session.run(
        """
from torch import nn
net = nn.Linear(4, 3)
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
def vector(model, batch):
    return model(batch[0])
"""
    )
    session.attach(model="net", loss="vector", data="rows")
    with pytest.raises(TrainingFailed, match=r"must return one number \(a scalar tensor\); it returned shape"):
        session.train(1)
    session.run("criterion = nn.CrossEntropyLoss()")
    session.attach(model="net", loss="criterion", data="rows")
    assert session.train(2).steps == 2


def test_settings_that_cannot_be_applied_change_nothing(two_ranks: Session) -> None:
    session = two_ranks
    session.run(
        """
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
criterion = nn.CrossEntropyLoss()
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
own = torch.optim.RMSprop(net.parameters(), lr=0.02)
"""
    )
    session.attach(model="net", loss="criterion", data="rows", optimizer="own")
    assert (session.settings.optimizer, session.settings.learning_rate) == ("own", 0.02)
    with pytest.raises(TrainingFailed, match="RMSprop has no fused implementation"):
        session.set(optimizer_impl="fused", checkpointing="blocks")
    assert (session.settings.optimizer_impl, session.settings.checkpointing) == ("default", "none")
    assert session.run(hooks_expression("net"))[0][0] == 0
    assert session.train(2).steps == 2


def test_interrupt_of_training_in_the_foreground_returns_what_was_done(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)

    def press_stop() -> None:
        wait_for_steps(session, 5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press_stop)
    presser.start()
    run = session.train(100_000)
    presser.join()
    assert 5 <= run.steps < 100_000
    assert "Interrupted." in str(run)
    assert session.train(2).steps == 2


def test_interrupt_reaches_a_step_that_hangs_in_user_code(two_ranks: Session) -> None:
    session = two_ranks
    session.run(
        """
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
def slow(model, batch):
    while rank == 1 and stuck:
        pass
    return model(batch[0]).square().mean()
stuck = True
"""
    )
    session.attach(model="net", loss="slow", data="rows")
    session.step()
    session.interrupt()
    session.run("stuck = False")
    assert len(weights(session)) == 1
    assert session.train(1).steps == 1


def test_out_of_memory_for_optimizer_state_goes_back_with_weights_untouched(two_ranks: Session) -> None:
    session = two_ranks
    session.run(
        """
from torch import nn
wide = nn.Linear(2600, 1500)
vectors = torch.utils.data.TensorDataset(torch.randn(64, 2600))
def size(model, batch):
    return model(batch[0]).square().mean()
"""
    )
    session.attach(model="wide", loss="size", data="vectors")
    session.set(optimizer="sgd", batch_size=4, accumulation_steps=1)
    session.train(2)
    fingerprint = weights(session)
    session.set(optimizer="adamw")
    run = session.train(1)
    assert "in the update part of the step" in str(run)
    assert session.settings.optimizer == "sgd"
    assert weights(session) != fingerprint, "the step was done under the old settings"
    assert len(weights(session)) == 1
    session.set(learning_rate=1e-4)
    assert session.train(2).steps == 2


@pytest.mark.full
def test_three_ranks_wait_for_the_fourth(four_ranks: Session) -> None:
    with limited(four_ranks) as session:
        attach(session)
        before = weights(session)
        session.run("stuck = 'data'")
        with pytest.raises(TrainingFailed, match=r"Rank 1 was in the data part of step 3, ranks 0,2-3 waited"):
            session.train(5)
        session.run("stuck = None", timeout=HANG_S)
        goes_on(session, before)
