"""Rules about memory without use: state of frozen weights, weights and inputs in types that are larger than needed."""

from __future__ import annotations

from ....report.advice import CALL_SDPA, SET_SDPA
from ....shared.forecast import ERRORS, RECORDED
from ....shared.questions import TensorTotal
from ....shared.units import format_bytes
from ..evidence import Evidence, OnRank
from ..finding import MEMORY, Finding
from .limits import SCARCE

# Of the peak. Less than the error of a prediction from recorded steps (docs/prediction.md) could not be shown to be
# saved.
_LEAST = ERRORS[RECORDED]
_CAST = "Keep the samples in {enough} and let the model or the loss convert what it computes with."
_RANGE = "That is by the values of one micro-batch: look first whether all others are within {enough}, too."


def state_of_frozen(evidence: Evidence) -> Finding | None:
    """The optimizer remembers something of weights that it will not update."""
    rank = max(evidence.ranks, key=lambda one: one.facts.state_of_frozen.bytes if one.facts else 0)
    held = rank.facts.state_of_frozen if rank.facts else TensorTotal()
    peak = _peak(evidence, rank)
    if not _matters(held.bytes, peak):
        return None
    return Finding(
        "state of frozen weights",
        "The optimizer keeps state for weights that are frozen",
        MEMORY,
        held.bytes,
        f"The optimizer keeps {format_bytes(held.bytes)} for {_weights(held)} that are frozen, {held.largest} for one.",
        {"optimizer_state_bytes": held.bytes, "weights": held.tensors, **evidence.live_peak(peak)},
        do="Build the optimizer on [p for p in model.parameters() if p.requires_grad] and attach it, or in a %%hvd "
        "cell on all ranks: for p in [p for p in optimizer.state if not p.requires_grad]: del optimizer.state[p]",
    )


def wide_weights(evidence: Evidence) -> Finding | None:
    """Weights in float64, which no GPU for training computes fast with."""
    rank = max(evidence.ranks, key=lambda one: one.facts.wide_weights.bytes if one.facts else 0)
    held = rank.facts.wide_weights if rank.facts else TensorTotal()
    peak = _peak(evidence, rank)
    if not _matters(held.bytes // 2, peak):
        return None
    return Finding(
        "weights in float64",
        "Weights are stored in float64",
        MEMORY,
        held.bytes // 2,
        f"{_weights(held).capitalize()} are in float64, {held.largest} for one: twice the memory of float32, for them, "
        "their gradients, the optimizer's state and what is computed with them.",
        {"weights_bytes": held.bytes, "weights": held.tensors, **evidence.live_peak(peak)},
        do="net.float() in a %%hvd cell on all ranks before the optimizer is built, then attach again; NumPy makes "
        "float64 of what is not told otherwise.",
    )


def inputs(evidence: Evidence) -> Finding | None:
    """Micro-batches in types with more bytes than their values need."""
    found = [(rank, one) for rank in evidence.ranks if rank.facts for one in rank.facts.inputs if one.spare_bytes]
    if not found:
        return None
    rank, widest = max(found, key=lambda entry: entry[1].spare_bytes)
    facts = rank.facts.inputs if rank.facts else ()
    spare = sum(one.spare_bytes for one in facts)
    peak = _peak(evidence, rank)
    if not _matters(spare, peak):
        return None
    shape = "×".join(map(str, widest.shape))
    return Finding(
        "inputs in needless types",
        "Inputs use larger number types than they need",
        MEMORY,
        spare,
        f"A micro-batch holds {shape} numbers as {widest.dtype}, and {widest.enough} would do: "
        f"{format_bytes(spare)} for nothing, on the device and on the way to it.",
        {
            "inputs_bytes": sum(one.bytes for one in facts),
            "needless_bytes": spare,
            "type": widest.dtype,
            **evidence.live_peak(peak),
        },
        do=" ".join([_CAST, *([] if widest.dtype == "float64" else [_RANGE])]).format(enough=widest.enough),
    )


def eager_attention(evidence: Evidence) -> Finding | None:
    """Attention that keeps the scores of all pairs of tokens, which SDPA computes piece by piece."""
    facts = next((one.facts for one in evidence.ranks if one.facts and (one.facts.eager or one.facts.scores)), None)
    if facts is None:
        return None
    peak = next((_peak(evidence, one) for one in evidence.ranks if one.facts is facts), None)
    at_once = facts.scores if evidence.settings.checkpointing == "none" else (max(facts.scores, default=0),)
    size = sum(at_once) or None
    if not _matters(size, peak) if size is not None else (evidence.share or 0) < SCARCE:
        return None
    scores = f": at least {format_bytes(size)} at once" if size is not None else ""
    how = "is computed eagerly" if facts.eager else "is a product, a softmax and another product"
    return Finding(
        "eager attention",
        "Attention stores a score for every pair of tokens",
        MEMORY,
        size or 0,
        f"Attention {how}, so each layer keeps a score for every pair of tokens{scores}. SDPA keeps none.",
        {"scores_bytes": size, "softmaxes in a micro-batch": len(facts.scores) or None, **evidence.live_peak(peak)},
        do=SET_SDPA if facts.eager else CALL_SDPA,
    )


def _peak(evidence: Evidence, rank: OnRank) -> int | None:
    """Return the peak of the rank's steps; before one was done under these settings, the predicted one."""
    return rank.live_peak_bytes or (evidence.needs.live_peak_bytes if evidence.needs else None)


def _matters(size: int, peak: int | None) -> bool:
    return size > 0 and peak is not None and size >= _LEAST * peak


def _weights(held: TensorTotal) -> str:
    return f"{held.tensors} weight{'s' * (held.tensors != 1)}"
