"""Ranks that would share a GPU are refused where NCCL cannot do it."""

from __future__ import annotations

import pytest

from gpumem_nb.engine.device_look import check_sharing
from gpumem_nb.shared.errors import StartError


@pytest.mark.parametrize(("ranks", "gpus", "nccl"), [(4, 4, True), (2, 4, True), (4, 1, False)])
def test_ranks_that_fit_may_start(ranks: int, gpus: int, nccl: bool) -> None:
    check_sharing(ranks, gpus, nccl)


def test_more_ranks_than_gpus_get_a_sentence_with_both_ways_out() -> None:
    with pytest.raises(StartError, match="4 ranks cannot share 1 GPU with this Horovod") as caught:
        check_sharing(4, 1, nccl=True)
    assert "Start 1" in str(caught.value)
    assert "--gpu staged" in str(caught.value)
