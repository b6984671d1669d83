"""What is tried after memory ran out, in which order, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.policy import Policy
from gpumem_nb.kernel.training.failures import Failures, Tryout
from gpumem_nb.kernel.training.state import TrainingState
from gpumem_nb.planning import instead
from gpumem_nb.planning.instead import instead_of
from gpumem_nb.report.differences import typed
from gpumem_nb.report.instead import Fit
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.shared.categories import ACTIVATIONS, OPTIMIZER_STATE
from gpumem_nb.shared.forecast import RECORDED, VARYING, Forecast, Forecasts
from gpumem_nb.shared.knobs.step import halved
from gpumem_nb.shared.messages import Chunk, Failure, Reading
from gpumem_nb.shared.readings import LiveBytes
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Handles, Splits

MIB = 2**20
LIMIT = 1000 * MIB
READING = Reading(0, 0, 0, 0, None, LIMIT)
OUT = [Forecasts(3, READING, 0.1, LIMIT, failure=Failure(0, "oom", "forward", "", "", "", 40 * MIB, MIB))]


def needs(mib: int) -> list[Forecasts]:
    one = Forecast(mib * MIB, mib * MIB, mib * MIB <= LIMIT, {ACTIVATIONS: mib * MIB}, "forward", "", RECORDED)
    return [Forecasts(3, READING, 0.1, LIMIT, (one,))]


def out_of_memory(settings: Settings, phase: str = "forward") -> Rescue:
    return Rescue(Failure(0, "oom", phase, ""), 1, settings, ranks=2)


def tried(settings: Settings, phase: str, blocks: bool, most: int = 10) -> list[str]:
    """As typed, while nothing fits."""
    one = Tryout(out_of_memory(settings, phase), Handles(4 * blocks))
    found: list[str] = []
    while len(found) < most and one.next():
        one.learn(OUT)
        found.append(typed(settings, one.search.tried[-1].settings))
    return found


def ended(settings: Settings, answer: Callable[[Settings], list[Forecasts]], blocks: bool = False) -> Rescue:
    """When all was tried."""
    rescue = out_of_memory(settings)
    one = Tryout(rescue, Handles(4 * blocks))
    while candidate := one.next():
        one.learn(answer(candidate))
    rescue.looking = False
    return rescue


def test_the_same_training_in_less_memory_comes_first_then_the_mildest_change_and_ever_smaller_micro_batches() -> None:
    assert tried(Settings(batch_size=8), "forward", blocks=True) == [
        "batch_size=4 accumulation_steps=2",
        "checkpointing=selective",
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
        (
            Settings(),
            [
                "optimizer_impl=fused",
                "optimizer=adamw8bit",
                "optimizer=adafactor",
                "optimizer=momentum",
                "optimizer=sgd",
            ],
        ),
        (
            Settings(optimizer="own"),
            [
                "optimizer_impl=fused",
                "optimizer=adamw8bit",
                "optimizer=adafactor",
                "optimizer=momentum",
                "optimizer=sgd",
            ],
        ),
        (
            Settings(optimizer="momentum", optimizer_impl="fused"),
            ["optimizer=adafactor optimizer_impl=default", "optimizer=sgd"],
        ),
        (Settings(optimizer="adafactor"), ["optimizer=sgd"]),
        (Settings(optimizer="sgd", optimizer_impl="fused"), []),
    ],
)
def test_another_way_of_the_same_update_is_tried_before_another_optimizer(settings: Settings, found: list[str]) -> None:
    assert tried(settings, "update", blocks=True) == found


def test_where_the_update_needs_most_another_way_of_it_is_tried_with_smaller_micro_batches() -> None:
    """The forward part ran out; with the optimizer's state there, the update would run out next."""

    def answer(one: Settings) -> list[Forecasts]:
        if one.optimizer_impl == "fused" and one.batch_size <= 4:
            return needs(500)
        return [replace(OUT[0], failure=Failure(0, "oom", "update" if one.batch_size <= 4 else "forward", ""))]

    rescue = ended(Settings(batch_size=8, precision="bf16"), answer)
    assert rescue.advice.endswith("Type %hvd_set batch_size=4 accumulation_steps=2 optimizer_impl=fused")


@pytest.mark.parametrize("lighter", ["shard_optimizer", "offload_optimizer"])
def test_where_the_update_needs_most_its_state_is_shared_or_put_aside_with_smaller_micro_batches(lighter: str) -> None:
    def answer(one: Settings) -> list[Forecasts]:
        if getattr(one, lighter) == "on" and one.batch_size <= 4:
            return needs(500)
        return [replace(OUT[0], failure=Failure(0, "oom", "update" if one.batch_size <= 4 else "forward", ""))]

    rescue = out_of_memory(Settings(batch_size=8, precision="bf16"))
    one = Tryout(rescue, Handles(shards=True, offloads=True))
    while candidate := one.next():
        one.learn(answer(candidate))
    rescue.looking = False
    assert rescue.advice.endswith(f"Type %hvd_set batch_size=4 accumulation_steps=2 {lighter}=on")


def test_where_smaller_micro_batches_free_next_to_nothing_the_state_is_shared() -> None:
    def answer(one: Settings) -> list[Forecasts]:
        if one.shard_optimizer == "on":
            return needs(500)
        return needs(1100 + one.batch_size)

    rescue = out_of_memory(Settings(batch_size=64, precision="bf16"))
    one = Tryout(rescue, Handles(shards=True))
    while candidate := one.next():
        one.learn(answer(candidate))
    rescue.looking = False
    assert rescue.advice.endswith("Type %hvd_set batch_size=16 accumulation_steps=4 shard_optimizer=on")


def test_the_samples_of_the_step_that_failed_are_known_though_others_differ_in_size() -> None:
    rescue = ended(Settings(batch_size=4, precision="bf16"), lambda one: [
        replace(needs(900)[0], of=(replace(needs(900)[0].of[0], how=VARYING),))
    ])  # fmt: skip
    assert rescue.fits[0] == "batch_size=2 accumulation_steps=2 (live peak 900.0 MiB)"


def test_without_blocks_only_the_batch_shrinks() -> None:
    used = Settings(batch_size=6, precision="bf16")
    smaller = ["batch_size=3 accumulation_steps=2", "batch_size=1 accumulation_steps=6"]
    assert tried(used, "backward", blocks=False) == smaller


def test_all_micro_batches_of_the_step_that_failed_are_tried() -> None:
    """The one that is too large may be any of them."""
    one = Tryout(out_of_memory(Settings(batch_size=8, accumulation_steps=4)), handles=Handles())
    candidate = one.next()
    assert candidate is not None
    assert (candidate.batch_size, candidate.accumulation_steps) == (4, 8)


def test_without_time_for_a_choice_it_goes_on_until_something_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instead, "TIMEOUT_S", 0.0)
    rescue = ended(Settings(batch_size=64), lambda one: needs(10) if one.batch_size <= 4 else OUT, blocks=True)
    assert [fit.settings.batch_size for fit in rescue.fitting] == [4]
    rescue = ended(Settings(batch_size=64), lambda one: needs(10), blocks=True)
    assert rescue.instead is not None
    assert len(rescue.instead.tried) == 1, "the first that fits"


@pytest.mark.parametrize(
    ("size", "splits"),
    [
        (173, [(87, 2), (44, 4), (22, 8), (11, 16), (6, 29)]),
        (64, [(32, 2), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]),
        (9, [(3, 3), (1, 9)]),
        (1, []),
    ],
)
def test_micro_batches_are_halved_though_the_size_is_prime(size: int, splits: list[tuple[int, int]]) -> None:
    whole = Settings(batch_size=size)
    one: Settings | None = halved(whole)
    found: list[tuple[int, int]] = []
    while one and len(found) < len(splits):
        found.append((one.batch_size, one.accumulation_steps))
        one = halved(one, whole)
    assert found == splits


def test_the_card_knows_what_the_ranks_have_said_of_splits() -> None:
    rescue = out_of_memory(Settings(batch_size=8))
    one = Tryout(rescue, handles=Handles(4), splits=Splits(mean=False))
    while one.next():
        one.learn(needs(100))
    assert rescue.fitting[0].settings.checkpointing == "selective"
    assert rescue.fitting[0].settings.batch_size == 8


@pytest.mark.parametrize("first_fits", [True, False])
def test_the_first_trial_which_warms_up_says_nothing_of_speed(first_fits: bool) -> None:
    """It loads kernels and maps memory: the same step took twice as long as with all its activations recomputed."""

    def answer(one: Settings) -> list[Forecasts]:
        if one.batch_size == 4 and one.checkpointing == "none":
            return [replace(needs(100)[0], seconds=0.6)] if first_fits else OUT
        return [replace(needs(100)[0], seconds=0.1 if one.batch_size == 4 else 0.3)]

    advice = ended(Settings(batch_size=8), answer, blocks=True).advice
    known = "batch_size=4 accumulation_steps=2 (live peak 100.0 MiB), the mildest change"
    assert (f": {known}" in advice) is first_fits
    fastest = "checkpointing=blocks batch_size=4 accumulation_steps=2 (live peak 100.0 MiB), the fastest"
    assert (fastest in advice) is not first_fits


def test_a_split_that_changes_the_global_batch_says_so() -> None:
    rescue = ended(Settings(batch_size=173), lambda one: needs(100) if one.batch_size < 100 else OUT)
    split = next(flip for flip in rescue.fits if flip.startswith("batch_size=87"))
    assert split == (
        "batch_size=87 accumulation_steps=2 (live peak 100.0 MiB; the global batch becomes 348 instead of 346)"
    )
    only = ended(Settings(batch_size=173, precision="bf16"), lambda one: needs(100) if one.batch_size < 100 else OUT)
    assert only.advice.endswith("Type %hvd_set batch_size=87 accumulation_steps=2")


def test_what_is_typed_leads_from_the_settings_in_force_to_what_was_tried() -> None:
    failed, back = Settings(batch_size=64), Settings(batch_size=16, checkpointing="blocks")
    rescue = ended(failed, lambda one: needs(100))
    rescue.now = back
    command = rescue.advice.rsplit("Type %hvd_set ", 1)[1]
    changes = {name: value for name, value in (part.split("=") for part in command.split())}
    assert back.replace(**changes) == rescue.fitting[0].settings


def test_a_trial_in_place_of_other_settings_says_nothing_of_those_that_ran_out_meanwhile() -> None:
    """Settings are applied, or steps traced, while it is being found out what would have fit before."""
    history, sent = History(2), list[Chunk]()
    state = TrainingState(history)

    def send_trial(settings: Settings, trial_id: int) -> None:
        sent.append(Chunk(settings, trial_id, 1, 0, trial=True))

    failures = Failures(history, state, lambda: Policy(on_oom="stop"), lambda steps: None, send_trial)
    first, second = Settings(batch_size=64), Settings(batch_size=8)
    for settings in (first, second):
        state.adopt(settings)
        chunk = Chunk(settings, state.settings_id, 1, 0)
        failures.handle(Failure(0, "oom", "forward", ""), chunk)
    before, after = (
        first.replace(batch_size=32, accumulation_steps=2),
        second.replace(batch_size=4, accumulation_steps=2),
    )
    assert [one.settings for one in sent] == [before, after]
    failures.learn(sent[0], needs(100))
    assert len(sent) == 2
    failures.learn(sent[1], OUT)
    assert history.rescue
    assert history.rescue.instead
    assert [(one.settings, one.fits) for one in history.rescue.instead.tried] == [(after, False)]


def test_trials_that_end_early_do_not_say_that_nothing_fits() -> None:
    rescue = out_of_memory(Settings(batch_size=8))
    one = Tryout(rescue, handles=Handles(4))
    one.next()
    one.learn(OUT)
    rescue.looking = False  # ranks stalled, say
    assert rescue.advice.endswith(
        "none of these would have fit: batch_size=4 accumulation_steps=2. Others were not tried. Ask again: "
        "%hvd_predict"
    )
    while one.next():
        one.learn(OUT)
    assert rescue.advice.endswith(
        "Use a smaller model or a larger limit. To look further, also at other optimizers: %hvd_ladder"
    )


def test_what_leaves_no_room_is_not_said_to_fit() -> None:
    rescue = ended(Settings(batch_size=4, precision="bf16"), lambda one: needs(995))
    assert not rescue.fits
    assert "only this would have fit, barely: batch_size=1 accumulation_steps=4 (live peak 995.0 MiB)" in rescue.advice
    assert rescue.advice.endswith("Type %hvd_set batch_size=1 accumulation_steps=4")


def test_a_sample_that_is_the_cause_is_named_before_the_command() -> None:
    rescue = ended(Settings(batch_size=4, precision="bf16"), lambda one: OUT)
    rescue.failure = Failure(0, "oom", "forward", "", sample="Sample 333 is large.")
    assert rescue.advice.startswith("Sample 333 is large. Tried out on the ranks, none of these would have fit")


@pytest.mark.parametrize(
    ("filled", "said"),
    [
        ("logits", "With loss_head=chunked the loss has the logits"),
        ("scores", "scaled_dot_product_attention keeps none"),
    ],
)
def test_what_memory_ran_out_for_is_named_before_the_command(filled: str, said: str) -> None:
    rescue = ended(Settings(batch_size=4), lambda one: needs(100))
    before = rescue.advice
    rescue.failure = Failure(0, "oom", "forward", "", filled=filled)
    assert said in rescue.advice
    assert rescue.advice.endswith(before)


def test_less_state_is_tried_where_the_optimizers_fills_much_of_the_limit() -> None:
    def tried_with(state_mib: int) -> list[str]:
        rescue = out_of_memory(Settings(batch_size=1))
        rescue.failure = replace(rescue.failure, live=LiveBytes({OPTIMIZER_STATE: state_mib * MIB}))
        return [typed(rescue.settings, one) for one in Tryout(rescue, Handles(), limit_bytes=LIMIT).search.mild]

    assert tried_with(400) == [
        "precision=bf16",
        "optimizer=adamw8bit",
        "optimizer=adafactor",
        "optimizer=momentum",
        "optimizer=sgd",
    ]
    assert tried_with(300) == ["precision=bf16"]


def test_what_was_predicted_to_fit_is_named_until_a_trial_has_said_so() -> None:
    settings, lighter = Settings(batch_size=8), Settings(batch_size=8, checkpointing="blocks")
    rescue = Rescue(Failure(0, "oom", "forward", ""), 1, settings, foreseen=[Fit(lighter, 3 * MIB)])
    one = Tryout(rescue, handles=Handles(4))
    assert lighter in one.search.mild
    assert "Predicted to fit: checkpointing=blocks (live peak 3.0 MiB). What would have fit is being" in rescue.advice
    while lighter not in [trial.settings for trial in one.search.tried]:
        assert "Predicted to fit" in rescue.advice
        one.next()
        one.learn(OUT)
    assert rescue.advice == "What would have fit is being tried out on the ranks."


def test_where_nothing_was_tried_out_what_training_went_back_to_is_advice_enough() -> None:
    failure = Failure(1, "oom", "forward", "out of memory", asked_bytes=10, free_bytes=1)
    stopped = Rescue(failure, 5, Settings(batch_size=64), did="training stopped", now=Settings(batch_size=64))
    assert stopped.advice == "Use a smaller model or a larger limit."
    stopped.apart = True
    assert stopped.advice.startswith("Nothing lighter was tried out, because the ranks had come apart")
    assert stopped.advice.endswith("%hvd_ladder looks for what fits.")
    went_back = Rescue(failure, 5, Settings(batch_size=64), did="training went back to batch_size=32", now=Settings())
    assert went_back.advice == ""


def test_commands_lead_to_what_was_tried_also_after_other_knobs_were_set() -> None:
    history = History(2)
    state = TrainingState(history)
    rescue = out_of_memory(Settings(batch_size=64))
    tried = [Fit(Settings(batch_size=32, accumulation_steps=2), 100 * MIB)]
    rescue.instead = instead_of(rescue.settings, 2, tried, on_the_step=True)
    history.rescued(rescue)
    state.adopt(Settings(batch_size=8, precision="bf16"))
    assert rescue.advice.endswith("Type %hvd_set precision=fp32 batch_size=32 accumulation_steps=2")
