"""Evaluation of a model on the part of the data that it was not trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from .catalog import find
from .digits import Digits
from .text import Text, held_out_text


def score(name: str, model: nn.Module, **options: Any) -> dict[str, float]:
    """Return the scores of ``model`` on the held-out data of the workload ``name``, loaded with the same ``options``.

    Digits: ``accuracy`` (0 to 1). Text: ``nats_per_character``, ``bits_per_character`` and, to compare with,
    ``unigram_nats``, what the best guess from character frequencies alone would reach. Raises ``InvalidInput``.
    """
    entry = find(name)
    values = entry.values(options)
    if entry.task == "digits":
        return {"accuracy": accuracy(model, Digits(int(values["resolution"]), train=False))}
    nats = nats_per_character(model, Text(int(values["sequence_length"]), train=False))
    return {
        "nats_per_character": nats,
        "bits_per_character": nats / math.log(2),
        "unigram_nats": unigram_entropy(held_out_text()),
    }


def accuracy(model: nn.Module, data: Dataset[Any], batch_size: int = 32) -> float:
    """Return the share of samples whose largest logit is their label, 0 to 1."""
    right = samples = 0
    for logits, labels in _predictions(model, data, batch_size):
        right += int((logits.argmax(-1) == labels).sum())
        samples += labels.numel()
    return right / samples


def nats_per_character(model: nn.Module, data: Dataset[Any], batch_size: int = 32) -> float:
    """Return the mean cross entropy of the next character, in nats."""
    nats, characters = 0.0, 0
    for logits, targets in _predictions(model, data, batch_size):
        nats += float(cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"))
        characters += targets.numel()
    return nats / characters


def unigram_entropy(text: str) -> float:
    """Return the entropy of the characters of ``text`` by their frequency in it, in nats.

    No model that ignores what came before can have a lower cross entropy on this text.
    """
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts)


def _predictions(model: nn.Module, data: Dataset[Any], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    device = next(model.parameters()).device
    with _evaluating(model), torch.no_grad():
        for inputs, labels in DataLoader(data, batch_size):
            yield model(inputs.to(device)), labels.to(device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the mode of each module restored after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
