"""The doctor's rules on evidence made by hand: each speaks above its threshold, is silent below, and has its page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.planning.doctor.evidence import Evidence, OnRank, still_grows
from gpumem_nb.planning.doctor.finding import (
    MEMORY,
    NOTHING,
    STOPS,
    TIME,
    WRONG,
    Diagnosis,
)
from gpumem_nb.planning.doctor.rules import findings
from gpumem_nb.planning.doctor.rules.time import CAUSES, larger
from gpumem_nb.planning.instead import instead_of, lighter
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from gpumem_nb.report.bottleneck import Bottleneck
from gpumem_nb.report.configurations import Tried
from gpumem_nb.report.instead import Fit
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.messages import DeviceUse, Failure, Leak, Sample
from gpumem_nb.shared.questions import InputFacts, ModelFacts, TensorTotal
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Handles, WorkloadInfo
from tests.ledgers import MIB, info, reading, sample

ROOT = Path(__file__).parents[2]
LIMIT = 1000 * MIB
DEFAULT = Settings()
LOADED = WorkloadInfo("net", 1, 4, 100_000, blocks=4)
LEAK = Leak(
    1, 50, 10 * MIB, 400 * MIB, MIB, (4, 4), "torch.float32", "a.py:3 in f", "kept", "the variable `kept`", "Fix."
)


def prediction(settings: Settings = DEFAULT, **of: Any) -> Prediction:
    """Of a step that needs 100 MiB of 1000, activations most of it, and does 100 samples/s."""
    live = of.pop("live", 100)
    values: dict[str, Any] = {
        **{"settings": settings, "live_peak_bytes": live * MIB, "reserved_peak_bytes": of.pop("reserved", live) * MIB},
        **{"device_bytes": None, "low_bytes": live * MIB, "high_bytes": live * MIB, "limit_bytes": LIMIT},
        **{"verdict": FITS, "phase": "backward", "module": "", "basis": "", "seconds": 0.1, "step_s": 0.1},
        **{"categories": {c.PARAMETERS: live * MIB // 4, of.pop("most", c.ACTIVATIONS): live * MIB * 3 // 4}},
        **{"samples_per_s": 100.0, "low_samples_per_s": 95.0, "high_samples_per_s": 105.0},
    }
    return Prediction(**values | of)


def rank(number: int = 0, peak: int = 100, **of: Any) -> OnRank:
    """One that did 30 steps with this peak in MiB."""
    steps = of.pop("steps", {})
    samples = tuple(
        sample(step, number, live_peak_bytes=peak * MIB, reserved_peak_bytes=peak * MIB, learning_rate=1e-3, **steps)
        for step in range(1, 31)
    )
    values: dict[str, Any] = {"reading": reading(peak * MIB, LIMIT), "facts": ModelFacts()}
    return OnRank(info(number), of.pop("samples", samples), **values | of)


def tried(settings: Settings = DEFAULT, settings_id: int = 1, steps: int = 30) -> Tried:
    """A configuration of 100 samples/s."""
    one = Tried(settings_id, "net", settings, steps=steps, outcome="ok")
    one.throughputs.extend([100.0] * 10)
    return one


def evidence(**of: Any) -> Evidence:
    """Of a healthy session, but for what is given."""
    settings = of.get("settings", Settings())
    values: dict[str, Any] = {
        **{"settings": settings, "workload": LOADED, "ranks": (rank(0), rank(1)), "tried": (tried(settings),)},
        **{"now": tried(settings), "needs": prediction(settings), "steps": 30},
    }
    return Evidence(**values | of)


def causes(**of: Any) -> list[str]:
    return [one.cause for one in findings(evidence(**of))]


def test_a_healthy_session_has_nothing() -> None:
    assert causes() == []
    assert str(Diagnosis(())) == NOTHING
    assert causes(needs=None) == [], "nor one of which nothing could be predicted"
    assert causes(needs=dataclasses.replace(prediction(live=999), limit_bytes=None, verdict="n/a")) == []


@pytest.mark.parametrize(
    ("per_step", "steps", "goes_on"), [(10, 30, True), (0, 30, False), (0, 15, True), (4, 30, False)]
)
def test_a_leak_is_over_once_memory_stays_as_it_is(per_step: int, steps: int, goes_on: bool) -> None:
    of_rank = [
        dataclasses.replace(rank().samples[0], step=LEAK.step + number, live_bytes=number * per_step * MIB)
        for number in range(1, steps + 1)
    ]
    assert still_grows([LEAK], [[], of_rank]) is goes_on


def test_what_a_flip_frees_does_not_end_a_leak() -> None:
    def grown(steps: range, settings_id: int, base: int) -> list[Sample]:
        first = rank().samples[0]
        return [
            dataclasses.replace(first, step=LEAK.step + at, settings_id=settings_id, live_bytes=(base + 10 * at) * MIB)
            for at in steps
        ]

    assert still_grows([LEAK], [[], [*grown(range(1, 16), 1, 500), *grown(range(16, 31), 2, 100)]])


def frozen(mib: int) -> OnRank:
    return rank(0, facts=ModelFacts(state_of_frozen=TensorTotal(mib * MIB, 2, "head.weight")))


def wide(mib: int) -> OnRank:
    return rank(0, facts=ModelFacts(wide_weights=TensorTotal(mib * MIB, 2, "head.weight")))


def typed(mib: int) -> OnRank:
    return rank(0, facts=ModelFacts(inputs=(InputFacts((4, 4), "float64", 2 * mib * MIB, "float32", mib * MIB),)))


def used(gb: float, own: int = 0) -> OnRank:
    use = DeviceUse(total_bytes=40 * 10**9, other_bytes=int(gb * 10**9), own_bytes=own)
    return OnRank(info(0, virtual=False, device="cuda:0"), rank().samples, reading(limit=LIMIT), use, ModelFacts())


def skipping(count: int, scale: float = 1024.0) -> OnRank:
    steps = rank().samples
    last = [dataclasses.replace(one, loss_scale=scale, skipped=at < count) for at, one in enumerate(steps[-16:])]
    return OnRank(info(0), (*steps[:-16], *last))


FP16 = Settings(precision="fp16")
SMALL = Settings(batch_size=4)
MORE = Settings(batch_size=16)


@pytest.mark.parametrize(
    ("cause", "above", "below"),
    [
        ("barely fits", {"needs": prediction(verdict=DOES_NOT_FIT)}, {"needs": prediction(live=840)}),
        ("barely fits", {"needs": prediction(verdict=TIGHT)}, {"needs": prediction()}),
        ("activations dominate", {"needs": prediction(live=860)}, {"needs": prediction(live=840)}),
        ("temporaries dominate", {"needs": prediction(live=860, most=c.TEMPORARIES)}, {}),
        ("optimizer state dominates", {"needs": prediction(live=860, most=c.OPTIMIZER_STATE)}, {}),
        ("communication buffers dominate", {"needs": prediction(live=860, most=c.COMMUNICATION)}, {}),
        ("memory inside operators", {"needs": prediction(live=860, most=c.INSIDE_OPERATORS)}, {}),
        ("fragmentation", {"needs": prediction(live=100, reserved=250)}, {"needs": prediction(live=100, reserved=190)}),
        (
            "free memory in the cache",
            {"ranks": (rank(0, reading=dataclasses.replace(reading(limit=LIMIT), reserved_bytes=300 * MIB)),)},
            {"ranks": (rank(0, reading=dataclasses.replace(reading(limit=LIMIT), reserved_bytes=190 * MIB)),)},
        ),
        ("uneven memory", {"ranks": (rank(0), rank(1, 160))}, {"ranks": (rank(0), rank(1, 120))}),
        ("state of frozen weights", {"ranks": (frozen(3),)}, {"ranks": (frozen(1),)}),
        ("weights in float64", {"ranks": (wide(5),)}, {"ranks": (wide(3),)}),
        ("inputs in needless types", {"ranks": (typed(3),)}, {"ranks": (typed(1),)}),
        ("other processes on the device", {"ranks": (used(3),)}, {"ranks": (used(1),)}),
        ("leak", {"leaks": ((LEAK,),)}, {"leaks": ()}),
        (
            "fp16 scale collapses",
            {"settings": FP16, "ranks": (skipping(8),)},
            {"settings": FP16, "ranks": (skipping(7),)},
        ),
        ("fp16 scale collapses", {"settings": FP16, "ranks": (skipping(1, 0.5),)}, {"ranks": (skipping(8),)}),
        (
            "learning rate unscaled",
            {"tried": (tried(SMALL, 0), tried(MORE)), "settings": MORE},
            {"tried": (tried(Settings(batch_size=8), 0), tried(MORE)), "settings": MORE},
        ),
        (
            "a small batch",
            {"larger": prediction(Settings(batch_size=128), samples_per_s=180.0, high_samples_per_s=190.0)},
            {"larger": prediction(Settings(batch_size=128), samples_per_s=174.0, high_samples_per_s=190.0)},
        ),
        *((cause, {"verdicts": (Bottleneck(name, 0.4, "Lost."),)}, {}) for name, cause in CAUSES.items()),
    ],
)
def test_each_rule_speaks_above_its_threshold_and_is_silent_below(
    cause: str, above: dict[str, Any], below: dict[str, Any]
) -> None:
    assert causes(**above) == [cause]
    assert causes(**below) == []


def failed(kind: str, **of: Any) -> Rescue:
    failure = Failure(1, kind, "forward", "It is <so>.", module="head", asked_bytes=MIB, free_bytes=0)
    return Rescue(failure, 7, Settings(batch_size=64), did="training went back", **of)


def ran_out(*tried: Fit) -> Rescue:
    """A step that ran out of memory, and what was tried out in its place."""
    rescue = failed("oom")
    rescue.instead = instead_of(rescue.settings, 2, tried, on_the_step=True)
    return rescue


@pytest.mark.parametrize(
    ("kind", "cause"), [("oom", "does not fit"), ("error", "a step fails"), ("diverged", "ranks differ")]
)
def test_a_step_that_was_discarded_comes_first(kind: str, cause: str) -> None:
    assert causes(rescue=failed(kind), leaks=((LEAK,),), steps=6) == [cause, "leak"]
    assert causes(rescue=failed("interrupted"), steps=6) == []


def test_a_step_that_failed_is_no_finding_once_it_was_done_after_all() -> None:
    assert causes(rescue=failed("error"), steps=7) == []
    assert causes(rescue=failed("diverged"), steps=7) == ["ranks differ"], "until %hvd_sync"


def test_of_memory_that_ran_out_what_was_tried_out_on_the_ranks_is_offered_unless_it_is_in_use() -> None:
    fits = Fit(Settings(batch_size=64, checkpointing="blocks"), MIB)
    [found] = findings(evidence(rescue=ran_out(Fit(Settings(), None), fits)))
    smaller = {"batch_size": 32, "accumulation_steps": 2, "checkpointing": "blocks"}
    less = {name: value for name, value in smaller.items() if value != getattr(Settings(), name)}
    assert found.candidates == ({"batch_size": 64, "checkpointing": "blocks"}, less)
    assert found.do.startswith("Tried out on the ranks, this would have fit: checkpointing=blocks batch_size=64 (live")
    assert "because backward recomputes activations that forward would keep." in found.do
    assert causes(rescue=failed("oom", goes_on=Settings())) == [], "training goes on with what fits"


def test_a_step_that_runs_out_on_trial_is_not_said_to_leave_room_and_smaller_micro_batches_are_tried() -> None:
    blind = prediction(live=1200, verdict=DOES_NOT_FIT, categories={c.OTHER: 1200 * MIB}, lower_bound=True)
    [found] = findings(evidence(needs=blind))
    assert "predicted to run out of memory" in found.sentence
    assert "most of it" not in found.sentence
    assert found.do == "Use a smaller model or a larger limit.", "nothing was tried"
    half = DEFAULT.replace(batch_size=16, accumulation_steps=2)
    assert half in lighter(DEFAULT, "backward", Handles(4), blind.categories)
    instead = instead_of(DEFAULT, 2, [Fit(half, 100 * MIB)], blind)
    [found] = findings(evidence(needs=blind, instead=instead))
    assert found.candidates == ({"batch_size": 16, "accumulation_steps": 2},)
    assert found.do.startswith("Predicted, this would fit: batch_size=16 accumulation_steps=2 (live peak 100.0 MiB)")


def test_what_a_cell_holds_alive_on_one_rank_is_not_free_memory() -> None:
    held = dataclasses.replace(reading(400 * MIB, LIMIT), reserved_bytes=410 * MIB, live_bytes=400 * MIB)
    assert causes(ranks=(rank(0), rank(1, reading=held))) == []


def test_whole_numbers_of_one_micro_batch_do_not_speak_for_all() -> None:
    def said(of: str, enough: str) -> str:
        facts = ModelFacts(inputs=(InputFacts((4, 4), of, 8 * MIB, enough, 7 * MIB),))
        [found] = findings(evidence(ranks=(rank(0, facts=facts),)))
        return found.do

    assert "all others are within uint8" in said("int64", "uint8")
    assert "within" not in said("float64", "float32")


def test_what_is_held_for_nothing_is_measured_by_the_predicted_peak_before_a_step_was_done() -> None:
    def before_a_step(one: OnRank, **of: Any) -> list[str]:
        return causes(ranks=(dataclasses.replace(one, samples=()),), now=None, **of)

    for one, cause in (
        (frozen, "state of frozen weights"),
        (wide, "weights in float64"),
        (typed, "inputs in needless types"),
    ):
        assert before_a_step(one(5)) == [cause]
        assert before_a_step(one(1)) == []
        assert before_a_step(one(5), needs=None) == [], "nobody knows whether it matters"


def test_the_worst_comes_first() -> None:
    found = findings(
        evidence(
            needs=prediction(live=960, verdict=TIGHT),
            leaks=((LEAK,),),
            ranks=(rank(0, facts=frozen(30).facts), rank(1, 200)),
            verdicts=(Bottleneck("data", 0.3, "Data."), Bottleneck("update", 0.5, "Update.")),
        )
    )
    assert [one.cause for one in found] == [
        *("barely fits", "leak", "uneven memory", "state of frozen weights"),
        *("a long update", "waiting for data"),
    ]
    assert [one.level for one in found] == [STOPS, WRONG, MEMORY, MEMORY, TIME, TIME]
    pieces = prediction(live=400, reserved=1100, verdict=DOES_NOT_FIT)
    assert causes(needs=pieces, rescue=failed("oom")) == ["does not fit", "fragmentation"]


def test_other_ranks_of_the_session_are_no_other_processes() -> None:
    both = [dataclasses.replace(used(20, own=19 * 10**9), info=info(number, device="cuda:0")) for number in range(2)]
    assert causes(ranks=tuple(both)) == []
    elsewhere = dataclasses.replace(both[1], info=info(1, device="cuda:1"))
    assert causes(ranks=(both[0], elsewhere)) == ["other processes on the device"]


def test_a_rate_that_somebody_set_is_theirs() -> None:
    grown = {"tried": (tried(SMALL, 0), tried(MORE)), "settings": MORE}
    assert causes(**grown, ranks=(rank(0, steps={"settings_id": 2}),)) == ["learning rate unscaled"]
    by_a_cell = dataclasses.replace(rank(0).samples[-1], learning_rate=4e-3)
    assert causes(**grown, ranks=(OnRank(info(0), (by_a_cell,)),)) == []
    other_rate = tried(SMALL.replace(learning_rate=2e-3), 0)
    assert causes(tried=(other_rate, tried(MORE)), settings=MORE) == [], "it was set with the batch"


def test_larger_micro_batches_keep_the_samples_of_a_step_where_they_can() -> None:
    assert larger(evidence()) == {"batch_size": 128}
    assert larger(evidence(settings=Settings(accumulation_steps=8))) == {"batch_size": 128, "accumulation_steps": 2}
    assert larger(evidence(settings=Settings(accumulation_steps=3))) == {"batch_size": 96, "accumulation_steps": 1}
    assert larger(evidence(needs=prediction(live=600))) == {}, "they would not fit"
    assert larger(evidence(now=tried(steps=4))) == {}, "nobody knows how fast it is now"
    waits = (Bottleneck("data", 0.2, "Waits."),)
    assert larger(evidence(verdicts=waits)) == {"batch_size": 128}, "steps on trial wait as well"
    by_workers = evidence(verdicts=waits, settings=Settings(num_workers=2))
    assert larger(by_workers) == {}, "steps on trial do not wait for workers"
    assert larger(evidence(workload=dataclasses.replace(LOADED, dataset_len=200))) == {}


def test_where_datasets_hold_most_what_can_be_smaller_is_offered() -> None:
    held = {c.OTHER: 600 * MIB, c.COMMUNICATION: 300 * MIB, c.PARAMETERS: 60 * MIB}
    needs = prediction(live=960, reserved=980, categories=held, high_bytes=1010 * MIB, verdict=TIGHT, sample="Long.")
    [found] = [one for one in findings(evidence(needs=needs)) if one.cause == "barely fits"]
    smaller = DEFAULT.replace(fusion_threshold_mib=4)
    assert smaller in lighter(DEFAULT, "backward", Handles(4), held)
    assert found.sentence.endswith(": Long."), "the sample for which it may run out is named"


def test_what_runs_is_not_said_to_barely_fit_by_small_steps_alone() -> None:
    needs = prediction(live=940, high_bytes=1080 * MIB, verdict=TIGHT, runs=True)
    assert "barely fits" not in causes(needs=needs)
    assert "barely fits" in causes(needs=dataclasses.replace(needs, measured=True))
    assert "barely fits" in causes(needs=dataclasses.replace(needs, runs=False))
    assert "barely fits" not in causes(needs=prediction(live=970)), "what all others say to fit, such as the tuner"
