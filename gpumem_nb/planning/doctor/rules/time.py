"""Rules about time: what the verdict on steps says, and micro-batches far below what fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ....report.bottleneck import Changes
from ....report.speed import FEWEST_STEPS
from ....shared.step_times import UPDATE
from ....shared.units import format_bytes, format_rate
from ...prediction import FITS, NO_LIMIT, Prediction
from ..evidence import Evidence
from ..finding import ANYWAY, FASTER, TIME, Finding
from .limits import SCARCE

# What the verdict calls it, and the doctor.
CAUSES = {
    "data": "waiting for data",
    "reduction": "reduction not hidden",
    "slow rank": "a slow rank",
    "uneven steps": "uneven steps",
    "update": "a long update",
    "tiny operators": "tiny operators",
    "no core": "no core",
    "too many ranks": "too many ranks",
    "too many workers": "too many workers",
}
TITLES = {
    "data": "Training waits for data",
    "reduction": "Training waits for the gradients of other ranks",
    "slow rank": "One rank is slower than the others",
    "uneven steps": "Ranks take turns in being slow",
    "update": "The optimizer's update takes long",
    "tiny operators": "Each operator has too little to do",
    "no core": "Other programs are using your cores",
    "too many ranks": "Ranks and their threads outnumber the cores",
    "too many workers": "Data workers and ranks outnumber the cores",
}
_LOOK = "%hvd_time shows the parts of a step on every rank."
_DO = {
    "slow rank": f"{_LOOK} %hvd_status names the rank's host and device: look there for other programs.",
    "uneven steps": f"{_LOOK} A sampler that puts samples of like size into one micro-batch evens them out.",
    "no core": "End the programs that you do not need, then train on: %hvd_train 20.",
}
_MORE = 4  # times as many samples in a micro-batch are asked about
# With 32 samples a micro-batch, four times as many brought digits-resnet a third and digits-separable half as many
# samples/s again (findings.md), and nothing is wrong with either: what brings three quarters again at least was small.
_WORTH = 1.75
_FASTER = 1.05  # at least, without checkpointing; what is gained is the recomputation, a fifth to a third of a step
_ROOM = 0.5  # of the limit: with more, four times as many hardly fit


def _of_verdict(name: str, evidence: Evidence) -> Finding | None:
    """One cause that the time of a step is lost to."""
    verdict = next((one for one in evidence.verdicts if one.cause == name), None)
    if verdict is None or (name == "tiny operators" and small_batch(evidence)):
        return None
    if name in ("no core", "too many ranks") and own_threads(evidence):
        return None  # it says whose threads they are
    measured = {"share of a step": verdict.share, "samples_per_s": evidence.now.samples_per_s if evidence.now else None}
    return Finding(
        CAUSES[name],
        TITLES[name],
        TIME,
        verdict.share,
        verdict.sentence,
        measured,
        do=_DO.get(name, "" if verdict.changes else _LOOK),
        candidates=(verdict.changes,) if verdict.changes else (),
        wants=ANYWAY if name == "data" else FASTER,  # steps on trial do not wait for workers
    )


OF_VERDICTS: tuple[Callable[[Evidence], Finding | None], ...] = tuple(partial(_of_verdict, name) for name in CAUSES)


def larger(evidence: Evidence) -> Changes:
    """Larger micro-batches that are worth asking about, the same samples a step if they can be; empty if none are."""
    settings, now, share = evidence.settings, evidence.now, evidence.share
    if evidence.workload.data.batched or share is None or share > _ROOM or now is None or now.steps < FEWEST_STEPS:
        return {}
    if not _timed_fairly(evidence):
        return {}
    steps = settings.accumulation_steps
    factor = next((one for one in (_MORE, steps) if steps % one == 0 and 1 < one <= _MORE), 0)
    size = settings.batch_size
    if factor:
        return evidence.circumstances.allowed(batch_size=factor * size, accumulation_steps=steps // factor)
    return evidence.circumstances.allowed(batch_size=_MORE * size)


def without_checkpointing(evidence: Evidence) -> Changes:
    """Return the change that keeps all activations, if it is worth asking about; else nothing."""
    now = evidence.now
    if now is None or now.steps < FEWEST_STEPS or evidence.needs is None or not _timed_fairly(evidence):
        return {}
    if evidence.settings.checkpointing == "none" or evidence.needs.verdict not in (FITS, NO_LIMIT):
        return {}
    return evidence.circumstances.allowed(checkpointing="none")


def _timed_fairly(evidence: Evidence) -> bool:
    """Return whether a few steps tell how fast others are.

    Those whose own threads wait for one another do not, nor do some that wait for no worker where workers do not keep
    up.
    """
    if own_threads(evidence):
        return False
    return not (evidence.settings.num_workers and any(verdict.cause == "data" for verdict in evidence.verdicts))


def _faster(evidence: Evidence, other: Prediction, times: float) -> bool:
    """Return whether steps are so many times as fast, by their median turns and by their fastest.

    Other programs slow some turns down; the fastest turns of both tell what is left where none does. Nothing tells how
    fast steps are where either was not timed.
    """
    needs, least = evidence.needs, evidence.samples_per_s or 0.0
    if needs is None or not needs.samples_per_s or not other.samples_per_s or other.samples_per_s <= least:
        return False
    undisturbed = (other.high_samples_per_s or 0.0) >= times * (needs.high_samples_per_s or math.inf)
    return undisturbed and other.samples_per_s >= times * needs.samples_per_s


def needless_checkpointing(evidence: Evidence) -> Finding | None:
    """All activations fit with room, and steps that recompute none are faster."""
    kept, now_per_s = evidence.all_kept, evidence.samples_per_s
    if kept is None or not now_per_s or not kept.samples_per_s or kept.verdict not in (FITS, NO_LIMIT):
        return None
    share = kept.reserved_peak_bytes / kept.limit_bytes if kept.limit_bytes else 0.0
    if share > SCARCE or not _faster(evidence, kept, _FASTER):
        return None
    of_limit = f" of {format_bytes(kept.limit_bytes)}" if kept.limit_bytes else ""
    return Finding(
        "checkpointing is not needed",
        "Checkpointing can be switched off",
        TIME,
        1 - now_per_s / kept.samples_per_s,
        f"Steps recompute activations that would fit: with all of them kept a step is predicted to need "
        f"{kept.in_words(kept.reserved_peak_bytes)}{of_limit}, at {format_rate(kept.samples_per_s)} samples/s instead "
        f"of {format_rate(now_per_s)}.",
        {
            "samples_per_s": now_per_s,
            "without checkpointing_per_s": kept.samples_per_s,
            "reserved_peak_bytes": kept.reserved_peak_bytes,
            "limit_bytes": kept.limit_bytes,
        },
        candidates=({"checkpointing": "none"},),
        wants=FASTER,
    )


def own_threads(evidence: Evidence) -> Finding | None:
    """A cell has let torch compute with more threads than there are cores for the ranks of a host."""
    known = [one for one in evidence.ranks if one.info.virtual and one.facts and one.facts.threads > one.info.threads]
    rank = max(known, key=lambda one: one.facts.threads if one.facts else 0, default=None)
    if rank is None or rank.facts is None:
        return None
    here = [one for one in evidence.ranks if one.info.host == rank.info.host]
    cores = len({core for one in here for core in one.info.cores})
    threads = sum(one.facts.threads if one.facts else one.info.threads for one in here)
    if not 0 < cores < threads:
        return None
    waited = [one.share for one in evidence.verdicts if one.cause in ("no core", "too many ranks")]
    share, of = max(waited, default=0.0), "threads" if rank.facts.threads > 1 else "thread"
    lost = f" {100 * share:.0f} % of a step is waiting for a core." if share else ""
    longest = max((one.share for one in evidence.verdicts), default=0.0)  # ranks that lack cores wait for one another
    fair = max(1, cores // len(here))
    return Finding(
        "threads of one's own",
        "A cell asked for more threads than there are cores",
        TIME,
        longest,
        f"Rank {rank.info.rank} computes with {rank.facts.threads} {of}, where it was started with "
        f"{rank.info.threads}: the {len(here)} ranks of this host have {threads} threads on {cores} "
        f"core{'s' * (cores > 1)}.{lost}",
        {"threads": threads, "cores": cores, "share of a step": share or None},
        do=f"In a %%hvd cell on all ranks: torch.set_num_threads({fair}), and leave out the line that sets more.",
    )


def many_groups(evidence: Evidence) -> Finding | None:
    """An optimizer with about a group for each weight, which it updates one after another."""
    rank = next((one for one in evidence.ranks if one.facts and one.facts.groups >= _GROUPS), None)
    if rank is None or rank.facts is None or 2 * rank.facts.groups < rank.facts.weights:
        return None
    timed = [(one.times[UPDATE], one.step_s) for one in rank.warm if one.times]
    share = sum(update for update, _ in timed) / sum(step for _, step in timed) if timed else 0.0
    if share < 1 - 1 / _FASTER:
        return None
    groups, weights = rank.facts.groups, rank.facts.weights
    return Finding(
        "a group for each weight",
        "The optimizer has a group for each weight",
        TIME,
        share,
        f"The optimizer has {groups} groups for {weights} weights and updates them group by group, so that nothing is "
        f"done for several weights at once. The update takes {100 * share:.0f} % of a step.",
        {"groups": groups, "weights": weights, "share of a step": share},
        do="Put weights with the same options into one group; two are usual, with and without weight decay.",
    )


_GROUPS = 20  # at least: with fewer there is little to put together


def small_batch(evidence: Evidence) -> Finding | None:
    """Four times the micro-batch fits, and is much faster."""
    more, now_per_s = evidence.larger, evidence.samples_per_s
    if more is None or not now_per_s or not more.samples_per_s or more.verdict != FITS:
        return None
    if not _faster(evidence, more, _WORTH):
        return None
    size, wanted = evidence.settings.batch_size, more.settings.batch_size
    # The largest leaves a segment free, in case it is asked for again: what was predicted here may need that.
    largest = evidence.largest_batch if (evidence.largest_batch or 0) >= wanted else None
    most = f"; up to {largest:,} fit" if largest else ""
    scale = evidence.noise_scale
    but = ["That is if workers keep up."] if more.settings.num_workers else []
    if scale and more.settings.samples_per_rank * evidence.size > scale:
        but.append(f"Of more than about {scale:,.0f} samples a step (the gradients' noise scale) each brings less.")
    return Finding(
        "a small batch",
        "Larger micro-batches would be faster",
        TIME,
        1 - now_per_s / more.samples_per_s,
        f"Micro-batches of {size} samples leave throughput on the table: with {wanted} it is "
        f"{format_rate(more.samples_per_s)} samples/s instead of {format_rate(now_per_s)}, in "
        f"{more.in_words(more.reserved_peak_bytes)} of {format_bytes(more.limit_bytes)}{most}.",
        {
            "samples_per_s": now_per_s,
            "larger_samples_per_s": more.samples_per_s,
            "largest batch": largest,
            "noise scale": evidence.noise_scale,
        },
        do=" ".join(but),
        candidates=(more.settings.changed_from(evidence.settings),),
        wants=FASTER,
    )
