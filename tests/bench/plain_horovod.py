"""The plain Horovod script: ``mpiexec -n 4 python -m tests.bench.plain_horovod digits-resnet --batch-size 32``."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from tests.bench import plain


def main() -> None:
    """Train one workload under fixed settings and print samples/s as JSON."""
    args = plain.arguments(__doc__)
    hvd.init()
    device = plain.local_device(hvd.local_rank())
    workload = args.made

    torch.manual_seed(0)
    model = workload.model().to(device).train()
    optimizer = plain.OPTIMIZERS[args.optimizer](model.parameters(), args.learning_rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.accumulation_steps
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    batches = plain.batches(workload.data(), args.batch_size, hvd.rank(), hvd.size())
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    def step() -> None:
        for _ in range(args.accumulation_steps):
            batch = plain.to_device(next(batches), device)
            with plain.autocast(args.precision, device):
                loss = workload.loss(model, batch) / args.accumulation_steps
            scaler.scale(loss).backward()
        if scaler.is_enabled():
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    def agree(number: int) -> int:
        return int(hvd.broadcast_object(number, root_rank=0))

    plain.run(args, step, hvd.rank(), hvd.size(), device, agree)
    hvd.shutdown()


if __name__ == "__main__":
    main()
