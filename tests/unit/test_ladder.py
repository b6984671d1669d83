"""The memory ladder: which change comes next, what is said of the rungs, and how one is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumem_nb.kernel.questions.laddering import Laddering
from gpumem_nb.planning.instead import lighter
from gpumem_nb.planning.ladder import Ladder, may_be_rung, next_rung
from gpumem_nb.planning.prediction import DOES_NOT_FIT, Prediction
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.errors import InvalidInput, NotThisTime, WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits, WorkloadInfo
from gpumem_nb.ui.figures import ladder_figure
from gpumem_nb.ui.ladder_view import Rungs
from tests.ledgers import MIB
from tests.runs import history_of
from tests.unit.test_doctor import prediction

PRESENT = Settings(batch_size=16)
BLOCKS = PRESENT.replace(checkpointing="blocks")
HALVED = PRESENT.replace(batch_size=8, accumulation_steps=2)
ABOVE = prediction(PRESENT, live=400)


def needs(settings: Settings, live: int, per_s: float | None = 100.0, **of: Any) -> Prediction:
    return prediction(settings, live=live, samples_per_s=per_s, **of)


def test_what_frees_most_for_the_time_that_it_costs_comes_next() -> None:
    slow, quick = needs(BLOCKS, 200, 70.0), needs(HALVED, 300, 95.0)
    assert next_rung(ABOVE, [slow, quick]) is quick, "100 MiB for 5 % and not 200 for 43 %"
    assert next_rung(ABOVE, [slow, needs(HALVED, 300, 60.0)]) is slow
    as_fast = needs(BLOCKS, 200, 100.0)
    assert next_rung(ABOVE, [quick, as_fast]) is as_fast
    assert next_rung(ABOVE, [needs(BLOCKS, 200, None), needs(HALVED, 300, None)]).settings == BLOCKS  # type: ignore[union-attr]


def test_what_frees_hardly_anything_is_no_rung() -> None:
    assert next_rung(ABOVE, []) is None
    assert next_rung(ABOVE, [needs(BLOCKS, 395), needs(HALVED, 401)]) is None
    assert next_rung(ABOVE, [needs(BLOCKS, 100, lower_bound=True)]) is None, "it needs more than that"


def test_of_values_of_one_knob_that_free_as_much_the_mildest_is_taken() -> None:
    factored, none = needs(PRESENT.replace(optimizer="adafactor"), 205), needs(PRESENT.replace(optimizer="sgd"), 200)
    assert next_rung(ABOVE, [factored, none]) is factored
    half = needs(PRESENT.replace(optimizer="momentum"), 300)
    assert next_rung(ABOVE, [half, none]) is none


def test_below_settings_of_which_not_even_a_small_step_fits_the_fastest_that_fits_is_taken() -> None:
    unknown = prediction(PRESENT, live=1200, lower_bound=True, verdict=DOES_NOT_FIT)
    slow, quick = needs(BLOCKS, 200, 70.0), needs(HALVED, 300, 95.0)
    assert next_rung(unknown, [slow, quick, needs(PRESENT, 1100, 200.0, verdict=DOES_NOT_FIT)]) is quick


def test_a_rung_has_no_fewer_samples_a_step_and_keeps_the_mathematics_where_that_is_asked_for() -> None:
    splits = Splits(mean=True)
    assert may_be_rung(PRESENT, HALVED, splits, same_mathematics=True)
    assert not may_be_rung(HALVED, HALVED.replace(accumulation_steps=1), splits, same_mathematics=False)
    bf16 = PRESENT.replace(precision="bf16")
    assert may_be_rung(PRESENT, bf16, splits, same_mathematics=False)
    assert not may_be_rung(PRESENT, bf16, splits, same_mathematics=True)
    assert not may_be_rung(PRESENT, HALVED, Splits(mean=False), same_mathematics=True)


def ladder(now: Prediction = ABOVE, *rungs: Prediction, ended: str = "", changed: list[Any] | None = None) -> Ladder:
    return Ladder(now, rungs, Splits(mean=True), 6, ended, (changed if changed is not None else []).append)


def test_a_rung_is_taken_with_all_above_it() -> None:
    changed: list[Any] = []
    found = ladder(ABOVE, needs(BLOCKS, 300), needs(BLOCKS.replace(precision="bf16"), 200), changed=changed)
    found.apply(2)
    found.apply(1)
    found.apply(0)
    rows = [("bf16", "blocks"), ("fp32", "blocks"), ("fp32", "none")]
    assert changed == [{"checkpointing": mode, "precision": precision} for precision, mode in rows]
    for bad in (3, -1, "1", True, 1.0):
        with pytest.raises(InvalidInput, match=r"cannot be taken: write a number from 1 to 2"):
            found.apply(bad)  # type: ignore[arg-type]


def test_it_says_what_each_rung_adds_and_what_to_type() -> None:
    too_much = prediction(PRESENT, live=1200, verdict=DOES_NOT_FIT)
    bf16 = needs(BLOCKS.replace(precision="bf16"), 600)
    found = ladder(
        too_much, needs(BLOCKS, 1100, verdict=DOES_NOT_FIT), bf16, needs(bf16.settings.replace(optimizer="sgd"), 300)
    )
    assert [row["adds"] for row in found.records] == [
        "as it is",
        "checkpointing=blocks",
        "precision=bf16",
        "optimizer=sgd",
    ]
    assert [row["mathematics"] for row in found.records] == ["keeps", "keeps", "changes", "changes"]
    said = str(found)
    assert "The first that fits is rung 2: %hvd_set precision=bf16 checkpointing=blocks\n" in said
    assert "Least memory, rung 3: %hvd_set precision=bf16 checkpointing=blocks optimizer=sgd" in said
    assert "−50 %" in said
    assert "timed" not in said
    assert "No rung was timed, as steps take too long" in str(
        ladder(needs(PRESENT, 400, None), needs(BLOCKS, 200, None))
    )
    assert "frees 2 % of the live peak" in str(ladder())
    figure = ladder_figure(found)
    assert list(figure.data[0].text) == ["0", "1", "2 ≠", "3 ≠"]
    assert "limit" in [one.text for one in figure.layout.annotations]


def test_it_ends_with_how_much_larger_a_model_would_fit() -> None:
    below = needs(BLOCKS, 300, high_bytes=400 * MIB, block_bytes=50 * MIB)
    said = "On rung 1 a model with about 12 blocks more than its 6 would fit"
    known = dataclasses.replace(ABOVE, block_bytes=50 * MIB)
    for now, as_it_is in (
        (dataclasses.replace(known, high_bytes=900 * MIB), ", with 2 as it is: each"),
        (dataclasses.replace(known, high_bytes=990 * MIB), ", with none as it is: each"),
        (dataclasses.replace(ABOVE, lower_bound=True), ", with none as it is: each"),
        (ABOVE, ": each"),  # a number that is not known is not shown as none
    ):
        assert f"{said}{as_it_is} takes up to 50.0 MiB" in str(ladder(now, below))
    for unknown in ({"limit_bytes": None}, {"block_bytes": None}, {"lower_bound": True}, {"high_bytes": 2000 * MIB}):
        assert "blocks more" not in str(ladder(ABOVE, dataclasses.replace(below, **unknown)))
    on_host = dataclasses.replace(below, host_bytes=60 * MIB, host_limit_bytes=95 * MIB)  # 10 MiB for each of 6 blocks
    assert "with about 3 blocks more than its 6" in str(ladder(ABOVE, on_host))


def test_the_panel_has_a_button_for_each_rung() -> None:
    changed: list[Any] = []
    rungs = Rungs(ladder(ABOVE, needs(BLOCKS, 300), changed=changed), lambda action: action())
    grid, _ = rungs.widget.children
    buttons = [one for one in grid.children if hasattr(one, "click")]
    assert [one.description for one in buttons] == ["0: as it is", "1: checkpointing=blocks"]
    for one in reversed(buttons):
        one.click()
    assert changed == [{"checkpointing": "blocks"}, {"checkpointing": "none"}]
    said = [one.value for one in grid.children if type(one).__name__ == "Label"]
    assert said[3:] == ["mathematics", "400.0 MiB", "100", "keeps", "300.0 MiB", "100", "keeps"]
    marks = []
    for settings in (PRESENT, BLOCKS.replace(num_workers=2), PRESENT.replace(checkpointing="sqrt")):
        rungs.follow(settings)
        marks.append([one.icon for one in buttons])
    assert marks == [["check", ""], ["", "check"], ["", ""]], "whatever else is set"


class Ranks:
    """Of a session whose ranks predict what a test wants."""

    def __init__(self, peaks: dict[str, int | Exception]) -> None:
        self.peaks, self.settings, self.asked = peaks, PRESENT, list[Settings]()
        self.history = history_of()
        self.meanwhile: Callable[[], object] = lambda: None

    def predict(self, changes: dict[str, Any]) -> Prediction:
        settings = self.settings.replace(**changes)
        self.asked.append(settings)
        self.meanwhile()
        live: int = 400
        for name in settings.changed_from(PRESENT):
            saves = self.peaks.get(name, 0)
            if isinstance(saves, BaseException):
                raise saves
            live -= saves
        return needs(settings, live, most=c.OPTIMIZER_STATE if settings.optimizer == "adamw" else c.ACTIVATIONS)

    def ladder(self, **of: Any) -> Ladder:
        training = cast(Any, self)
        self.workload = WorkloadInfo("net", 1, 4, 100_000, blocks=4)
        predicting = SimpleNamespace(predict=self.predict, splits=lambda: Splits(mean=True))
        foreground = SimpleNamespace(check_loaded=lambda: None)
        held: Any = {"predicting": predicting, "history": self.history, "training": training, "foreground": foreground}
        parts = dict.fromkeys(("policy", "origin", "record", "snapshots")) | held
        asks = Laddering(cast(Any, SimpleNamespace(ranks=SimpleNamespace(infos=[None, None]), **parts)))
        return asks.ladder(
            of.get("same", False), of.get("progress", lambda what, done: None), lambda now: lambda to: None
        )


def rungs(found: Ladder) -> list[str]:
    return [row["adds"] for row in found.records[1:]]


def test_it_goes_down_until_nothing_is_worth_a_rung() -> None:
    ranks = Ranks({"optimizer": 100, "optimizer_impl": 8})
    assert rungs(ranks.ladder()) == ["optimizer=adamw8bit"]
    assert ranks.settings == PRESENT
    assert len(ranks.asked) == len(set(ranks.asked)), "nothing is predicted twice"


def test_copies_to_host_memory_are_tried_where_activations_fill_the_peak_and_are_offered_by_nobody_else() -> None:
    ranks = Ranks({"optimizer": 100, "offload_activations": 150})
    assert rungs(ranks.ladder()) == ["optimizer=adamw8bit", "offload_activations=on"]
    at_peak = {c.ACTIVATIONS: 300 * MIB, c.PARAMETERS: 100 * MIB}
    offered = lighter(PRESENT, "backward", WorkloadInfo("net", 1, 4, 100_000, blocks=4).handles, at_peak)
    assert offered
    assert {one.offload_activations for one in offered} == {"off"}
    assert rungs(Ranks({"offload_optimizer": 100}).ladder()) == ["offload_optimizer=on"]
    known = WorkloadInfo("net", 1, 4, 100_000, blocks=4).handles
    of_state = lighter(PRESENT, "update", known, {c.OPTIMIZER_STATE: 300 * MIB})
    assert of_state
    assert {one.offload_optimizer for one in of_state} == {"off"}


def test_a_change_whose_step_fails_is_left_out_and_what_passes_ends_it_with_what_was_found() -> None:
    assert rungs(Ranks({"optimizer": WorkloadError("no such step")}).ladder()) == []
    with pytest.raises(NotThisTime):
        Ranks({"optimizer": NotThisTime("Interrupted.")}).ladder()


def test_an_interrupt_and_a_flip_leave_the_rungs_found() -> None:
    ranks = Ranks({"optimizer": 100})

    def stop(what: str, done: float) -> None:
        if what.startswith("rung 2"):
            raise KeyboardInterrupt

    found = ranks.ladder(progress=stop)
    assert rungs(found) == ["optimizer=adamw8bit"]
    assert found.sentences[0] == "It was interrupted."
    flipped = Ranks({"optimizer": 100})
    flipped.meanwhile = lambda: setattr(flipped, "settings", BLOCKS) if len(flipped.asked) > 7 else None
    found = flipped.ladder()
    assert rungs(found) == ["optimizer=adamw8bit"]
    assert found.sentences[0] == "It ended early, because settings were changed."


def test_an_interrupt_before_the_first_rung_does_not_say_that_nothing_frees_memory() -> None:
    late = "Interrupted, but the ranks had come to the end of it by then. They are ready."

    def stop(what: str, done: float) -> None:
        if what.startswith("rung 1"):
            raise KeyboardInterrupt(late)

    found = Ranks({"optimizer": 100}).ladder(progress=stop)
    assert found.sentences == ["It was interrupted, but the ranks had come to the end of it by then. They are ready."]


def test_where_no_single_change_makes_a_small_step_fit_the_first_rung_has_several() -> None:
    class Small(Ranks):
        def predict(self, changes: dict[str, Any]) -> Prediction:
            said = super().predict(changes)
            beyond = said.settings.batch_size > self.most
            return dataclasses.replace(said, lower_bound=beyond, verdict=DOES_NOT_FIT if beyond else said.verdict)

        most = 2

    small = Small({"optimizer": 100})
    assert rungs(small.ladder()) == ["batch_size=2 accumulation_steps=8", "optimizer=adamw8bit"]
    assert len(small.asked) == len(set(small.asked)), "nothing is predicted twice"
    small.most = 0
    said = small.ladder()
    assert rungs(said) == []
    none = "Not even a small step fits, under the present settings or any that were tried in their place."
    assert said.sentences == [f"{none} Use a smaller model or a larger limit."]
