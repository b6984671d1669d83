"""The cause of lost time in a step, in one sentence, with the settings that would help.

The steps of all ranks are their critical path: a step is as long as that of the rank which is last in it. So its parts
are those that count, and what it takes longer than the other ranks is what they wait for.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..shared.errors import InvalidInput
from ..shared.knobs import KNOBS
from ..shared.messages import RankInfo, Sample
from ..shared.settings import Settings
from ..shared.step_times import BACKWARD, DATA, FORWARD, PARTS, REDUCTION, TOOLKIT, UPDATE, StepTimes
from ..shared.workload import WorkloadInfo
from .speed import STARVED_SHARE, judged

FEWEST_STEPS = 12  # before anything is said
MOST_STEPS = 24  # the latest
_SLOWEST_SHARE = 0.04  # of them, which are left out: hiccups of the machine
_ALWAYS = 0.8  # of the steps: a rank that is last so often is slow itself
_WINDOW = 10  # steps, for telling since when a rank is slow
_PART_OF_NOW = 0.4  # of what it is slower by now: below, it was not slow yet


class CriticalPath:
    """Some steps, of which the rank counts that was last in each.

    Attributes:
        samples: all there are, of all ranks.
        rank: the one that was last most often.
        always: whether it was in nearly all steps.
        step_s: the mean of a step.
        operators, exact: as the ledger of such a step counts them; 0 where none was recorded.
        queued_s: as :class:`StepTimes` has it, as the mean of the last rank.
    """

    def __init__(
        self, samples: Sequence[Sequence[Sample]], steps: Sequence[tuple[StepTimes, ...]], since_step: int
    ) -> None:
        self.samples = samples
        lasts = [max(range(len(step)), key=[_work_s(times) for times in step].__getitem__) for step in steps]
        self._last = [step[last] for step, last in zip(steps, lasts, strict=True)]
        self._others = [step[:last] + step[last + 1 :] for step, last in zip(steps, lasts, strict=True)]
        self.rank, often = Counter(lasts).most_common(1)[0]
        self.always = len(samples) > 1 and often >= _ALWAYS * len(steps)
        self.step_s = self.mean(lambda times: times.total_s)
        self.queued_s = self.mean(queued_s)
        now = next((row[-1].settings_id for row in samples if row), 0)
        latest = (one for one in reversed(samples[self.rank]) if one.settings_id == now and one.step > since_step)
        ledger = next((one.ledger for one in latest if one.ledger), None)
        self.operators, self.exact = (ledger.operators, ledger.exact) if ledger else (0, True)

    @classmethod
    def of(cls, samples: Sequence[Sequence[Sample]], since_step: int) -> CriticalPath | None:
        """Of the latest steps that all ranks have done, without hiccups of the machine; ``None`` if they are few."""
        steps = list(_by_step([judged(of_rank, since_step) for of_rank in samples]).values())[-MOST_STEPS:]
        steps.sort(key=lambda step: max(times.total_s for times in step))
        kept = steps[: len(steps) - round(_SLOWEST_SHARE * len(steps))]
        return cls(samples, kept, since_step) if len(steps) >= FEWEST_STEPS else None

    def mean(self, seconds: Callable[[StepTimes], float]) -> float:
        """Of the last rank, over the steps."""
        return statistics.fmean(map(seconds, self._last))

    def part(self, *names: str) -> float:
        """Return the mean of these parts together."""
        return self.mean(lambda times: sum(times[name] for name in names))

    def excess(self, seconds: Callable[[StepTimes], float]) -> float:
        """Return how much more it is than of the other ranks."""
        others = [statistics.fmean(map(seconds, rest)) for rest in self._others if rest]
        return self.mean(seconds) - statistics.fmean(others) if others else 0.0

    def excess_of(self, part: str) -> float:
        """Return how much longer a part takes the last rank than the others."""
        return self.excess(lambda times: times[part])

    @property
    def computing_excess_s(self) -> float:
        """Return how much longer it computes than the others, but for having no core: in the median step.

        In each step some rank is last, by chance if nothing else: the mean would count all that a busy machine does.
        """
        steps = zip(self._last, self._others, strict=True)
        return statistics.median([_longer_s(last, others) for last, others in steps if others] or [0.0])

    def slow_since(self) -> int:
        """Return the step from which on one rank takes longer than the others; 0 if it always did."""
        done = (sample.settings_id for row in self.samples for sample in reversed(row) if sample.done)
        latest = next(done, 0)
        steps = _by_step([[sample for sample in row if sample.settings_id == latest] for row in self.samples])
        numbers = sorted(steps, reverse=True)
        for place in range(_WINDOW, len(numbers) - _WINDOW, _WINDOW):
            before = [steps[number] for number in numbers[place : place + _WINDOW]]
            longer = [_longer_s(step[self.rank], step[: self.rank] + step[self.rank + 1 :]) for step in before]
            if statistics.median(longer) < _PART_OF_NOW * self.computing_excess_s:
                return numbers[place - 1]
        return 0


def _by_step(rows: Sequence[Sequence[Sample]]) -> dict[int, tuple[StepTimes, ...]]:
    """Return the times of all ranks in each step that all have done, by its number."""
    of_ranks = [{sample.step: sample.times for sample in row if sample.done and sample.times} for row in rows]
    common = set.intersection(*map(set, of_ranks)) if of_ranks else set[int]()
    return {step: tuple(of_rank[step] for of_rank in of_ranks) for step in sorted(common)}


def _work_s(times: StepTimes) -> float:
    return times.total_s - times[REDUCTION]


def _computing_s(times: StepTimes) -> float:
    return _work_s(times) - times[DATA]


def _longer_s(one: StepTimes, others: Sequence[StepTimes]) -> float:
    """Return how much longer one rank computes in a step than the others, but for having no core."""
    waited_s = queued_s(one) - statistics.fmean(map(queued_s, others))
    return _computing_s(one) - statistics.fmean(map(_computing_s, others)) - max(0.0, waited_s)


def queued_s(times: StepTimes) -> float:
    """Return how long it waited for a core, as far as that is known."""
    return times.queued_s or 0.0


_MAINLY = 0.5  # of a time that has one cause
# Up to which calls of operators take next to nothing but the calling. By calls from outside and nodes of backward,
# small models came to 26 to 59 µs each with one or two samples a micro-batch, and to 52 to 230 with eight (one thread
# of a server's processor, torch 2.13). Where every tensor made is counted, as on GPUs, there are about four times more.
_CALL_S, _TENSOR_S = 60e-6, 15e-6
_LARGER = 4  # times as many samples are worth trying then

_TINY, _SLOW = "tiny operators", "slow rank"
# What slows all operators of a rank alike: then the operators are not the cause.
_FROM_OUTSIDE = ("too many ranks", "too many workers", "no core", _SLOW)
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The facts besides times that a verdict depends on: the settings in use, the ranks, and the workload."""

    settings: Settings
    ranks: Sequence[RankInfo]
    workload: WorkloadInfo | None

    def allowed(self, **changes: Any) -> Changes:
        """Return the same, or nothing if what is loaded cannot be trained so."""
        try:
            after = self.settings.replace(**changes)
            after.check_together(len(self.ranks))
        except InvalidInput:
            return {}
        knobs = [KNOBS[name] for name in changes]
        refused = any(knob.refuses and knob.refuses(getattr(after, knob.name), self.workload) for knob in knobs)
        samples = self.workload.dataset_len if self.workload else None
        too_large = samples is not None and after.samples_per_rank * len(self.ranks) > samples
        return {} if refused or too_large else changes


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A cause of lost time.

    Attributes:
        cause: in a word or two.
        share: of a step, between 0 and 1.
        sentence: what is lost to what, and what would help.
        changes: knobs that would help, if any do.
    """

    cause: str
    share: float
    sentence: str
    changes: Changes = field(default_factory=dict)

    @property
    def typed(self) -> str:
        """The changes as they are typed after ``%hvd_set``."""
        return " ".join(f"{name}={KNOBS[name].text(value)}" for name, value in self.changes.items())

    def __str__(self) -> str:
        return f"{self.sentence} Try %hvd_set {self.typed}" if self.changes else self.sentence

    @classmethod
    def all_of(
        cls, samples: Sequence[Sequence[Sample]], since_step: int, circumstances: Circumstances
    ) -> list[Bottleneck]:
        """Return all that is worth a word, what most is lost to first."""
        path = CriticalPath.of(samples, since_step)
        if path is None:
            return []
        found = [(judge(path, circumstances), least) for judge, least in _CAUSES]
        ran = _ran(path, circumstances)
        worth = [one for one, least in found if one and one.share * (1 if one.cause in _FROM_OUTSIDE else ran) >= least]
        if any(verdict.cause in _FROM_OUTSIDE for verdict in worth):
            worth = [verdict for verdict in worth if verdict.cause != _TINY]
        return sorted(worth, key=lambda verdict: -verdict.share)


def _core(path: CriticalPath, around: Circumstances) -> Bottleneck | None:
    """Ready to go on, without a core to do so."""
    last = around.ranks[path.rank]
    if not last.virtual:  # its process may run ahead of the GPU, and lose nothing by waiting
        return None
    share = path.queued_s / path.step_s
    here = [info for info in around.ranks if info.host == last.host]
    cores = len({core for info in here for core in info.cores})
    ranks, threads, workers = len(here), last.threads, around.settings.num_workers
    waits = f"{_percent(share)} of a step is waiting for one"
    has = f"{cores} core{'s' * (cores > 1)}"
    if 0 < cores < ranks and ranks == len(around.ranks):
        said = f"{ranks} ranks share {has}: {waits}. Fewer ranks would each be faster: %hvd_start {cores}."
        return Bottleneck("too many ranks", share, said)
    if 0 < cores < ranks * threads:
        most = max(1, cores // ranks)
        said = f"{_count(ranks, 'rank')} with {_count(threads, 'thread')} each on {has}: {waits}."
        said += f" Start with --threads {most}."
        return Bottleneck("too many ranks", share, said)
    if 0 < cores < ranks * (threads + workers):
        said = f"{_count(ranks, 'rank')} and {_count(ranks * workers, 'worker')} on {has}: {waits}."
        return Bottleneck("too many workers", share, said, around.allowed(num_workers=workers // 2))
    alone = path.always and path.excess(queued_s) >= _MAINLY * path.queued_s
    who = f"Rank {path.rank} waits" if alone else "Ranks wait"
    return Bottleneck(
        "no core",
        share,
        f"{who} for a core in {_percent(share)} of a step: other programs use it. top, in a terminal, shows which.",
    )


def _data(path: CriticalPath, around: Circumstances) -> Bottleneck:
    """Waiting for the next micro-batch."""
    data_s = path.part(DATA)
    share = data_s / path.step_s
    alone = path.always and path.excess_of(DATA) >= _MAINLY * data_s
    all_wait = f"Waiting for data takes {_percent(share)} of a step"
    said = f"Rank {path.rank} waits for data {_percent(share)} of a step, and the others for it" if alone else all_wait
    workers = around.settings.num_workers
    changes = around.allowed(num_workers=2 * workers or 2)
    if workers:
        return Bottleneck(
            "data", share, f"{said}: {workers} worker{'s do' if workers > 1 else ' does'} not keep up.", changes
        )
    computes = path.mean(lambda times: times.data_cpu_s) >= _MAINLY * data_s
    why = "making samples takes that much computing" if computes else "reading samples is slow"
    helps = "; workers do it beside training" if changes else ""
    return Bottleneck("data", share, f"{said}: {why}{helps}.", changes)


# A core of a virtual machine may be slower than its neighbour: the same loop took 14.7 ms on one and 19.5 ms on the
# other for seconds, with nothing else running and no stolen time told (two cores of a server, 26 November 2026).
_SLOWER_CORE = 0.30


def _uneven(path: CriticalPath, around: Circumstances) -> Bottleneck | None:
    """Return one rank, or one after the other, computes longer than the rest."""
    share = path.computing_excess_s / path.step_s
    if share < _SLOWER_CORE and around.ranks[path.rank].virtual:
        return None
    if not path.always:
        return Bottleneck(
            "uneven steps",
            share,
            f"Ranks take turns in being slow: {_percent(share)} of a step is waiting for the one that has most to do. "
            "Are samples of different sizes? A sampler that puts like ones together helps.",
        )
    part = max((part for part in PARTS if part not in (DATA, REDUCTION)), key=path.excess_of)
    usual_s = path.part(part) - path.excess_of(part)
    times = f" {path.part(part) / usual_s:.1f} times" if usual_s > 0 else ""
    since = path.slow_since() if share > 0 else 0
    return Bottleneck(
        _SLOW,
        share,
        f"Rank {path.rank} is slow{f' since step {since}' if since else ''}: its {part} takes{times} as long as on the "
        f"others, which wait for it {_percent(share)} of a step.",
    )


def _reduction(path: CriticalPath, around: Circumstances) -> Bottleneck | None:
    """Gradients on their way while nothing else is done: the last rank waits for no other."""
    if len(around.ranks) < 2:
        return None
    share = path.part(REDUCTION) / path.step_s
    said = f"Averaging gradients, as far as backward does not hide it, takes {_percent(share)} of a step"
    changes, helps = _half_as_often(around, "averages")
    smaller = around.allowed(compression="fp16")
    if smaller and len({info.host for info in around.ranks}) > 1 and around.settings.compression == "none":
        changes, helps = smaller, "; ".join(filter(None, ("compression=fp16 sends half of fp32's bytes", helps)))
    return Bottleneck("reduction", share, f"{said}: {helps}." if helps else f"{said}.", changes)


def _update(path: CriticalPath, around: Circumstances) -> Bottleneck:
    """Clipping and the optimizer."""
    share, settings = path.part(UPDATE) / path.step_s, around.settings
    said = f"The update takes {_percent(share)} of a step"
    fused = around.allowed(optimizer_impl="fused")
    if fused and settings.optimizer not in ("own", "muon") and settings.optimizer_impl != "fused":
        return Bottleneck("update", share, f"{said}: optimizer_impl=fused does it in one pass.", fused)
    changes, helps = _half_as_often(around, "updates")
    return Bottleneck("update", share, f"{said}: {helps}." if helps else f"{said}.", changes)


def _ran(path: CriticalPath, around: Circumstances) -> float:
    """Return the share of a step in which the last rank did not wait for a core, as far as that takes any time.

    Every part of the step has its share of that waiting, a collective too: only the rest of it is the part's own.
    """
    return 1 - path.queued_s / path.step_s if around.ranks[path.rank].virtual else 1.0


def _half_as_often(around: Circumstances, does: str) -> tuple[Changes, str]:
    """More micro-batches in a step, and what that does, in words; nothing where there are too few samples."""
    count = 2 * around.settings.accumulation_steps
    changes = around.allowed(accumulation_steps=count)
    helps = f"accumulation_steps={count} {does} half as often, with a global batch twice as large"
    return changes, helps if changes else ""


def _tiny(path: CriticalPath, around: Circumstances) -> Bottleneck | None:
    """So little work in an operator that calling it is what takes time."""
    if not path.operators:
        return None
    each_s = _ran(path, around) * path.part(FORWARD, BACKWARD) / path.operators
    if each_s > (_CALL_S if path.exact else _TENSOR_S):
        return None
    return Bottleneck(
        _TINY,
        path.part(FORWARD, BACKWARD, TOOLKIT) / path.step_s,
        f"Operators take {1e6 * each_s:.0f} µs each, about what calling one costs: micro-batches {_LARGER} times as "
        "large take little longer.",
        around.allowed(batch_size=_LARGER * around.settings.batch_size),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_Judge = Callable[[CriticalPath, Circumstances], Bottleneck | None]
# What each looks for, and the least share of a step that is worth a word.
_CAUSES: tuple[tuple[_Judge, float], ...] = (
    (_core, STARVED_SHARE),
    (_data, 0.10),
    (_uneven, 0.15),
    (_reduction, 0.20),
    (_update, 0.15),
    (_tiny, 0.30),
)
