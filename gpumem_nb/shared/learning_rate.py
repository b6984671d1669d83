"""The learning rate of a step, as the settings say it: the knob, times the batch, times the schedule. Plain numbers."""

from __future__ import annotations

import math

from .settings import Settings

OWN = "own"
Schedule = tuple[str, int]


def learning_rate(settings: Settings, done: int, ranks: int) -> float:
    """Return the first group's rate for the next step, ``done`` steps into its schedule, on so many ranks.

    With ``lr_schedule=constant``, no warm-up and ``lr_scaling=none`` it is the knob itself, bit for bit.
    """
    rate: float = settings.learning_rate
    return rate * batch_factor(settings, ranks) * schedule_factor(settings, done)


def batch_factor(settings: Settings, ranks: int) -> float:
    """By how much the rate follows the global batch away from the one that it was chosen for.

    ``linear``: Goyal et al. 2017 (arXiv 1706.02677), section 2.1. ``sqrt``: Krizhevsky 2014 (arXiv 1404.5997), section
    5; for Adam, Malladi et al. 2022 (arXiv 2205.10287).
    """
    if settings.lr_scaling == "none" or settings.reference_batch is None:
        return 1.0
    ratio = settings.samples_per_rank * ranks / settings.reference_batch
    return math.sqrt(ratio) if settings.lr_scaling == "sqrt" else ratio


def schedule_factor(settings: Settings, done: int) -> float:
    """Return the share of the full rate at which a step runs.

    The warm-up is that of torch's ``LinearLR(start_factor=1 / (W + 1), total_iters=W)``, what follows it that of
    ``CosineAnnealingLR(T)`` or of ``LinearLR(1, 0, T)`` with the steps T that are left; then it stays at 0.
    """
    warmup = settings.warmup_steps
    if settings.lr_schedule == OWN:
        return 1.0
    if done < warmup:
        return float((done + 1) / (warmup + 1))
    if settings.lr_schedule == "constant" or settings.schedule_steps is None:
        return 1.0
    share = min(1.0, (done - warmup) / max(1, settings.schedule_steps - warmup))
    return (1 + math.cos(math.pi * share)) / 2 if settings.lr_schedule == "cosine" else 1 - share


def schedule_of(settings: Settings) -> Schedule:
    """Return what makes a schedule another one, which begins with the next step. A longer or shorter one goes on."""
    return settings.lr_schedule, settings.warmup_steps
