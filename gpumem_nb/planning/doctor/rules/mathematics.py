"""Rules about wrong mathematics: updates that are skipped, a rate that does not follow the batch."""

from __future__ import annotations

import math

from ....report.bottleneck import Changes
from ....shared.settings import OWN, learning_rate
from ..evidence import Evidence
from ..finding import STOPS, WRONG, Finding

# torch's scaler halves its scale at a skipped step and doubles it after 2,000 good ones: in the long run one step in
# 2,000 is skipped. From its first 65,536 a model settles within a few steps; half of so many is no settling any more.
_LOOKED_AT, _SKIPPED = 16, 8
# Below 1, gradients that fp16 can hold are made smaller than they are, the opposite of what scaling is for.
_LEAST_SCALE = 1.0
# Twice the batch moves the rate by 2 or √2, which is within what people tune by; four times is not.
_BATCHES = 4


def scale_collapses(evidence: Evidence) -> Finding | None:
    """Under fp16 gradients overflow again and again, and updates are skipped."""
    if evidence.settings.precision != "fp16":
        return None
    rows = [rank.samples[-_LOOKED_AT:] for rank in evidence.ranks if rank.samples]
    row = max(rows, key=lambda samples: sum(one.skipped for one in samples), default=())
    scale = row[-1].loss_scale if row else None
    skipped = sum(one.skipped for one in row)
    if scale is None or (skipped < _SKIPPED and scale >= _LEAST_SCALE):
        return None
    return Finding(
        "fp16 scale collapses",
        "Gradients are too large for fp16",
        STOPS,
        2,
        f"Gradients overflow in fp16: {skipped} of the latest {len(row)} updates were skipped, and the loss scale is "
        f"down to {scale:g}. What bf16 holds reaches as far as fp32.",
        {"skipped": skipped, "steps": len(row), "loss scale": scale},
        do="Or find what is so large: a loss that sums where it should average, or an output without normalisation.",
        candidates=({"precision": "bf16"},),
    )


def other_objects(evidence: Evidence) -> Finding | None:
    """The cell that defined what is trained was run again, and what it made was not attached."""
    said = {rank.info.rank: rank.facts.replaced for rank in evidence.ranks if rank.facts and rank.facts.replaced}
    if not said:
        return None
    return Finding(
        "other objects than attached",
        "Your variables hold other objects than those being trained",
        WRONG,
        2,
        f"{next(iter(said.values())).partition(';')[0]}: training still uses the old.",
        {"on ranks": ", ".join(map(str, said))},
        do="Run the cell that attaches again, or gm.attach(...), to train with the new; or set the variables back.",
    )


def rate_unscaled(evidence: Evidence) -> Finding | None:
    """The global batch was made much larger or smaller, and the learning rate stayed."""
    settings, before = evidence.settings, _batch_of_the_rate(evidence)
    if before is None or settings.lr_scaling != "none" or settings.lr_schedule == OWN:
        return None
    batch = evidence.global_batch
    if not (batch >= _BATCHES * before or before >= _BATCHES * batch) or not _rate_is_the_knob(evidence):
        return None
    own = settings.optimizer == OWN and evidence.workload.own_optimizer == "SGD"
    plain = own or settings.optimizer in ("sgd", "momentum")
    scaling = "linear" if plain else "sqrt"
    factor = batch / before if plain else math.sqrt(batch / before)
    changes: Changes = {"lr_scaling": scaling, "reference_batch": before}
    return Finding(
        "learning rate unscaled",
        "The learning rate belongs to another batch size",
        WRONG,
        1,
        f"The global batch went from {before:,} to {batch:,} samples, and learning_rate is still "
        f"{settings.learning_rate:g}: for {'SGD' if plain else 'Adam and its like'} it is usually {factor:.3g} times "
        "that.",
        {
            "global batch": batch,
            "when the rate was set": before,
            "learning rate": settings.learning_rate,
            "noise scale": evidence.noise_scale,
        },
        candidates=evidence.possible([settings.replace(**changes)]),
    )


def _batch_of_the_rate(evidence: Evidence) -> int | None:
    """The global batch of the first steps since the learning rate was set last."""
    found = None
    for tried in reversed(evidence.tried):
        if (tried.settings.learning_rate, tried.settings.optimizer) != (
            evidence.settings.learning_rate,
            evidence.settings.optimizer,
        ):
            break
        found = tried.settings.samples_per_rank * evidence.size if tried.steps else found
    return found


def _rate_is_the_knob(evidence: Evidence) -> bool:
    """Return whether the rate is still the one of its knob, and was not set by hand."""
    latest = next((rank.samples[-1] for rank in evidence.ranks if rank.samples), None)
    if latest is None or latest.learning_rate is None or evidence.settings.warmup_steps:
        return True
    if evidence.settings.lr_schedule != "constant":
        return True
    return math.isclose(latest.learning_rate, learning_rate(evidence.settings, 0, evidence.size), rel_tol=1e-3)
