"""Small questions that all ranks answer together, where there is no gradient reduction to carry the vote."""

from __future__ import annotations

import horovod.torch as hvd
import torch


def any_rank(vote: bool, about: str) -> bool:
    """Whether any rank votes yes. All ranks must ask; ``about`` names the question."""
    total = hvd.allreduce(torch.tensor([float(vote)]), op=hvd.Sum, name=f"gpumem_nb.{about}")
    return bool(total.item() > 0)


def same_everywhere(number: int, about: str) -> bool:
    """Whether all ranks have the same number, which must fit in 62 bits."""
    numbers = hvd.allgather(torch.tensor([number], dtype=torch.int64), name=f"gpumem_nb.{about}")
    return bool((numbers == number).all())
