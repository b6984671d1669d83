"""The same with DistributedDataParallel: ``mpiexec -n 4 python -m tests.bench.plain_ddp digits-resnet``."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.bench import plain


def main() -> None:
    """Train one workload under fixed settings and print samples/s as JSON."""
    args = plain.arguments(__doc__)
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    device = plain.local_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=size)
    workload = args.made

    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model().to(device).train())
    optimizer = plain.OPTIMIZERS[args.optimizer](model.parameters(), args.learning_rate)
    batches = plain.batches(workload.data(), args.batch_size, rank, size)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    def step() -> None:
        for index in range(args.accumulation_steps):
            batch = plain.to_device(next(batches), device)
            last = index == args.accumulation_steps - 1
            with nullcontext() if last else model.no_sync():
                with plain.autocast(args.precision, device):
                    loss = workload.loss(model, batch) / args.accumulation_steps
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def agree(number: int) -> int:
        numbers = [number]
        dist.broadcast_object_list(numbers, src=0)
        return numbers[0]

    plain.run(args, step, rank, size, device, agree)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
