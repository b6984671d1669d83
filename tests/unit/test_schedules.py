"""The learning rate by global batch and step: the same as torch's schedulers', whatever happens on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler, SequentialLR

from gpumem_nb.kernel import compatibility
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.knobs import CHANGES, KEEPS, KEEPS_TO_ROUNDING, KNOBS
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings, learning_rate
from gpumem_nb.shared.workload import WorkloadInfo
from tests.unit.test_learning_rates import SCHEDULERS, Bench, set_rates
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss

STEPS = 1000
PLAIN = WorkloadInfo("plain", 1, 4, dataset_len=10**6, blocks=0)
SCHEDULED = WorkloadInfo("scheduled", 1, 4, None, 0, own_optimizer="SGD", own_learning_rate=0.1, own_scheduler="StepLR")


def _after(warmup: int, schedule: Callable[[Optimizer], LRScheduler]) -> Callable[[Optimizer], LRScheduler]:
    return lambda own: SequentialLR(
        own, [LinearLR(own, 1 / (warmup + 1), total_iters=warmup), schedule(own)], milestones=[warmup]
    )


TORCHS: dict[str, tuple[dict[str, Any], Callable[[Optimizer], LRScheduler]]] = {
    "warm-up": ({"warmup_steps": 50}, lambda own: LinearLR(own, 1 / 51, total_iters=50)),
    "cosine": ({"lr_schedule": "cosine"}, lambda own: CosineAnnealingLR(own, STEPS)),
    "linear": ({"lr_schedule": "linear"}, lambda own: LinearLR(own, 1.0, 0.0, total_iters=STEPS)),
    "warm-up, then cosine": (
        {"lr_schedule": "cosine", "warmup_steps": 60},
        _after(60, lambda own: CosineAnnealingLR(own, STEPS - 60)),
    ),
    "warm-up, then linear": (
        {"lr_schedule": "linear", "warmup_steps": 1},
        _after(1, lambda own: LinearLR(own, 1.0, 0.0, total_iters=STEPS - 1)),
    ),
}


@pytest.mark.parametrize("kind", TORCHS)
def test_rates_equal_those_of_torchs_schedulers(kind: str) -> None:
    knobs, scheduler = TORCHS[kind]
    settings = Settings(learning_rate=0.37, schedule_steps=STEPS, **knobs)
    torchs = scheduler(optimizer := SGD(nn.Linear(1, 1).parameters(), lr=0.37))
    for done in range(STEPS + 1):
        assert abs(learning_rate(settings, done, 4) - optimizer.param_groups[0]["lr"]) < 1e-12
        optimizer.step()
        torchs.step()
    if settings.lr_schedule != "constant":
        assert learning_rate(settings, 10 * STEPS, 4) == 0


def test_without_schedule_warm_up_and_scaling_the_rate_is_the_knob_bit_for_bit() -> None:
    for rate in (0.1, 1e-3, 3e-4, 0.37):
        assert [learning_rate(Settings(learning_rate=rate), done, 3) for done in (0, 7, 10**9)] == [rate] * 3


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * 8**0.5)])
def test_the_rate_follows_the_global_batch(scaling: str, expected: float) -> None:
    settings = Settings(learning_rate=0.1, lr_scaling=scaling, reference_batch=64, batch_size=32, accumulation_steps=4)
    assert learning_rate(settings, 5, 4) == pytest.approx(expected, abs=1e-15)
    split = settings.replace(batch_size=16, accumulation_steps=8)
    assert learning_rate(split, 5, 4) == learning_rate(settings, 5, 4), "the global batch is the same"


def asked(before: Settings, **knobs: Any) -> Settings:
    settings = compatibility.asked(before, knobs, 2)
    compatibility.check(settings, PLAIN, 2)
    return settings


def test_the_reference_batch_is_that_of_the_moment_in_which_the_rate_or_its_scaling_was_set() -> None:
    first = Settings(batch_size=8, learning_rate=0.1)
    scaled = asked(first, lr_scaling="linear", batch_size=32)
    assert scaled.reference_batch == 16, "of the batch before: the one that the rate was chosen for"
    assert learning_rate(scaled, 0, 2) == pytest.approx(0.4)
    assert asked(scaled, batch_size=64).reference_batch == 16
    assert asked(scaled, learning_rate=0.3, batch_size=64).reference_batch == 128, "a new rate is meant for the new one"
    assert asked(scaled, learning_rate=0.3, reference_batch=256).reference_batch == 256
    assert asked(scaled, lr_scaling="sqrt").reference_batch == 16
    assert asked(scaled, reference_batch="none").reference_batch == 64, "of now"
    assert asked(scaled, lr_scaling="none").reference_batch is None
    assert asked(first, batch_size=32).reference_batch is None
    assert asked(first, reference_batch=256).reference_batch == 256
    assert asked(asked(first, reference_batch=256), lr_scaling="linear").reference_batch == 256


def test_a_workload_that_is_loaded_meanwhile_keeps_the_rate_with_its_batch_or_brings_both() -> None:
    scaled = asked(Settings(batch_size=8), lr_scaling="linear")
    assert compatibility.loaded(scaled, PLAIN, 2) == scaled
    optimizer = WorkloadInfo("own", 1, 4, None, 0, own_optimizer="SGD", own_learning_rate=0.5)
    brought = compatibility.loaded(scaled.replace(batch_size=32), optimizer, 2)
    assert (brought.learning_rate, brought.reference_batch) == (0.5, 64)
    own = compatibility.loaded(scaled.replace(warmup_steps=5), SCHEDULED, 2)
    compatibility.check(own, SCHEDULED, 2)
    assert (own.lr_schedule, own.warmup_steps, own.lr_scaling, own.reference_batch) == ("own", 0, "none", None)
    assert compatibility.loaded(own, PLAIN, 2).lr_schedule == "constant"


def test_a_file_of_an_earlier_version_goes_on_with_the_scheduler_that_it_had() -> None:
    saved = Settings(learning_rate=0.2).as_dict()
    assert compatibility.resumed(Settings(**saved), saved, SCHEDULED).lr_schedule == "constant", "somebody chose it"
    del saved["lr_schedule"]
    resumed = compatibility.resumed(Settings(**saved), saved, SCHEDULED)
    assert (resumed.lr_schedule, resumed.learning_rate) == ("own", 0.2)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"lr_schedule": "cosine"}, "needs a length: set schedule_steps"),
        ({"lr_schedule": "linear", "schedule_steps": 9, "warmup_steps": 9}, "warmup_steps up to 8"),
        ({"lr_schedule": "own"}, "plain brings no scheduler of its own. Use lr_schedule=constant, cosine or linear"),
        ({"warmup_steps": -1}, "whole number of at least 0"),
        ({"warmup_steps": 0.5}, "whole number of at least 0"),
        ({"schedule_steps": 0}, "whole number of at least 1, such as 1000, or none"),
        ({"lr_scaling": "cubic"}, "allowed: none, linear, sqrt"),
    ],
)
def test_what_cannot_be_used_is_refused(knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        asked(Settings(), **knobs)


@pytest.mark.parametrize("knobs", [{"warmup_steps": 5}, {"lr_scaling": "sqrt"}])
def test_what_an_own_scheduler_would_overrule_is_refused_beside_it(knobs: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="lr_schedule=own, which leaves the rate to the workload's scheduler"):
        compatibility.check(Settings(lr_schedule="own", **knobs), SCHEDULED, 2)


@pytest.mark.parametrize("kind", TORCHS)
def test_training_is_that_of_a_loop_with_torchs_scheduler_in_all_groups(kind: str) -> None:
    knobs, scheduler = TORCHS[kind]
    bench = Bench()
    bench.plain_scheduler = scheduler(bench.plain)
    ours = bench.train(30, schedule_steps=STEPS, **knobs) + bench.train(35, checkpointing="blocks")
    assert ours == pytest.approx(bench.train_plainly(65), abs=1e-12, rel=0)
    groups = [[group["lr"] for group in optimizer.param_groups] for optimizer in (bench.own, bench.plain)]
    assert groups[0] == pytest.approx(groups[1], abs=1e-12, rel=0)
    for mine, plain in zip(bench.model.parameters(), bench.plain_model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


def test_steps_that_are_undone_are_no_steps_of_the_schedule() -> None:
    quiet, disturbed = Bench(), Bench()
    for bench in (quiet, disturbed):
        bench.train(3, lr_schedule="cosine", schedule_steps=20, warmup_steps=2)
    disturbed.ask(learning_rate=0.5, batch_size=4)
    disturbed.ask(lr_schedule="linear", warmup_steps=7)
    assert disturbed.trainer.record() is not None
    disturbed.train(0, warmup_steps=0)
    disturbed.train(0, lr_schedule="constant")
    disturbed.train(0, lr_schedule="cosine", warmup_steps=2)
    assert disturbed.train(5) == quiet.train(5)
    assert [group["lr"] for group in disturbed.own.param_groups] == [group["lr"] for group in quiet.own.param_groups]


def test_steps_that_the_loss_scaler_skips_are_no_steps_of_the_schedule() -> None:
    bench = Bench()
    knobs: dict[str, Any] = {"precision": "fp16", "lr_schedule": "linear", "schedule_steps": 10}
    scaler = bench.trainer.live.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**22})  # so high that gradients overflow
    reply = bench.trainer.run(Chunk(bench.settings.replace(**knobs), 5, 12))
    samples = reply.samples
    first = next(place for place, sample in enumerate(samples) if not sample.skipped)
    assert 2 < first < 10, "in which gradients do not overflow any more"
    assert [sample.skipped for sample in samples] == [True] * first + [False] * (12 - first)
    assert [sample.loss_scale for sample in samples] == [2.0 ** (22 - min(step, first)) for step in range(12)]
    rates = [sample.learning_rate for sample in samples]
    assert rates == pytest.approx([0.1] * first + [0.1 - 0.01 * step for step in range(12 - first)])
    assert [sample.event for sample in samples] == ["flip", *[""] * 11], "they are steps all the same"
    assert bench.trainer.run(Chunk(bench.settings, 6, 1)).samples[0].loss_scale is None


def test_another_schedule_begins_with_the_next_step_and_another_length_goes_on() -> None:
    bench = Bench()
    assert bench.train(4) == [0.1] * 4
    assert bench.train(2, lr_schedule="linear", schedule_steps=10) == pytest.approx([0.1, 0.09])
    assert bench.train(2, schedule_steps=4) == pytest.approx([0.05, 0.025])
    assert bench.train(2) == [0, 0], "it is over"
    assert bench.train(3, lr_schedule="constant", warmup_steps=1) == pytest.approx([0.05, 0.1, 0.1])
    assert bench.own.param_groups[1]["lr"] == pytest.approx(0.01)


def test_a_flip_of_the_rate_or_the_optimizer_goes_on_in_the_schedule() -> None:
    bench = Bench()
    bench.train(5, lr_schedule="linear", schedule_steps=10)
    assert bench.train(1, learning_rate=0.2) == pytest.approx([0.1])
    assert bench.train(1, optimizer="adam") == pytest.approx([0.08])
    assert bench.train(1, optimizer="own", learning_rate=0.1) == pytest.approx([0.03])
    bench.train(2)
    assert bench.train(1, optimizer="sgd") == [0]
    assert bench.train(1, lr_schedule="constant") == [0.1]


def test_what_a_cell_sets_holds_until_the_schedule_moves() -> None:
    bench = Bench()
    bench.train(2, warmup_steps=1)
    set_rates(bench.own, 0.03, 0.001)
    assert bench.train(3, clip_norm=1e9) == [0.03] * 3
    bench.train(1, lr_schedule="linear", schedule_steps=10, warmup_steps=0)
    set_rates(bench.own, 0.05, 0.025)
    assert bench.train(2) == pytest.approx([0.05, 0.08])
    assert bench.own.param_groups[1]["lr"] == pytest.approx(0.035), "half of the first, as the cell set them"


def test_the_own_scheduler_rests_while_another_schedule_is_on() -> None:
    bench = Bench(SCHEDULERS["cosine"])
    assert bench.train(3) == bench.train_plainly(3)
    resting = bench.train(4, lr_schedule="constant") + bench.train(2, lr_schedule="linear", schedule_steps=10)
    assert resting == pytest.approx([0.1] * 5 + [0.09])
    assert bench.train(4, lr_schedule="own") == bench.train_plainly(4)


@pytest.mark.parametrize(
    "knobs",
    [
        {"warmup_steps": 99},
        {"lr_schedule": "linear", "schedule_steps": 3},
        {"lr_scaling": "linear", "reference_batch": 1, "warmup_steps": 5},
    ],
)
@pytest.mark.parametrize("optimizer", ["own", "adam"])
def test_closing_in_a_schedule_leaves_the_rate_that_the_knob_names(knobs: dict[str, Any], optimizer: str) -> None:
    bench = Bench()
    bench.train(2)
    bench.train(4, learning_rate=0.2, **knobs)
    if optimizer != "own":
        bench.train(2, optimizer=optimizer, learning_rate=0.001)
    bench.trainer.close()
    assert [group["lr"] for group in bench.own.param_groups] == pytest.approx([0.2, 0.02])
    assert bench.another().info().own_learning_rate == pytest.approx(0.2)


def test_closing_leaves_what_a_cell_or_the_own_scheduler_set() -> None:
    bench = Bench()
    bench.train(2, warmup_steps=9)
    set_rates(bench.own, 0.03, 0.001)
    bench.trainer.close()
    assert [group["lr"] for group in bench.own.param_groups] == [0.03, 0.001]
    bench = Bench(SCHEDULERS["steps"])
    bench.train(3)
    bench.train_plainly(3)
    bench.train(1, lr_schedule="constant")
    bench.train(2, lr_schedule="own")
    bench.train_plainly(2)
    bench.trainer.close()
    assert [group["lr"] for group in bench.own.param_groups] == [group["lr"] for group in bench.plain.param_groups]


def test_closing_while_the_own_scheduler_rests_lets_it_go_on_from_there() -> None:
    bench = Bench(lambda own: ExponentialLR(own, 0.5))
    assert bench.train(3) == bench.train_plainly(3)
    bench.train(2, lr_schedule="constant")
    bench.trainer.close()
    bench.trainer = bench.another()
    bench.settings = compatibility.loaded(bench.settings, bench.trainer.info(), 1)
    assert bench.train(2, lr_schedule="own") == bench.train_plainly(2)


def test_the_page_says_of_each_knob_what_a_flip_does_to_the_mathematics() -> None:
    page = (Path(__file__).parents[2] / "docs/learning-rate.md").read_text()
    named = {}
    for kind, start in ((KEEPS, "| keeps |"), (KEEPS_TO_ROUNDING, "| keeps to rounding")):
        [row] = (line for line in page.splitlines() if line.startswith(start))
        named[kind] = set(re.findall(r"`(\w+)`", row))
    for name, knob in KNOBS.items():
        said = [kind for kind, names in named.items() if name in names]
        if callable(knob.mathematics):
            assert said, f"{name}: it depends, and the page says nothing"
        else:
            assert said == [knob.mathematics] * (knob.mathematics != CHANGES), name


def test_a_jump_of_the_rate_needs_no_correction_of_torchs_momentum() -> None:
    """Against the form of Goyal et al.'s equation 10, whose momentum has the rate in it and is corrected."""
    bench = Bench()
    plain = Bench().plain_model
    params: list[torch.Tensor] = list(plain.parameters())
    rate, momentum = 0.1, [torch.zeros_like(param) for param in params]
    for step, new in enumerate([0.1] * 4 + [0.4] * 4):
        bench.train(1, learning_rate=new)
        plain.zero_grad()
        loss(plain, [torch.ones(2, 4)]).backward()
        with torch.no_grad():
            for place, param in enumerate(params):
                assert param.grad is not None
                of_group = new if place < 2 else new / 10
                momentum[place] = 0.9 * (new / rate) * momentum[place] + of_group * param.grad
                param -= momentum[place]
        rate = new
        for ours, theirs in zip(bench.model.parameters(), params, strict=True):
            torch.testing.assert_close(ours, theirs, msg=f"step {step}")
