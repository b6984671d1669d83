"""The same in one process without ranks; with ``--virtual`` under the virtual GPU, read as the trainer reads it."""

from __future__ import annotations

import sys

import torch

from tests.bench import plain


def main() -> None:
    """Train one workload under fixed settings and print samples/s as JSON."""
    device = None
    if "--virtual" in sys.argv:
        sys.argv.remove("--virtual")
        from gpumem_nb.memory.device import open_device

        device = open_device("virtual", 0, None)
    args = plain.arguments(__doc__)
    workload = args.made
    torch.manual_seed(0)
    model = workload.model().train()
    optimizer = plain.OPTIMIZERS[args.optimizer](model.parameters(), args.learning_rate)
    batches = plain.batches(workload.data(), args.batch_size, rank=0, size=1)
    cpu = torch.device("cpu")

    def step() -> None:
        if device:
            device.reset_peak()
        with plain.autocast(args.precision, cpu):
            loss = workload.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device:
            device.reading()

    plain.run(args, step, 0, 1, cpu, agree=lambda number: number)


if __name__ == "__main__":
    main()
