"""Trainers of other libraries, as a cell makes them, and the same training on one rank of the toolkit's own process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpumem_nb.engine import building
from gpumem_nb.engine.attach import attached
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk, Evaluated
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Adopted

ROLES = ("model", "data", "loss", "optimizer", "scheduler", "eval_data", "metric", "trainer")

TEXT = """
import torch, transformers
from torch import nn
from transformers import Trainer, TrainingArguments
SILENT = dict(output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no")
numbers = torch.Generator().manual_seed(1)
rows = []
for place in range(48):  # of different lengths, and with different numbers of tokens that count
    ids = torch.randint(0, 97, (12,), generator=numbers)
    labels = ids.clone()
    labels[: place % 7] = -100
    rows.append({"input_ids": ids, "labels": labels})

def gpt2():
    torch.manual_seed(0)
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=97, n_positions=16, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout))

def trained_by(kind=Trainer, model=None, given=None, **arguments):
    arguments = dict(per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, max_grad_norm=0.0) | arguments
    model = model or gpt2()
    return kind(model, TrainingArguments(**SILENT, **arguments), train_dataset=rows, **(given or {}))
"""
"""``trained_by(**arguments)`` makes a ``Trainer`` of a small GPT-2, whose rows have different numbers of tokens."""

PAIRS = """
points = torch.randn(48, 6, generator=numbers)
classes = points[:, :3].argmax(1)
pairs = [{"x": point, "labels": label} for point, label in zip(points, classes)]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
"""
"""Follows ``TEXT``: a plain module that returns its own loss, a mean over samples, and what it learns from."""


def made(code: str) -> dict[str, Any]:
    """Return the variables of a cell."""
    variables: dict[str, Any] = {"__name__": "cell"}
    exec(compile(code, "<cell>", "exec"), variables)
    return variables


@dataclass
class Trained:
    """The result of training on one rank."""

    trainer: Trainer
    losses: list[float]
    rates: list[float]

    @property
    def model(self) -> nn.Module:
        """What was trained."""
        return self.trainer.live.model

    @property
    def adopted(self) -> Adopted:
        """What was taken."""
        assert self.trainer.workload.adopted is not None
        return self.trainer.workload.adopted

    def evaluated(self) -> dict[str, float]:
        """Return loss and metrics over the validation data."""
        reply = self.trainer.run(Chunk(self.trainer.live.settings, 2, 0, evaluate=True))
        assert reply.failure is None, reply.failure
        assert isinstance(reply.evaluated, Evaluated)
        return {name: total / reply.evaluated.samples for name, total in reply.evaluated.sums.items()}


def settings_of(trainer: Trainer, **knobs: Any) -> Settings:
    """Return the settings that a session begins with, and these."""
    return compatibility.loaded(Settings(), trainer.info(), 1).replace(**knobs)


def alone(variables: dict[str, Any], steps: int, **knobs: Any) -> Trained:
    """Attach what variables hold, named by their roles, on one rank, and train it."""
    names = {role: role if role in variables else None for role in ROLES}
    prepared = building.prepare(lambda: attached(names, variables))
    assert prepared is not None
    workload, stream, held_out = prepared
    trainer = building.build(workload, stream, opened(), time.time(), held_out)
    assert trainer is not None
    reply = trainer.run(Chunk(settings_of(trainer, **knobs), 1, steps))
    assert reply.failure is None, reply.failure
    losses = [math.nan if one.loss is None else one.loss for one in reply.samples]
    return Trained(trainer, losses, [one.learning_rate or 0.0 for one in reply.samples])


def logged(trainer: Any, what: str = "loss") -> list[float]:
    """Return what a ``Trainer`` of transformers noted of each step."""
    return [entry[what] for entry in trainer.state.log_history if what in entry and "train_loss" not in entry]


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of weights that are not the same, bit for bit."""
    others: dict[str, Tensor] = dict(other.named_parameters())
    return [name for name, param in one.named_parameters() if not param.equal(others[name])]
