"""What is tried after memory ran out, in which order."""

from __future__ import annotations

import pytest

from gpumem_nb.kernel.tryout import Tryout
from gpumem_nb.report.differences import typed
from gpumem_nb.report.rescue import Fit, Rescue
from gpumem_nb.shared.messages import Failure
from gpumem_nb.shared.settings import Settings


def tried(settings: Settings, phase: str, blocks: bool, most: int = 9) -> list[str]:
    """As typed, while nothing fits."""
    tryout = Tryout(Rescue(Failure(0, "oom", phase, ""), 1, settings), blocks, sample_s=0.0)
    found: list[str] = []
    while len(found) < most and tryout.next():
        tryout.learn({"oom"}, [])
        found.append(typed(settings, tryout.rescue.trials[-1].settings))
    return found


def test_the_same_training_in_less_memory_comes_first_then_the_mildest_change_and_ever_smaller_micro_batches() -> None:
    assert tried(Settings(batch_size=8), "forward", blocks=True) == [
        "batch_size=4 accumulation_steps=2",
        "checkpointing=blocks",
        "precision=bf16",
        "checkpointing=blocks batch_size=4 accumulation_steps=2",
        "batch_size=2 accumulation_steps=4",
        "checkpointing=blocks batch_size=2 accumulation_steps=4",
        "batch_size=1 accumulation_steps=8",
        "checkpointing=blocks batch_size=1 accumulation_steps=8",
    ]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (Settings(), ["optimizer_impl=fused", "optimizer=momentum", "optimizer=sgd"]),
        (Settings(optimizer="own"), ["optimizer_impl=fused", "optimizer=momentum", "optimizer=sgd"]),
        (Settings(optimizer="momentum", optimizer_impl="fused"), ["optimizer=sgd"]),
        (Settings(optimizer="sgd", optimizer_impl="fused"), []),
    ],
)
def test_another_way_of_the_same_update_is_tried_before_another_optimizer(settings: Settings, found: list[str]) -> None:
    assert tried(settings, "update", blocks=True) == found


def test_without_blocks_only_the_batch_shrinks() -> None:
    used = Settings(batch_size=6, precision="bf16")
    smaller = ["batch_size=3 accumulation_steps=2", "batch_size=1 accumulation_steps=6"]
    assert tried(used, "backward", blocks=False) == smaller


def test_what_there_was_no_time_for_is_told_apart_from_what_does_not_fit() -> None:
    settings = Settings(batch_size=8)
    rescue = Rescue(Failure(0, "oom", "forward", ""), 1, settings)
    tryout = Tryout(rescue, blocks=False, sample_s=0.8)
    while tryout.next():  # of eight samples a step takes longer than the 5 s that there are, of four it does not
        tryout.learn({"oom"}, [])
    assert [typed(settings, one) for one in rescue.untried] == ["batch_size=4 accumulation_steps=2", "precision=bf16"]
    rescue.looking = False
    assert "none of these would have fit: batch_size=2 accumulation_steps=4" in rescue.advice
    assert "There was no time to try batch_size=4 accumulation_steps=2." in rescue.advice


def test_what_was_predicted_to_fit_is_named_until_a_trial_has_said_so() -> None:
    settings, lighter = Settings(batch_size=8), Settings(batch_size=8, checkpointing="blocks")
    rescue = Rescue(Failure(0, "oom", "forward", ""), 1, settings, foreseen=[Fit(lighter, 3 * 2**20)])
    tryout = Tryout(rescue, blocks=True, sample_s=0.0)
    assert lighter in tryout.mild
    assert "Predicted to fit: checkpointing=blocks (live peak 3.0 MiB). What would have fit is being" in rescue.advice
    while lighter not in [trial.settings for trial in rescue.trials]:
        assert "Predicted to fit" in rescue.advice
        tryout.next()
        tryout.learn({"oom"}, [])
    assert rescue.advice == "What would have fit is being tried out on the ranks."
