"""Exercises of lesson 2: what ranks have in common, and where they wait for each other."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.link.communicator import here
from .bench import Names, seeded


def drift(names: Names, steps: int) -> tuple[float, float]:
    """Train a net that each rank has drawn for itself; return its distance from rank 0's before and afterwards."""
    with seeded(here().rank):
        net = names["new_net"]()
    before = names["apart"](net)
    names["train"](net, steps)
    return before, names["apart"](net)


def kept(names: Names, steps: int) -> dict[str, Any]:
    """Train a net that was broadcast, and return all that the rank has then."""
    with torch.random.fork_rng():
        net = names["new_net"]()
    names["hvd"].broadcast_parameters(net.state_dict(), root_rank=0)
    loss = names["train"](net, steps)
    return {
        "weights": [weight.tolist() for weight in net.parameters()],
        "gradients": [weight.grad.tolist() for weight in net.parameters()],
        "running statistics": [buffer.tolist() for name, buffer in net.named_buffers() if "running" in name],
        "losses": loss,
    }


def loader(names: Names) -> list[list[int]]:
    """Go through a loader once, and return the samples' numbers of each batch."""
    return [_numbers(batch) for batch in names["loader"]]


def _numbers(batch: Any) -> list[int]:
    if not isinstance(batch, list | tuple) or len(batch) != 3:
        raise TypeError("loader must give batches of rows: inputs, labels and numbers of samples")
    return [int(number) for number in batch[2]]


def mean_loss(names: Names) -> tuple[float, float | None]:
    """Return the rank's loss, and what the student's function says of the losses of all."""
    loss = 2.0 ** (here().rank + 3)
    found = names["mean_loss"](loss)
    return loss, None if found is None else float(found)


def steps(names: Names, batches: int) -> tuple[int, int]:
    """Walk so many steps as the student's function says of a share of some batches; return them and the share's."""
    share = list(range(here().rank, batches, here().size))
    taken = names["steps"](share)
    if taken is None:
        raise TypeError("steps() returned nothing")
    for number in range(int(taken)):
        names["hvd"].allreduce(torch.ones(1), name=f"gradient of step {number + 1}")
    return int(taken), len(share)
