"""The clinic's trainings whose ranks do not do what they should do together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...exercise import Outcome, right, wrong
from .cases import case


def _loader_of(ranks: Sequence[dict[str, Any]]) -> Outcome:
    samples, epochs = ranks[0]["samples"], len(ranks[0]["seen"])
    seen = [Counter(number for rank in ranks for number in rank["seen"][epoch]) for epoch in range(epochs)]
    twice, never = sum(many > 1 for many in seen[0].values()), samples - len(seen[0])
    compared = f"In an epoch {twice} of {samples} samples are seen more than once, and {never} never."
    if twice == samples and not never:
        return wrong(
            "Each rank still goes through all samples: an epoch costs as much as on one rank, and gradients of the "
            "same samples are averaged. A shuffle alone, seeded or not, shares nothing out.",
            compared,
        )
    if twice:
        return wrong(
            "Ranks draw their samples without knowing of each other, so some are seen twice and some never. All "
            "ranks must cut the same order: one that depends on the epoch alone.",
            compared,
        )
    if never:
        return wrong("Some samples are seen by no rank.", compared)
    if any(set(one) != set(range(samples)) or max(one.values()) > 1 for one in seen):
        return wrong("In the second epoch some samples are seen twice, or never.", compared)
    orders = [[tuple(rank["seen"][epoch]) for rank in ranks] for epoch in range(epochs)]
    if orders[0] == orders[1]:
        return wrong(
            "Shared out, but in the same order in every epoch: a DistributedSampler must be told which epoch it is, by "
            "set_epoch(epoch), and your own shuffle must depend on it.",
            compared,
        )
    return right("Each sample is seen once in an epoch, by one of the ranks, in another order each time.", compared)


def _build(ranks: Sequence[dict[str, Any]]) -> Outcome:
    same = len({rank["weights"] for rank in ranks}) == 1
    draws = len({tuple(rank["draws"]) for rank in ranks}) == len(ranks)
    compared = (
        f"Weights: {'the same' if same else 'not the same'} on all ranks. "
        f"Random numbers afterwards: {'different' if draws else 'the same'} on each."
    )
    if not same:
        return wrong(
            "Ranks begin at different weights. Averaged gradients change all of them alike, so they never come "
            "together: each rank trains a model of its own with gradients of the others'.",
            compared,
        )
    if not draws:
        return wrong(
            "The weights are the same, but now all ranks also draw the same numbers afterwards: the same dropout "
            "masks and the same noise on every rank. Weights must be alike, what is drawn while training must not.",
            compared,
        )
    if any(rank["weights"] != rank["again"] for rank in ranks):
        return wrong("The same seed gives other weights the second time: the run cannot be repeated.", compared)
    if ranks[0]["weights"] == ranks[0]["other"]:
        return wrong("Another seed gives the same weights: seed is not used any more.", compared)
    return right(
        "Weights from one seed, or from rank 0 by a broadcast; noise from a seed of each rank's own.", compared
    )


_EVERY_STEP, _OFTEN = 0.7, 0.2  # norms for each step


def _logged(ranks: Sequence[dict[str, Any]]) -> Outcome:
    norms = [rank["norms"] for rank in ranks]
    compared = "Norms computed for each step: " + ", ".join(
        f"rank {number} {each:.2f}" for number, each in enumerate(norms)
    )
    if not any(rank["logged"] for rank in ranks):
        return wrong(
            "Nothing is logged any more: at least every 100 steps a norm should be appended to log.", f"{compared}."
        )
    slow = sum(each > _OFTEN for each in norms)
    if slow == len(norms):
        return wrong(
            "Now all ranks are slow: none waits for another, and each step takes as long as on the slow rank before.",
            f"{compared}.",
        )
    if slow:
        return wrong(
            "One rank still computes more than the others in its steps. They wait for it in every all-reduce, so "
            "that all train at its pace, whatever they do themselves.",
            f"{compared}.",
        )
    return right(
        "All ranks wait for the slowest one in every step. What one rank alone does should be rare, cheap, or done "
        "elsewhere.",
        f"{compared}.",
    )


_SAME, _SLACK = 1e-5, 1e-3


def _evaluated(ranks: Sequence[dict[str, Any]]) -> Outcome:
    outputs = [rank["outputs"] for rank in ranks]
    apart = max(abs(one - other) for each in outputs for one, other in zip(each, outputs[0], strict=True))
    compared = f"Outputs for the same samples differ by up to {apart:.2g} between ranks."
    if any(not rank["kept"] for rank in ranks):
        return wrong("That changes the weights. Only statistics differ: running_mean and running_var.", compared)
    if any(not _plausible(rank, ranks) for rank in ranks):
        return wrong(
            "The statistics are now those of no rank's samples, nor of all together: they were reset, or added up "
            "without dividing by the number of ranks.",
            compared,
        )
    if apart > _SAME or _apart(ranks) > _SAME:
        return wrong(
            "Ranks still normalise by different statistics. All-reduce keeps gradients alike, and so weights: "
            "running_mean and running_var have no gradients, and come from a rank's own samples.",
            compared,
        )
    return right(
        "Statistics averaged over ranks are of all samples; those of rank 0, broadcast, of its own. "
        "hvd.SyncBatchNorm has no such question: it computes them together, at the price of a message for each layer.",
        compared,
    )


def _apart(ranks: Sequence[dict[str, Any]]) -> float:
    """Return by how much statistics of ranks differ."""
    each = [[*rank["now"][0], *rank["now"][1]] for rank in ranks]
    return float(max(abs(one - other) for of in each for one, other in zip(of, each[0], strict=True)))


def _plausible(rank: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> bool:
    """Return whether statistics lie between those that the ranks gathered; a variance may hold that of the means."""
    for place, (mean, var) in enumerate(zip(*rank["now"], strict=True)):
        means, variances = ([one["own"][kind][place] for one in ranks] for kind in (0, 1))
        spread = (max(means) - min(means)) ** 2
        if not min(means) - _SLACK <= mean <= max(means) + _SLACK:
            return False
        if not min(variances) - _SLACK <= var <= max(variances) + spread + _SLACK:
            return False
    return True


SAMPLER = case(
    6,
    "A sampler that is not sharded",
    "An epoch on two ranks takes as long as on one. Change loader_of() so that in each epoch every sample is seen "
    "once, by one of the ranks, in an order that changes from epoch to epoch.",
    "loader_of",
    "together",
    _loader_of,
    (
        "%hvd_check --sync model=net data=loader says which samples several ranks see.",
        "torch.utils.data.DistributedSampler(rows, size, rank) gives a rank its part.",
        "sampler.set_epoch(epoch) makes the order of this epoch, the same for all ranks.",
    ),
)
SEEDS = case(
    7,
    "Unseeded ranks",
    "Ranks begin at different weights. Change build() so that weights are the same on all ranks, and random numbers "
    "drawn after it are not.",
    "build",
    "together",
    _build,
    (
        "%hvd_check --sync model=net compares the weights of all ranks.",
        "Which lines draw weights, and by which seed? When may the ranks go separate ways?",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) after the model is built; or two seeds, one after "
        "the other.",
    ),
)
SLOW = case(
    11,
    "A slow rank",
    "Rank 0 is late in every step, and all ranks train at its pace. Change logged_loss() so that a step costs hardly "
    "more than without the log, which still gets a norm at least every 100 steps.",
    "logged_loss",
    "together",
    _logged,
    (
        "%hvd_time shows who computes and who waits.",
        "How often do you look at this number?",
        "Count the steps, and compute the norm in every fiftieth.",
    ),
)
STATISTICS = case(
    12,
    "Batch-norm statistics that differ",
    "The same samples have other outputs on each rank. Complete before_evaluation() so that all ranks normalise by "
    "the same statistics, and weights stay as they are.",
    "before_evaluation",
    "together",
    _evaluated,
    (
        "%hvd_check --sync model=net names the buffers that differ.",
        "Which of model.named_buffers() has numbers that are gathered while training?",
        "buffer.copy_(hvd.allreduce(buffer)) for each of floating point, on all ranks.",
    ),
)
