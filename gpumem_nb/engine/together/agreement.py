"""Small questions that all ranks answer together, where there is no gradient reduction to carry the vote."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as hvd
import torch

# Made ahead of time: a rank without any memory left can vote, whatever torch's defaults are by then.
_vote = torch.zeros(1, dtype=torch.float32, device="cpu")


def any_rank(vote: bool, about: str) -> bool:
    """Return whether any rank votes yes. All ranks must ask; ``about`` names the question."""
    _vote.fill_(vote)
    hvd.allreduce_(_vote, op=hvd.Sum, name=f"gpumem_nb.{about}")
    return _vote.item() > 0


def same_everywhere(number: int, about: str) -> bool:
    """Whether all ranks have the same number, which must fit in 62 bits."""
    return alike([number], about)[0]


def alike(numbers: Sequence[int], about: str) -> list[bool]:
    """For each of these numbers whether all ranks have the same; each must fit in 62 bits."""
    own = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    gathered = hvd.allgather(own, name=f"gpumem_nb.{about}").reshape(-1, len(numbers))
    same: list[bool] = (gathered == own).all(dim=0).tolist()
    return same
