"""Four ranks that share one GPU, through a Horovod that reduces on the CPU."""

from __future__ import annotations

import pytest

from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session
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
