"""The verdict on time: of what the last rank of each step lost, the largest is named, with what would help."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpumem_nb.engine.step.step_clock import CoreQueue
from gpumem_nb.kernel.history import Event
from gpumem_nb.report.bottleneck import FEWEST_STEPS, Bottleneck, Circumstances
from gpumem_nb.report.speed import WARM_UP_STEPS
from gpumem_nb.report.tables import marked
from gpumem_nb.shared.messages import Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import BACKWARD, DATA, FORWARD, REDUCTION, UPDATE, StepTimes
from gpumem_nb.shared.workload import DataInfo, WorkloadInfo
from gpumem_nb.ui.controls import BottleneckLine
from tests.ledgers import info, ledger, sample

HEALTHY_S = {DATA: 0.001, FORWARD: 0.03, BACKWARD: 0.06, REDUCTION: 0.005, UPDATE: 0.004}
LOADED = WorkloadInfo("net", 1, 4, 10_000, 0)

Times = Callable[[int, int], StepTimes]


def first(made: Sequence[Sequence[Sample]], since_step: int, around: Circumstances) -> Bottleneck | None:
    """What most of a step is lost to."""
    return next(iter(Bottleneck.all_of(made, since_step, around)), None)


def step(extra_s: dict[str, float] | None = None, data_cpu_s: float = 0.0, queued_s: float | None = 0.0) -> StepTimes:
    """A healthy step, and what some parts take longer."""
    seconds = {part: value + (extra_s or {}).get(part, 0.0) for part, value in HEALTHY_S.items()}
    return StepTimes.of(seconds, 0.0, data_cpu_s, queued_s)


def rows(times: Times, ranks: int = 2, steps: int = 40, operators: int = 500) -> list[list[Sample]]:
    """Of so many steps, in which ranks wait for each other in the reduction."""
    recorded = dataclasses.replace(ledger(), operators=operators)
    made: list[list[Sample]] = [[] for _ in range(ranks)]
    for number in range(1, steps + 1):
        of_ranks = [times(rank, number) for rank in range(ranks)]
        works = [one.total_s - one[REDUCTION] for one in of_ranks]
        for rank, one in enumerate(of_ranks):
            waited = list(one.seconds)
            waited[4] += max(works) - works[rank]
            kept = dataclasses.replace(one, seconds=tuple(waited))
            made[rank].append(sample(number, rank, recorded, times=kept))
    return made


def verdict(times: Times, settings: Settings | None = None, workload: WorkloadInfo | None = LOADED, **of: Any) -> Any:
    """Of these."""
    made = rows(times, **of)
    ranks = [info(rank, cores=(rank,)) for rank in range(len(made))]
    return first(made, 0, Circumstances(settings or Settings(), ranks, workload))


def alike(**extra_s: float) -> Times:
    """On all ranks."""
    return lambda rank, number: step(extra_s)


def on_rank_1(**extra_s: float) -> Times:
    """On one rank alone."""
    return lambda rank, number: step(extra_s if rank == 1 else None)


def test_nothing_is_said_of_a_healthy_step() -> None:
    noise = random.Random(3)
    assert verdict(lambda rank, number: step({FORWARD: noise.uniform(0, 0.01), DATA: noise.uniform(0, 0.003)})) is None


def test_nothing_is_said_of_a_few_steps_or_of_a_hiccup() -> None:
    assert verdict(alike(data=0.1), steps=FEWEST_STEPS + WARM_UP_STEPS - 1) is None
    assert verdict(alike(data=0.1), steps=FEWEST_STEPS + WARM_UP_STEPS)
    assert verdict(lambda rank, number: step({DATA: 2.0 if number == 30 else 0.0})) is None


@pytest.mark.parametrize(
    ("times", "cause", "words", "changes"),
    [
        (alike(data=0.05), "data", "Waiting for data takes 34 % of a step: reading samples", {"num_workers": 2}),
        (lambda r, n: step({DATA: 0.05}, data_cpu_s=0.05), "data", "making samples", {"num_workers": 2}),
        (on_rank_1(data=0.05), "data", "Rank 1 waits for data", {"num_workers": 2}),
        (on_rank_1(forward=0.06), "slow rank", "Rank 1 is slow: its forward takes 3.0 times", {}),
        (lambda r, n: step({BACKWARD: 0.06 * (n % 2 == r)}), "uneven steps", "take turns", {}),
        (alike(reduction=0.05), "reduction", "global batch twice", {"accumulation_steps": 2}),
        (alike(update=0.05), "update", "fused does it", {"optimizer_impl": "fused"}),
        (lambda r, n: step({FORWARD: 0.06}, queued_s=0.05), "no core", "Ranks wait for a core in", {}),
        (lambda r, n: step({FORWARD: 0.06 * r}, queued_s=0.05 * r), "no core", "Rank 1 waits for a core in", {}),
    ],
)
def test_the_largest_loss_is_named(times: Times, cause: str, words: str, changes: dict[str, Any]) -> None:
    found = verdict(times)
    assert (found.cause, found.changes) == (cause, changes)
    assert words in found.sentence
    assert str(found).endswith(f"Try %hvd_set {found.typed}" if changes else ".")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (alike(reduction=0.05), "Averaging gradients, as far as backward does not hide it, takes 37 % of a step."),
        (alike(update=0.05), "The update takes 36 % of a step."),
    ],
)
def test_no_larger_global_batch_is_advised_than_there_are_samples(times: Times, said: str) -> None:
    few = dataclasses.replace(LOADED, dataset_len=64)
    found = verdict(times, Settings(optimizer_impl="fused"), few)
    assert (found.sentence, found.changes) == (said, {})
    assert "accumulation_steps=2" in verdict(times, Settings(optimizer_impl="fused")).sentence


def test_muons_products_of_matrices_are_not_said_to_be_done_in_one_pass() -> None:
    found = verdict(alike(update=0.05), Settings(optimizer="muon"), dataclasses.replace(LOADED, matrices=True))
    assert found.changes == {"accumulation_steps": 2}
    assert "fused" not in found.sentence


def test_what_a_busy_machine_does_to_single_steps_is_not_taken_for_uneven_samples() -> None:
    dice = random.Random(0)
    assert verdict(lambda rank, number: step({BACKWARD: 0.06 * (dice.random() < 0.3)})) is None
    found = verdict(lambda rank, number: step({BACKWARD: dice.uniform(0, 0.3)}))
    assert found.cause == "uneven steps"


@pytest.mark.parametrize("virtual", [False, True])
def test_what_a_slower_core_costs_is_no_slow_rank_on_a_virtual_gpu(virtual: bool) -> None:
    ranks = [dataclasses.replace(info(rank, cores=(rank,)), virtual=virtual) for rank in range(2)]
    found = first(rows(on_rank_1(forward=0.03)), 0, Circumstances(Settings(), ranks, LOADED))
    assert (found and found.cause) == (None if virtual else "slow rank")


def test_operators_that_take_no_longer_than_calling_them_are_tiny() -> None:
    assert verdict(alike(), operators=1_400) is None
    found = verdict(alike(), operators=2_000)
    assert (found.cause, found.changes) == ("tiny operators", {"batch_size": 128})
    assert "45 µs each" in found.sentence, "(30 + 60 ms) ÷ 2,000"


def test_a_slow_rank_is_not_explained_by_what_its_operators_take() -> None:
    assert verdict(on_rank_1(forward=0.06), operators=20_000).cause == "slow rank"


def test_more_ranks_than_cores_are_told_from_other_programs() -> None:
    ranks = [info(rank, cores=(0, 1)) for rank in range(4)]
    around = Circumstances(Settings(), ranks, LOADED)
    found = first(rows(lambda r, n: step(queued_s=0.04), ranks=4), 0, around)
    assert found
    assert found.sentence.startswith("4 ranks share 2 cores: 40 % of a step is waiting for one.")
    assert "%hvd_start 2" in found.sentence


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        ([info(0, cores=(0, 1), threads=4)], Settings(), "1 rank with 4 threads each on 2 cores: 40 %"),
        ([info(0, cores=(0, 1))], Settings(num_workers=4), "1 rank and 4 workers on 2 cores: 40 %"),
        ([info(0, cores=(0,)), info(1, host="b", cores=(0,))], Settings(), "other programs use it"),
    ],
)
def test_who_takes_the_cores_is_told(ranks: Any, settings: Settings, said: str) -> None:
    made = rows(lambda r, n: step(queued_s=0.04), ranks=len(ranks), operators=5_000)
    found = first(made, 0, Circumstances(settings, ranks, LOADED))
    assert found
    assert said in found.sentence, "and not that operators are tiny"


def test_waiting_for_a_core_is_not_taken_for_slow_collectives() -> None:
    def causes(reduction_s: float, queued_s: float) -> list[str]:
        made = rows(lambda rank, number: step({REDUCTION: reduction_s}, queued_s=queued_s))
        around = Circumstances(Settings(), [info(rank, cores=(rank,)) for rank in range(2)], LOADED)
        return [one.cause for one in Bottleneck.all_of(made, 0, around)]

    assert causes(0.03, 0.0) == ["reduction"]
    assert causes(0.03, 0.05) == ["no core"], "27 % of a step, of which 62 % ran"
    assert causes(0.2, 0.1) == ["reduction", "no core"]


def test_a_process_that_waits_beside_a_gpu_is_not_blamed() -> None:
    ranks = [info(rank, virtual=False, cores=(0,)) for rank in range(2)]
    assert first(rows(lambda r, n: step(queued_s=0.04)), 0, Circumstances(Settings(), ranks, LOADED)) is None


def test_compression_is_for_networks_and_no_reduction_for_one_rank() -> None:
    ranks = [info(0, cores=(0,)), info(1, host="b", cores=(0,))]
    around = Circumstances(Settings(), ranks, LOADED)
    found = first(rows(alike(reduction=0.05)), 0, around)
    assert found
    assert found.changes == {"compression": "fp16"}
    assert verdict(alike(reduction=0.05), ranks=1) is None


def test_operators_are_counted_under_the_settings_in_use() -> None:
    made = rows(alike(), operators=20_000)
    later = [[dataclasses.replace(one, ledger=None, settings_id=2, step=one.step + 40) for one in row] for row in made]
    both = [before + after for before, after in zip(made, later, strict=True)]
    ranks = [info(rank, cores=(rank,)) for rank in range(2)]
    assert first(both, 0, Circumstances(Settings(), ranks, LOADED)) is None


def test_a_system_that_tells_no_queues_blames_none() -> None:
    assert verdict(lambda rank, number: step(queued_s=None)) is None


def test_since_when_a_rank_is_slow() -> None:
    found = verdict(lambda rank, number: step({FORWARD: 0.06 * (rank == 1 and number > 60)}), steps=90)
    assert "Rank 1 is slow since step 61:" in found.sentence


def test_a_rank_that_a_cell_has_made_slow_is_slow_since_that_cell() -> None:
    made = rows(lambda rank, number: step({FORWARD: 0.06 * (rank == 1 and number > 30)}), steps=60)
    found = first(made, 30, Circumstances(Settings(), [info(rank, cores=(rank,)) for rank in range(2)], LOADED))
    assert found
    assert "Rank 1 is slow since step 31:" in found.sentence


def test_what_cannot_be_changed_is_not_offered() -> None:
    fixed = dataclasses.replace(LOADED, data=DataInfo(iterable=True))
    assert verdict(alike(data=0.05), workload=fixed).changes == {}
    settings = Settings(optimizer_impl="fused", accumulation_steps=2)
    assert verdict(alike(update=0.05), settings).changes == {"accumulation_steps": 4}
    assert verdict(alike(data=0.05), Settings(num_workers=200)).changes == {}, "256 are the most"
    small = dataclasses.replace(LOADED, dataset_len=100)
    assert verdict(alike(reduction=0.05), workload=small).changes == {}, "128 samples are more than 100"
    found = verdict(alike(data=0.05), Settings(num_workers=1))
    assert "1 worker does not keep up" in found.sentence
    assert found.changes == {"num_workers": 2}


def test_one_rank_alone_can_be_judged() -> None:
    assert verdict(alike(data=0.05), ranks=1).cause == "data"
    assert verdict(alike(), ranks=1) is None


def test_a_queue_for_cores_only_grows() -> None:
    queue = CoreQueue()
    first = queue.waited_s()
    assert first is None or 0 <= first <= (queue.waited_s() or 0)


class Judged:
    """A session, as far as the line knows it."""

    def __init__(self) -> None:
        self.history, self.settings, self.asked = self, Settings(), list[dict[str, Any]]()
        self.now = 11.0
        self.version, self.found, self.autotuned = 0, verdict(alike(data=0.05)), None

    def now_s(self) -> float:
        return self.now

    def verdict(self) -> Bottleneck | None:
        return self.found  # type: ignore[no-any-return]

    def set(self, **knobs: Any) -> None:
        self.asked.append(knobs)


def test_the_panels_line_says_it_and_its_button_does_it() -> None:
    session: Any = Judged()
    line = BottleneckLine(session, lambda act: act())
    sentence, button = line.widget.children
    assert (sentence.html, button.layout.display) == ("", "none")
    line.follow()
    assert "Waiting for data" in sentence.html
    assert (button.description, button.layout.display) == ("Apply num_workers=2", "")
    button.click()
    assert session.asked == [{"num_workers": 2}]
    waiting: list[Any] = []
    later = BottleneckLine(session, waiting.append)
    later.follow()
    later.widget.children[1].click()
    session.found, session.settings = None, Settings(num_workers=2)
    later.follow()
    waiting.pop()()
    assert session.asked == [{"num_workers": 2}] * 2, "what the button said when it was pressed"
    line.follow()
    assert (sentence.html, button.layout.display) == ("", "none"), "at once after a flip"
    session.found = verdict(alike(data=0.05))
    session.autotuned, session.settings = Event(10.0, 5, "note", "Autotune set bucket_mib=1."), Settings(bucket_mib=1)
    line.follow()
    assert sentence.html == f"<p>{marked('Autotune set bucket_mib=1.')}</p>"
    session.now, session.settings = 100.0, Settings()
    line.follow()
    assert "Waiting for data" in sentence.html, "when it was there to be read for long"
