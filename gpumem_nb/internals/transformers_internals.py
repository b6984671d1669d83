"""Undocumented parts of transformers' ``Trainer``, looked up on one that people made: nothing is imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHECKED_WITH = ("5.23.0",)


def on_this_device(trainer: Any, device: Any) -> None:
    """Let a ``Trainer`` compute on this ``torch.device`` alone.

    In a process that sees several GPUs it takes the first one, and multiplies its batch and its loss by their number.
    """
    args = trainer.args
    vars(args)["_setup_devices"] = device
    args._n_gpu = int(device.type == "cuda")
    trainer._train_batch_size = args.train_batch_size


def forget_scheduler(trainer: Any) -> None:
    """Let a ``Trainer`` make its scheduler anew, as each of its ``train`` calls does; one that it was given stays."""
    if trainer._created_lr_scheduler:
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False


@contextmanager
def among(trainer: Any, ranks: int, accumulation_steps: int) -> Iterator[None]:
    """Inside, a ``Trainer`` knows itself to be one of so many processes, as its loss may ask.

    What TRL's trainers note of each loss, until they write it out, is dropped: nothing writes it out here.
    """
    # Each is shared by all of its class in this process; making one of the first anew reads it from the second.
    shared = sys.modules["accelerate.state"].PartialState._shared_state  # empty where the Trainer came from a file
    states = [vars(trainer.accelerator.state), *([shared] if shared else [])]
    before = [state.get("num_processes", 1) for state in states]
    trainer.current_gradient_accumulation_steps = accumulation_steps
    try:
        for state in states:
            state["num_processes"] = ranks
        yield
    finally:
        for state, processes in zip(states, before, strict=True):
            state["num_processes"] = processes
        if any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
            for noted in trainer._metrics.values():
                noted.clear()
