"""Run under mpiexec by the Horovod builder: one real all-reduce, which fails loudly when its sum is wrong.

``python -m gpumem_nb.engine.proof DEVICE`` with ``cpu``, ``each`` (a GPU for each rank) or ``shared`` (one for all).
"""

from __future__ import annotations

import sys

ELEMENTS = 1000


def main(device_policy: str) -> None:
    """Sum rank + 1 over all ranks on the device that the policy names."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = {"cpu": "cpu", "each": f"cuda:{hvd.local_rank()}", "shared": "cuda:0"}[device_policy]
    summed = hvd.allreduce(torch.full((ELEMENTS,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    if hvd.size() < 2 or not torch.equal(summed.cpu(), torch.full((ELEMENTS,), expected)):
        raise SystemExit(f"rank {hvd.rank()} of {hvd.size()}: expected {expected}, got {summed[0].item()}")
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
