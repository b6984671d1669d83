"""The plain Horovod script that knobs of communication are held against.

``mpiexec -n 2 python -m tests.plain_horovod FILE BATCH_SIZE STEPS COMPRESSION REDUCTION`` trains what the code in a
file defines (see :mod:`tests.reference`) with ``hvd.DistributedOptimizer``; rank 0 prints each rank's losses as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from tests.reference import PlainRank


def main() -> None:
    """Train and print."""
    file, batch_size, steps, compression, reduction = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    rank = PlainRank(Path(file).read_text(), hvd.rank(), hvd.size(), seed=0)
    net = rank.variables["net"]
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    rank.variables["optimizer"] = hvd.DistributedOptimizer(
        rank.variables["optimizer"],
        named_parameters=net.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        op={"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[reduction],
    )
    rank.attach()
    rank.set({"batch_size": int(batch_size)})
    losses = []
    for _ in range(int(steps)):
        losses.append(rank.forward_backward())
        rank.update()
    everyones = hvd.allgather_object(losses)
    if hvd.rank() == 0:
        print(json.dumps(everyones), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
