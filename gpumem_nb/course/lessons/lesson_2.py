"""Lesson 2, *Four ranks, one model*: why weights stay equal, and five ways in which ranks come apart or wait."""

from __future__ import annotations

from typing import Any

from ...shared.errors import Stalled
from ..answers import Nothing, Number, Words
from ..evidence import Evidence
from ..exercise import Content, Exercise, Outcome, right, wrong
from ..judges import Mistake, measured, named

STEPS = 20
SAMPLES, BATCH = 240, 6
BATCHES = 13  # which no usual number of ranks divides
LOOP = ("new_net", "train", "apart", "rows")
"""What the notebook's first cell defines on the ranks."""
_FROM_LOOP = "the cell that defines new_net(), train() and apart()"


def _distances(evidence: Evidence) -> tuple[float, float]:
    """Return how far the farthest rank's weights are from rank 0's, before and after some steps."""
    evidence.needs_names(*LOOP, cell=_FROM_LOOP)
    before, after = zip(*evidence.of_module("ranks", f"drift(globals(), {STEPS})"), strict=True)
    return max(before), max(after)


SEEDS = Exercise(
    "2.1",
    "Ranks that begin apart",
    "Each rank has drawn initial weights of its own, and gradients are averaged in every step. After "
    f"{STEPS} steps of plain SGD, how many times as far apart as at the beginning are the ranks' weights?",
    Number("0.5 or '2 times'"),
    measured(
        _distances,
        lambda found: found[1] / found[0],
        within=0.02,
        words=lambda value: f"{value:.4g} times as far apart",
        why="Every rank subtracts the same averaged gradient, so every rank moves by the same vector, and the distance "
        "between them stays. Averaging gradients keeps equal weights equal; it never makes them equal.",
        mistakes=(
            Mistake(
                lambda _: 0,
                "That would be so if weights were averaged. Only gradients are: what pulls the weights together?",
            ),
            Mistake(lambda _: STEPS, "That counts the steps. Which step would move one rank away from another?"),
        ),
        too_low="Do they come together? A step adds something to the weights of each rank. Is it the same on all "
        "ranks, or does it depend on where the rank stands?",
        too_high="Ranks that follow gradients of their own drift apart. Which gradient does each rank's step use here?",
    ),
    (
        "Write one step down: new weight = old weight - rate × gradient. Which of the three differ between ranks?",
        "Subtract rank 0's new weight from rank 1's. The averaged gradient is the same on both.",
        "What is subtracted on both sides cancels out.",
    ),
)


def _shared_out(_: None, evidence: Evidence) -> Outcome:
    """Judge which samples each rank's loader gives."""
    batches: list[list[list[int]]] = evidence.of_function("loader", "ranks")
    of_rank = [[number for batch in of for number in batch] for of in batches]
    seen, all_numbers = [set(numbers) for numbers in of_rank], set(range(SAMPLES))
    union = set().union(*seen)
    twice = sum(sum(number in of for of in seen) > 1 for number in union)
    compared = (
        f"In one epoch {len(union & all_numbers)} of {SAMPLES} samples are seen, {twice} of them by more than one rank."
    )
    return _sharing_mistake(batches, of_rank, compared) or right(
        "Each rank has a share of its own, and together they are the data set. The toolkit asks the same of any "
        "loader: %hvd_check --sync model=net data=loader",
        compared,
    )


def _sharing_mistake(batches: list[list[list[int]]], of_rank: list[list[int]], compared: str) -> Outcome | None:
    """Return what is wrong with a way of sharing samples out, if anything is."""
    seen = [set(numbers) for numbers in of_rank]
    largest = max((len(batch) for of in batches for batch in of), default=0)
    if largest != BATCH:
        hint = f"Batches have {largest} samples now. That was not the trouble: leave batch_size={BATCH}, and share out."
    elif any(len(set(numbers)) < len(numbers) for numbers in of_rank):
        hint = "A rank meets a sample twice in one epoch: draw without putting back."
    elif all(numbers == of_rank[0] for numbers in of_rank[1:]):
        hint = (
            "All ranks see the same samples in the same order. Their gradients are equal, and the average of equal "
            "numbers is that number: all ranks but one work for nothing."
        )
    elif all(numbers == seen[0] for numbers in seen[1:]):
        hint = (
            "The order differs now, and the samples do not: each rank still goes through all of them. Another order "
            "is not another share."
        )
    elif len(set().union(*seen)) < sum(map(len, seen)):
        hint = "The shares overlap: some samples count more than others. Which numbers does each rank take?"
    elif set().union(*seen) != set(range(SAMPLES)):
        hint = "No sample is seen twice, but some are seen by no rank: the shares together must be the whole data set."
    elif len({len(of) for of in batches}) > 1:
        hint = "Some ranks have more batches than others, and would wait for them in the last step (exercise 2.5)."
    else:
        return None
    return wrong(hint, compared)


SHARES = Exercise(
    "2.2",
    "Samples for each rank",
    f"Every rank goes through all {SAMPLES} samples. Change loader so that each sample is seen by one rank in an "
    "epoch.",
    Nothing(),
    _shared_out,
    (
        "A rank knows its number and how many there are: rank and size.",
        "DistributedSampler does it, or a Subset that depends on rank. Under Horovod a DistributedSampler must be told "
        "size and rank: it would ask torch.distributed, which is not running.",
        "DistributedSampler(rows, size, rank) is a sampler= of DataLoader; with it goes no shuffle=.",
    ),
)


def _told_by_one(_: None, evidence: Evidence) -> Outcome:
    """Judge a function with which rank 0 reports the mean of all ranks' losses."""
    try:
        losses, told = zip(*evidence.of_function("mean_loss", "ranks"), strict=True)
    except Stalled as error:
        return wrong(
            "An all-reduce ends when all ranks have called it. A rank that does not come leaves the others "
            "waiting, for ever in a plain script. What may a rank do alone, and what not?",
            str(error),
        )
    mean, found = sum(losses) / len(losses), told[0]
    compared = f"Losses of the ranks: {', '.join(f'{loss:g}' for loss in losses)}. Rank 0 returns {found}."
    if found is not None and abs(found - mean) < 1e-4 * mean:
        return right("All ranks take part in the collective, and one of them tells what came of it.", compared)
    return wrong(_mean_mistake(found, losses), compared)


def _mean_mistake(found: float | None, losses: tuple[float, ...]) -> str:
    """Return which idea leads to this in place of the mean of losses."""
    if found is None:
        return "Nothing hangs, but rank 0 returns nothing: it must return the mean."
    if found == losses[0]:
        return "That is rank 0's own loss. It stands for the data of one rank, and the others' are not in it."
    if abs(found - sum(losses)) < 1e-4 * found:
        return "That is the sum over all ranks; the mean was asked for."
    return "Nothing hangs, but this is not the mean of the losses of all ranks."


CONDITIONAL = Exercise(
    "2.3",
    "A report that hangs",
    "mean_loss() waits for ever, because only rank 0 calls the all-reduce. Change it so that rank 0 returns the mean "
    "of all ranks' losses, and nothing hangs.",
    Nothing(),
    _told_by_one,
    (
        "Which line must all ranks reach, and which is for rank 0 alone?",
        "Take the all-reduce out of the if: every rank calls it, with the same name.",
        "First mean = hvd.allreduce(…).item() on all ranks, then: if rank == 0: return mean",
    ),
)

WEIGHTS, GRADIENTS, STATISTICS, LOSSES = "weights", "gradients", "running statistics", "losses"


def _unlike(evidence: Evidence) -> frozenset[str]:
    """Return what differs between ranks after some steps of a loop that begins with equal weights."""
    evidence.needs_names(*LOOP, cell=_FROM_LOOP)
    of_rank: list[dict[str, Any]] = evidence.of_module("ranks", f"kept(globals(), {STEPS})")
    return frozenset(name for name, value in of_rank[0].items() if any(of[name] != value for of in of_rank[1:]))


OWN_STATE = Exercise(
    "2.4",
    "What stays a rank's own",
    f"Weights were broadcast, each rank drew other samples, {STEPS} steps are done. Which of weights, gradients, "
    "running statistics (of batch norm) and losses differ between the ranks?",
    Words((WEIGHTS, GRADIENTS, STATISTICS, LOSSES)),
    named(
        _unlike,
        why="What is computed from a rank's own samples and is not reduced stays its own. A loss is only read. But the "
        "running statistics are used in evaluation, so each rank has a slightly different model there: average "
        "them (hvd.allreduce), use hvd.SyncBatchNorm, or a norm without statistics, such as GroupNorm.",
        mistakes=(
            (WEIGHTS, "Weights were equal, and each step takes the same averaged gradient from them."),
            (GRADIENTS, "Gradients did differ after backward. What does train() do with them before the step?"),
            (f"-{STATISTICS}", "One more: batch norm keeps means of what it has seen. Of which rank's samples?"),
            (f"-{LOSSES}", "One more: is the loss on your samples the loss on mine?"),
        ),
        otherwise="Ask of each: is it computed from the rank's own samples, and if so, is it reduced?",
    ),
    (
        "Each rank sees samples of its own. Which of the four are computed from samples?",
        "Three are computed from samples, but one of them is reduced before it is used.",
        "train() calls hvd.allreduce for the gradients, and for nothing else.",
    ),
)


def _ends_together(_: None, evidence: Evidence) -> Outcome:
    """Judge how many steps the ranks take, by letting them walk."""
    if evidence.session.size == 1:
        return wrong("There is only one rank, so nothing can be uneven: start two or more.")
    try:
        found = evidence.of_function("steps", "ranks", BATCHES)
    except Stalled as error:
        return wrong(
            "Ranks take different numbers of steps: in the last ones, some wait for a gradient that others never "
            "send. What must a rank know of the others before it begins?",
            str(error),
        )
    compared = "; ".join(f"rank {rank}: {taken} of {has}" for rank, (taken, has) in enumerate(found))
    compared = f"Steps of batches: {compared}."
    taken, fewest = found[0][0], min(has for _, has in found)
    if taken > fewest:
        return wrong(
            "They end together, but not all ranks have so many batches: the last step would have to take "
            "one twice, as DistributedSampler does unless told drop_last=True.",
            compared,
        )
    if taken < fewest:
        return wrong("They end together, but too early: every rank has at least one more batch to give.", compared)
    return right(
        "All ranks agree on a number before they begin. The toolkit goes on into the next epoch instead, so that all "
        "steps have the same size; Horovod's hvd.join() lets ranks without samples take part until the last one ends.",
        compared,
    )


UNEVEN = Exercise(
    "2.5",
    "One batch more",
    f"{BATCHES} batches are dealt out to the ranks like cards, so rank 0 has one more than the last rank. Write "
    "steps(share): the largest number of steps for which every rank has a batch.",
    Nothing(),
    _ends_together,
    (
        "A rank knows its own share. How does it learn how many batches the others have?",
        "A collective tells: hvd.allgather_object(len(share)) gives a list with one number for each rank.",
        "All ranks must return the smallest of these numbers: min(…), or an all-reduce with op=hvd.Min.",
    ),
)

LESSON = Content("2", "Four ranks, one model", (SEEDS, SHARES, CONDITIONAL, OWN_STATE, UNEVEN))
