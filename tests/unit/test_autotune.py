"""Autotune's turns, with chunks that are answered as a test wants; on real ranks: tests/cluster/test_autotune.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumem_nb.kernel.history import Entry, History
from gpumem_nb.kernel.policy import Policy
from gpumem_nb.kernel.training.autotune import Autotune
from gpumem_nb.kernel.training.state import TrainingState
from gpumem_nb.report.configurations import Tried
from gpumem_nb.shared.messages import Chunk, Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import WorkloadInfo
from tests.ledgers import sample


class Bench:
    """Sends what autotune sends, and answers with steps as fast as they are wanted."""

    def __init__(self, told: Callable[[Entry], None] = lambda entry: None) -> None:
        self.history = History(2, told)
        self.state = TrainingState(self.history)
        self.policy = Policy(autotune="on")
        self.sent: list[Chunk] = []
        self.autotune = Autotune(self.history, self.state, self, lambda: self.policy, self.over)  # type: ignore[arg-type]
        self.state.begin(WorkloadInfo("mine", 1, 3 * 2**20, dataset_len=None, blocks=0), Settings())

    def over(self) -> None:
        self.policy = self.policy.replace(autotune="off")

    def send_turn(self, settings: Settings, settings_id: int, steps: int) -> None:
        instead_of = self.state.settings.changed_from(settings)
        self.sent.append(Chunk(settings, settings_id, steps, instead_of=instead_of))

    def next(self, most: float = 100) -> Chunk:
        assert self.autotune.send(most)
        return self.sent[-1]

    def done(self, chunk: Chunk, rate: float = 10.0) -> None:
        taken = [
            sample(step, rank, samples_per_s=rate, settings_id=chunk.settings_id)
            for step in range(chunk.steps)
            for rank in (0, 1)
        ]
        assert not self.autotune.learn(chunk, taken, None)

    def until_a_try(self) -> Chunk:
        while not (chunk := self.next()).tried:
            self.done(chunk)
        return chunk


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_turn_goes_on_over_chunks_that_have_few_steps(bench: Bench) -> None:
    steps = 0
    while not (chunk := bench.next(1)).tried:
        bench.done(chunk)
        steps += chunk.steps
    assert steps >= 4


def test_what_ran_out_of_memory_is_tried_no_more(bench: Bench) -> None:
    chunk = bench.until_a_try()
    assert bench.autotune.learn(chunk, [], Failure(1, "oom", "forward", "no memory"))
    assert bench.next().settings != chunk.settings
    assert "is not possible" in bench.history.events[-1].text


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("error", "forward"),
        ("error", "data"),
        ("stall", "reduction"),
        ("interrupted", "backward"),
        ("oom", "evaluation"),
    ],
)
def test_any_other_failure_is_that_of_training_and_the_turn_is_taken_again(bench: Bench, kind: str, phase: str) -> None:
    chunk = bench.until_a_try()
    assert not bench.autotune.learn(chunk, [], Failure(1, kind, phase, "it failed"))
    again = bench.next()
    assert again.settings == chunk.settings
    assert again.settings_id != chunk.settings_id, "the ranks hold that for broken"


def test_a_failure_that_comes_when_it_is_off_is_no_failure_of_training_either(bench: Bench) -> None:
    chunk = bench.until_a_try()
    bench.policy = Policy()
    assert bench.autotune.learn(chunk, [], Failure(1, "error", "reduction", "too large for fp16"))
    bench.policy = Policy(autotune="on")
    numbers = {one.settings_id for one in bench.sent if one.tried}
    assert not bench.next().tried, "it begins anew"
    assert bench.until_a_try().settings_id not in numbers


def test_off_and_on_within_one_failing_step_sends_it_under_another_number(bench: Bench) -> None:
    chunk = bench.until_a_try()
    bench.policy = Policy()
    bench.policy = Policy(autotune="on")
    assert bench.autotune.learn(chunk, [], Failure(1, "error", "reduction", "too large for fp16"))
    assert bench.next().settings_id != chunk.settings_id


def test_a_chunk_that_comes_between_lets_the_turn_begin_anew(bench: Bench) -> None:
    chunk = bench.until_a_try()
    bench.done(Chunk(chunk.settings, chunk.settings_id, 3, instead_of=chunk.instead_of))
    before = bench.next().steps
    bench.done(Chunk(bench.state.settings, bench.state.settings_id, 2, traced=True))
    assert bench.next().steps > before


def test_other_settings_let_it_begin_anew_and_the_same_ones_do_not(bench: Bench) -> None:
    turn = bench.until_a_try().settings
    bench.state.adopt(bench.state.settings)
    bench.history.model_may_have_changed()
    assert bench.next().settings == turn
    bench.state.adopt(bench.state.settings.replace(batch_size=8))
    assert bench.next().settings == bench.state.settings


def test_it_ends_and_adopts_only_what_is_faster(bench: Bench) -> None:
    tried, base = len(bench.history.tried), bench.state.settings_id
    while bench.autotune.on:
        bench.done(bench.next())
    assert (len(bench.history.tried), bench.state.settings_id) == (tried, base), "no second row for the same"
    bench.policy = Policy(autotune="on")
    while bench.autotune.on:
        chunk = bench.next()
        bench.done(chunk, 12.0 if chunk.settings.bucket_mib == 1 else 10.0)
    assert bench.state.settings == Settings(bucket_mib=1)
    assert bench.history.autotuned
    assert bench.history.autotuned.text.startswith(
        "Autotune set bucket_mib=1: 24 samples/s instead of 20 (+20 to +20 %"
    )
    bench.history.mark("flip", "somebody sets something else")
    assert not bench.history.autotuned


@pytest.mark.parametrize("answered", [False, True])
def test_logs_are_told_what_trains_again_when_it_is_switched_off_half_way(answered: bool) -> None:
    told: list[int] = []
    bench = Bench(lambda entry: told.append(entry.what.settings_id) if isinstance(entry.what, Tried) else None)
    chunk = bench.until_a_try()
    assert told[-1] == chunk.settings_id
    bench.policy = Policy()
    if answered:
        bench.done(chunk)
    assert not bench.autotune.send(9)
    assert told[-1] == bench.state.settings_id
    count = len(told)
    assert not bench.autotune.send(9)
    assert len(told) == count
