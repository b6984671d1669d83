"""Four ranks that share one GPU, through a Horovod that reduces on the CPU."""

from __future__ import annotations

import pytest

from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.conftest import weights

pytestmark = pytest.mark.gpu
RANKS = 4


def test_all_ranks_hold_the_same_weights_after_every_kind_of_flip(trained: Session) -> None:
    flips: list[dict[str, object]] = [{"precision": "bf16"}, {"checkpointing": "blocks"}]
    flips += [{"accumulation_steps": 2}, {"optimizer": "sgd"}]
    for knobs in flips:
        trained.set(**knobs)
        assert trained.train(3).steps == 3
        assert len(weights(trained)) == 1


# The device is late: what is sent is computed long after it was begun to be sent.
LATE = """
from gpumem_nb.engine.link import communicator
_link, _heavy, _wrong = communicator.here(), torch.randn(4096, 4096, device=device), 0
for _step in range(10):
    _groups, _under_way = [], []
    for _bucket in range(6):
        for _ in range(3):
            _heavy = torch.tanh(_heavy @ _heavy)
        _numbers = torch.full((1000 * (_bucket + 1),), 10.0 * _step + _bucket + rank, device=device)
        _numbers += _heavy.sum().isnan()
        _groups.append(_numbers)
        _under_way.append(_link.start_reduction([_numbers], f"late.{_bucket}", "sum"))
    for _transfer in _under_way:
        _transfer.wait()
    for _bucket, _numbers in enumerate(_groups):
        _wrong += int((_numbers != size * (10.0 * _step + _bucket) + sum(range(size))).sum())
(_wrong, _link.on_host)
"""


def test_gradients_of_a_late_device_are_added_up_through_the_host(trained: Session) -> None:
    assert trained.run(LATE) == [(0, not trained.run("hvd.nccl_built()", ranks=0)[0])] * RANKS


def test_a_failed_step_leaves_nothing_on_its_way(trained: Session) -> None:
    trained.run("_hook = next(model.parameters()).register_hook(lambda grad: grad * (1 // (rank != 2)))")
    before = weights(trained)
    with pytest.raises(TrainingFailed, match="rank 2 failed in the backward part of the step"):
        trained.train(2)
    trained.run("_hook.remove()")
    assert weights(trained) == before
    assert trained.train(3).steps == 3
    trained.run("hvd.shutdown()")  # the ranks join again before the next request
    assert trained.train(3).steps == 3
    assert len(weights(trained)) == 1


@pytest.mark.skipif(visible_gpus() != 1, reason="needs exactly one GPU for all ranks to be on it")
def test_ranks_on_one_gpu_see_one_another(trained: Session) -> None:
    uses = [rank.device_use for rank in trained.memory().ranks if rank.device_use]
    assert len(uses) == RANKS
    of_all = sum(use.own_bytes or 0 for use in uses)
    for use in uses:
        if use.own_bytes is not None and use.other_bytes is not None:
            assert use.other_bytes >= of_all - use.own_bytes - 2**26
    totals = {use.total_bytes for use in uses}
    assert len(totals) == 1


def test_each_rank_has_its_own_allocator(trained: Session) -> None:
    before = [rank.reading.live_bytes for rank in trained.memory().ranks]
    trained.run("_held = torch.empty(2**24, dtype=torch.uint8, device=device)", ranks=[2])
    after = [rank.reading.live_bytes for rank in trained.memory().ranks]
    trained.run("del _held", ranks=[2])
    assert [late - early for early, late in zip(before, after, strict=True)] == [0, 0, 2**24, 0]
