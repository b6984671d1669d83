"""Private parts of the libraries whose trainers can be attached."""

from __future__ import annotations

import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from gpumem_nb.internals.accelerate_internals import prepared_by
from gpumem_nb.internals.lightning_internals import logging_to, syncs_batch_norm
from gpumem_nb.internals.transformers_internals import among, forget_scheduler, on_this_device
from tests.unit.private_parts import checks, must


@checks("accelerate", "what an Accelerator has prepared")
def _prepared() -> None:
    from accelerate import Accelerator

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    things = accelerator.prepare(net, optimizer)
    must(prepared_by(accelerator) == list(things), "it is in four lists")


@checks("transformers", "the device, the scheduler and the processes of a Trainer")
def _trainer() -> None:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], per_device_train_batch_size=3)
        trainer = Trainer(nn.Linear(2, 2), arguments)
        trainer._train_batch_size = 12  # as with four GPUs
        on_this_device(trainer, torch.device("meta"))
        must(arguments.device == torch.device("meta") and arguments.n_gpu == 0, "arguments say another device")
        must(trainer._train_batch_size == 3, "the batch is that of several GPUs")
        trainer.create_optimizer_and_scheduler(4)
        forget_scheduler(trainer)
        must(trainer.lr_scheduler is None, "its own scheduler stays")
        with among(trainer, 5, 2):
            must(AcceleratorState().num_processes == 5, "the number of processes is set anew from somewhere else")
            must(trainer.accelerator.num_processes == 5, "the number of processes is somewhere else")
        must(trainer.accelerator.num_processes == 1, "the number of processes stays")


@checks("lightning", "where it looks for MPI")
def _mpi() -> None:
    pytest.importorskip("lightning", reason="make test installs it")
    code = """
from gpumem_nb.internals.lightning_internals import see_no_mpi
see_no_mpi()
from lightning.fabric.plugins.environments import MPIEnvironment
print(MPIEnvironment.detect.__name__)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    must(said.strip() == "<lambda>", "it is looked for by another function")


@checks("lightning", "where a module logs")
def _logs() -> None:
    lightning = pytest.importorskip("lightning", reason="make test installs it")
    module, seen = lightning.LightningModule(), list[tuple[str, float]]()
    module.trainer = trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    other = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with logging_to(module, lambda name, value: seen.append((name, value)), other):
        must(module.trainer is other, "it has another Trainer")
        module.log("one", 1.0, prog_bar=True)
        module.log_dict({"two": 2.0})
    must(seen == [("one", 1.0), ("two", 2.0)], "it logs by another way")
    must(module.trainer is trainer and "log" not in vars(module), "its Trainer is not put back")


@checks("lightning", "whether batch norm is synchronized")
def _batch_norm() -> None:
    lightning = pytest.importorskip("lightning", reason="make test installs it")
    for asked in (False, True):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, sync_batchnorm=asked
        )
        must(syncs_batch_norm(trainer) == asked, "it is known from somewhere else")
