"""One answer to settings that do not fit: which of what was tried is named, and that all who are asked say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumem_nb.kernel.cluster import Cluster
from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.lifecycle import Lifecycle
from gpumem_nb.kernel.questions.instead import FindingInstead
from gpumem_nb.planning.instead import instead_of, of_tuned
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.planning.score import Asked
from gpumem_nb.report.differences import typed
from gpumem_nb.report.instead import Fit
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.session.planning import PredictsSettings
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.errors import InvalidInput, NotThisTime
from gpumem_nb.shared.messages import Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import DataInfo, Splits, WorkloadInfo
from tests.ledgers import MIB, info
from tests.unit.test_doctor import LIMIT, LOADED, prediction

FAILED = Settings(batch_size=32)
HALF = FAILED.replace(batch_size=16, accumulation_steps=2)
BLOCKS = FAILED.replace(checkpointing="blocks")
BF16 = FAILED.replace(precision="bf16")
NEEDS = prediction(FAILED, live=1600, verdict=DOES_NOT_FIT)


def test_the_fastest_is_named_first_then_what_frees_most_and_why() -> None:
    found = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB, False, 100.0), Fit(BLOCKS, 400 * MIB, False, 80.0)], NEEDS)
    assert found.words(FAILED) == (
        "At the peak of 1.6 GiB, in backward, 75 % is activations. Predicted, these would fit: batch_size=16 "
        "accumulation_steps=2 (live peak 900.0 MiB, 100 samples/s), the fastest at this global batch, because "
        "fewer samples are in memory at once; checkpointing=blocks (live peak 400.0 MiB, 80 samples/s), which frees "
        "most, because backward recomputes activations that forward would keep. Type %hvd_set batch_size=16 "
        "accumulation_steps=2"
    )
    slower = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB, False, 60.0), Fit(BLOCKS, 400 * MIB, False, 80.0)])
    assert [one.settings for one in slower.offers] == [BLOCKS], "it is the fastest and frees most"
    alike = instead_of(FAILED, 2, [Fit(HALF, 400 * MIB, False, 90.0), Fit(BLOCKS, 399 * MIB, False, 80.0)])
    assert [one.settings for one in alike.offers] == [HALF], "it frees as much"


@pytest.mark.parametrize(
    ("half", "blocks", "fastest"),
    [
        (Fit(HALF, 9, trial_s=1.0), Fit(BLOCKS, 4, trial_s=0.8), BLOCKS),
        (Fit(HALF, 9, trial_s=1.0), Fit(BLOCKS, 4, trial_s=0.95), HALF),
        (Fit(HALF, 9, False, 100.0), Fit(BLOCKS, 4, False, 101.0), HALF),
        (Fit(HALF, 9, False, 100.0), Fit(BLOCKS, 4, trial_s=0.1), HALF),
    ],
)
def test_another_than_the_mildest_is_named_only_where_it_is_clearly_faster_by_times_of_one_kind(
    half: Fit, blocks: Fit, fastest: Settings
) -> None:
    found = instead_of(FAILED, 2, [half, blocks])
    assert found.fastest is not None
    assert found.fastest.settings == fastest
    compared = (half.samples_per_s is None) == (blocks.samples_per_s is None)
    assert ("the fastest" in found.words(FAILED)) is compared
    assert ("the mildest change" in found.words(FAILED)) is not compared


def test_what_changes_the_mathematics_or_the_global_batch_comes_after_all_else() -> None:
    sixteen = Fit(BF16, 300 * MIB, False, 900.0)
    slow = Fit(BLOCKS, 800 * MIB, False, 10.0)
    found = instead_of(FAILED, 2, [sixteen, slow])
    assert [one.settings for one in found.offers] == [BLOCKS, BF16]
    assert "which frees most" in found.words(FAILED)
    assert "it changes the mathematics (precision)" in found.words(FAILED)
    alone = instead_of(FAILED, 2, [sixteen, Fit(FAILED.replace(batch_size=4), 10 * MIB, False, 9000.0)])
    assert [one.settings for one in alone.offers] == [BF16], "nothing keeps the mathematics at this global batch"
    fewer = instead_of(FAILED, 2, [Fit(FAILED.replace(batch_size=4), 10 * MIB, False, 9000.0)]).words(FAILED)
    assert "the global batch becomes 8 instead of 64), while nothing that was tried at this global batch fits" in fewer


def test_a_loss_whose_parts_are_not_its_mean_keeps_its_micro_batches() -> None:
    tried = [Fit(HALF, 100 * MIB, False, 900.0), Fit(BLOCKS, 800 * MIB, False, 10.0)]
    found = instead_of(FAILED, 2, tried, splits=Splits(mean=False))
    assert [one.settings for one in found.offers] == [BLOCKS, HALF]
    assert "it changes the mathematics (batch_size: the gradient of a micro-batch is not" in found.words(FAILED)


def test_where_nothing_fits_what_is_no_knob_is_named() -> None:
    state = prediction(FAILED, live=1600, verdict=DOES_NOT_FIT, most=c.OPTIMIZER_STATE)
    said = instead_of(FAILED, 2, [Fit(HALF, None), Fit(BLOCKS, None)], state).words(FAILED)
    assert "none of these would fit: batch_size=16 accumulation_steps=2; checkpointing=blocks." in said
    assert "LoRA" in said
    assert said.endswith("Use a smaller model or a larger limit.")


def test_the_tuners_best_is_the_answer_whatever_single_turns_say() -> None:
    best, other = Fit(BLOCKS, 500 * MIB, False, 90.0), Fit(HALF, 400 * MIB, False, 95.0)
    known = instead_of(FAILED, 2, [Fit(HALF, 400 * MIB, trial_s=1.0)], NEEDS, on_the_step=True)
    found = of_tuned(known, best, [other])
    assert [one.settings for one in found.offers] == [BLOCKS, HALF]
    assert found.reason(FAILED).startswith("At the peak of 1.6 GiB, in backward, 75 % is activations. Predicted, these")


def test_the_tuners_best_is_called_tight_where_it_is() -> None:
    best, other = Fit(HALF, 950 * MIB, True, 95.0), Fit(BLOCKS, 940 * MIB, True, 90.0)
    found = of_tuned(instead_of(FAILED, 2, [Fit(HALF, None)], NEEDS), best, [other])
    assert (found.fastest, found.barely) == (None, best)
    assert "only this would fit, barely: batch_size=16 accumulation_steps=2" in found.words(FAILED)


def test_a_tuner_that_tried_only_what_changes_the_mathematics_leaves_what_keeps_it() -> None:
    known = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB)], NEEDS)
    found = of_tuned(known, Fit(BF16, 500 * MIB, False, 90.0), [])
    assert [one.settings for one in found.offers] == [HALF, BF16]


class Ranks:
    """Two ranks that answer what a test wants of settings.

    Attributes:
        asked: the settings that were predicted, in order.
    """

    def __init__(
        self,
        predicts: Callable[[Settings], Prediction],
        now: Settings = FAILED,
        mean: bool = True,
        workload: WorkloadInfo = LOADED,
    ) -> None:
        self.asked: list[Settings] = []
        self._workload = workload
        self._known = Splits(mean=mean)
        self.history = History(2)
        self._predicts = predicts
        self._now = now

    def finding(self) -> FindingInstead:
        training = SimpleNamespace(settings=self._now, workload=self._workload)
        predicting = SimpleNamespace(predict=self._predict, splits=self._splits)
        parts: dict[str, Any] = dict.fromkeys(("foreground", "policy", "origin", "record", "snapshots"))
        parts |= {"ranks": SimpleNamespace(infos=[info(0), info(1)]), "history": self.history}
        return FindingInstead(cast(Cluster, SimpleNamespace(**parts, training=training, predicting=predicting)))

    def _splits(self, before: Settings, after: Settings) -> Splits:
        return self.history.answers.splits(LOADED) if before == after else self._known

    def _predict(self, changes: dict[str, Any]) -> Prediction:
        self.asked.append(self._now.replace(**changes))
        return self._predicts(self.asked[-1])


def roomy(settings: Settings) -> Prediction:
    fits = settings.batch_size <= 8
    return prediction(settings, live=10 * settings.batch_size, verdict=FITS if fits else DOES_NOT_FIT)


def test_smaller_micro_batches_are_asked_about_until_one_fits_and_never_twice() -> None:
    ranks = Ranks(roomy)
    found = ranks.finding().find(NEEDS)
    assert found.fastest is not None
    assert (found.fastest.settings.batch_size, found.fastest.settings.accumulation_steps) == (8, 4)
    asked = len(ranks.asked)
    assert ranks.finding().find(NEEDS) == found
    assert len(ranks.asked) == asked
    ranks.history.model_may_have_changed()
    ranks.finding().find(NEEDS)
    assert len(ranks.asked) == 2 * asked, "what a cell may have changed is asked anew"


def test_where_something_else_fits_smaller_micro_batches_alone_are_asked_about_because_they_may_be_faster() -> None:
    def predicts(settings: Settings) -> Prediction:
        fits = settings.batch_size <= 4 or settings.checkpointing != "none"
        rate = 50.0 if settings.checkpointing != "none" else 90.0
        return prediction(settings, live=100, samples_per_s=rate, verdict=FITS if fits else DOES_NOT_FIT)

    ranks = Ranks(predicts)
    found = ranks.finding().find(NEEDS)
    assert found.fastest is not None
    assert found.fastest.settings == FAILED.replace(batch_size=4, accumulation_steps=8)
    assert all(one.checkpointing == "none" for one in ranks.asked if one.batch_size < 16), "of these only such"


def test_what_cannot_be_used_is_left_out_and_an_end_of_asking_keeps_what_was_found() -> None:
    def predicts(settings: Settings) -> Prediction:
        if settings.checkpointing != "none":
            raise InvalidInput("no blocks here")
        if settings.precision != "fp32":
            raise NotThisTime("others wait")
        return prediction(settings, live=100)

    found = Ranks(predicts).finding().find(NEEDS)
    assert [one.settings for one in found.tried] == [HALF]


def test_where_asking_ended_before_something_fitted_it_is_said_and_asked_again() -> None:
    def predicts(settings: Settings) -> Prediction:
        if settings.checkpointing != "none" and disturbed:
            raise NotThisTime("others wait")
        return prediction(settings, live=100, verdict=FITS if settings.batch_size <= 4 else DOES_NOT_FIT)

    disturbed, ranks = True, Ranks(predicts)
    found = ranks.finding().find(NEEDS)
    assert found.words(FAILED).endswith(
        "none of these would fit: batch_size=16 accumulation_steps=2. Others were not tried. Ask again: %hvd_predict"
    )
    disturbed = False
    assert ranks.finding().find(NEEDS).fastest is not None


def test_where_the_data_brings_micro_batches_all_other_changes_are_tried_together_as_on_the_card() -> None:
    def predicts(settings: Settings) -> Prediction:
        fits = settings.checkpointing != "none" and settings.fusion_threshold_mib == 4
        return prediction(settings, live=100, verdict=FITS if fits else DOES_NOT_FIT)

    needs = replace(NEEDS, categories={c.ACTIVATIONS: 1000 * MIB, c.COMMUNICATION: 600 * MIB})
    ranks = Ranks(predicts, workload=replace(LOADED, data=DataInfo(batch_size=32, batched=True)))
    found = ranks.finding().find(needs)
    assert all(one.batch_size == 32 for one in ranks.asked)
    assert [one.settings for one in found.offers] == [BLOCKS.replace(fusion_threshold_mib=4)]


def test_a_split_is_not_named_before_the_ranks_said_whether_it_keeps_the_mathematics() -> None:
    def predicts(settings: Settings) -> Prediction:
        fits = settings.batch_size <= 16 or settings.checkpointing != "none"
        return prediction(settings, live=100, verdict=FITS if fits else DOES_NOT_FIT)

    pairs = Ranks(predicts, now=Settings(batch_size=4), mean=False)
    found = pairs.finding().find(NEEDS)
    assert found.fastest is not None
    assert found.fastest.settings == FAILED.replace(checkpointing="selective")


def rescued(ranks: Ranks, looking: bool = False) -> Rescue:
    """Memory ran out, and one flip was tried out on the ranks, which does not fit."""
    rescue = Rescue(Failure(0, "oom", "forward", ""), 3, FAILED, ranks=2, looking=looking)
    ranks.history.rescued(rescue)
    rescue.instead = instead_of(FAILED, 2, [Fit(HALF, None)], on_the_step=True)
    ranks.history.tried_out()
    return rescue


def test_what_is_still_tried_out_is_no_answer_yet() -> None:
    ranks = Ranks(roomy)
    rescued(ranks, looking=True)
    assert ranks.finding().find(NEEDS).fastest is not None
    assert len(ranks.asked) > 1


def test_no_answer_of_the_model_before_a_cell_is_given_after_it() -> None:
    ranks = Ranks(roomy)
    rescue = rescued(ranks, looking=True)
    ranks.history.model_may_have_changed()
    rescue.looking = False
    ranks.history.tried_out()  # a trial of the model before it
    assert ranks.history.answers.known == ()

    def predicts(settings: Settings) -> Prediction:
        cells.history.model_may_have_changed()
        return roomy(settings)

    cells = Ranks(predicts)
    before = rescued(cells).instead
    cells.history.answers.forget()
    found = cells.finding().find(NEEDS)
    assert found.fastest is not None
    assert cells.history.answers.known == ()
    assert cells.history.rescue
    assert cells.history.rescue.instead == before
    cells.history.found_instead(found, model_version=0)  # as a tuner does that a cell has ended
    assert cells.history.answers.known == ()


def test_the_card_and_predictions_say_the_same() -> None:
    ranks = Ranks(roomy, now=Settings(batch_size=4))
    rescue = Rescue(Failure(0, "oom", "forward", ""), 3, FAILED, now=Settings(batch_size=4), ranks=2)
    rescue.instead = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB, trial_s=1.0)], on_the_step=True)
    ranks.history.rescued(rescue)
    ranks.history.tried_out()
    found = ranks.finding().find(NEEDS)
    assert ranks.asked == [], "it was tried out on the very step"
    assert rescue.advice == found.words(Settings(batch_size=4))
    assert "75 % is activations" in rescue.advice, "why, which was not known before"
    assert "Tried out on the ranks, this would have fit" in rescue.advice


def test_what_buttons_say_the_card_does_not_say_too() -> None:
    rescue = Rescue(Failure(0, "oom", "forward", ""), 3, FAILED, now=FAILED, ranks=2)
    rescue.instead = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB, trial_s=1.0)], on_the_step=True)
    assert rescue.reason.startswith("Tried out on the ranks, this would have fit, because fewer samples are in memory")
    smaller = Fit(BLOCKS, 300 * MIB, trial_s=2.0)
    rescue.instead = instead_of(FAILED, 2, [Fit(HALF, 900 * MIB, trial_s=1.0), smaller], on_the_step=True)
    assert rescue.reason == (
        "Tried out on the ranks, these would have fit: the first is the fastest at this global batch; the second frees "
        "most."
    )
    assert all(typed(FAILED, one.settings) in button for one, button in zip(rescue.fitting, rescue.fits, strict=True))
    assert not any(typed(FAILED, one.settings) in rescue.reason for one in rescue.fitting)


def test_a_budget_holds_for_one_answer_alone() -> None:
    ranks = Ranks(lambda settings: prediction(settings, live=10 * settings.batch_size, high_bytes=LIMIT // 2))
    found = ranks.finding().find(replace(NEEDS, limit_bytes=100 * MIB), budget_bytes=LIMIT // 4)
    assert found.fastest is None
    assert ranks.history.answers.instead_of(FAILED) is None


def test_of_a_budget_that_nothing_keeps_to_nothing_is_said_to_fit_barely() -> None:
    ranks = Ranks(lambda settings: prediction(settings, live=500))
    found = ranks.finding().find(replace(NEEDS, limit_bytes=100 * MIB), budget_bytes=100 * MIB)
    assert (found.fastest, found.barely) == (None, None)
    assert "none of these would fit" in found.words(FAILED)


def test_what_fits_here_is_not_said_in_place_of_what_was_predicted_for_a_gpu_elsewhere() -> None:
    class OfRanks(PredictsSettings):
        def __init__(self, history: History) -> None:
            self._life = cast(Lifecycle, SimpleNamespace(history=history, cluster=None))

    ranks = Ranks(roomy)
    session, here = OfRanks(ranks.history), prediction(FAILED)
    ranks.history.predicted(Asked(here, 0, FAILED, 0))
    assert session.instead(here) == here, "it fits"
    for other in (replace(NEEDS, limit_bytes=100 * MIB), replace(here, settings=HALF)):
        with pytest.raises(InvalidInput, match="is not of what is loaded now on these ranks"):
            session.instead(other)
    ranks.history.model_may_have_changed()
    ranks.history.predicted(Asked(replace(here, live_peak_bytes=MIB), 1, FAILED, 0))
    with pytest.raises(InvalidInput, match="predict again"):
        session.instead(here)


def test_why_several_changes_need_less_is_said_in_one_clause() -> None:
    all_at_once = Fit(HALF.replace(checkpointing="blocks", fusion_threshold_mib=4), 100 * MIB)
    said = instead_of(FAILED, 2, [all_at_once]).reason(FAILED)
    assert said.partition(", because ")[2] == (
        "backward recomputes activations that forward would keep, fewer samples are in memory at once and Horovod's "
        "buffer is smaller."
    )


def test_of_many_that_do_not_fit_few_are_named_so_that_the_card_shows_the_whole_sentence() -> None:
    quarter, eighth = (FAILED.replace(batch_size=n, accumulation_steps=32 // n) for n in (8, 4))
    tried = [Fit(one, None) for one in (HALF, BLOCKS, BF16, quarter, eighth)]
    said = instead_of(FAILED, 2, tried).words(FAILED)
    assert "checkpointing=blocks; precision=bf16; and so on down to batch_size=4 accumulation_steps=8. Use" in said
