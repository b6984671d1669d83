"""What the doctor says of memory and time given for nothing: on evidence made by hand, and through its asking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_nb.planning.prediction import DOES_NOT_FIT, TIGHT
from gpumem_nb.report.bottleneck import Bottleneck
from gpumem_nb.shared.settings import Settings
from tests.unit.test_doctor import causes, prediction
from tests.unit.test_doctor_asks import Session

CHECKPOINTED = Settings(checkpointing="blocks")


def kept(**of: Any) -> dict[str, Any]:
    """Evidence of a session with checkpointing, and what is predicted of it without."""
    values = {"live": 300, "samples_per_s": 140.0, "low_samples_per_s": 130.0}
    return {"settings": CHECKPOINTED, "all_kept": prediction(**values | of)}


def test_checkpointing_that_is_not_needed_is_found_where_all_activations_fit_with_room_and_steps_are_faster() -> None:
    assert causes(**kept()) == ["checkpointing is not needed"]
    assert causes(**kept(limit_bytes=None, verdict="n/a")) == ["checkpointing is not needed"]
    assert causes(**kept(live=860)) == [], "memory would be scarce"
    assert causes(**kept(verdict=TIGHT)) == []
    assert causes(**kept(verdict=DOES_NOT_FIT)) == []
    assert causes(**kept(low_samples_per_s=99.0)) == [], "perhaps no faster"
    assert causes(**kept(samples_per_s=103.0, low_samples_per_s=102.0)) == [], "hardly faster"


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_the_doctor_asks_what_steps_need_without_checkpointing_and_offers_that(mode: str) -> None:
    session = Session(settings=Settings(checkpointing=mode))

    def predicts(settings: Settings) -> Any:
        faster = {"samples_per_s": 150.0, "low_samples_per_s": 145.0, "live": 200}
        return prediction(settings, **faster if settings.checkpointing == "none" else {})

    session.predicts = predicts
    found = session.finding()
    assert found.cause == "checkpointing is not needed"
    assert found.flip
    assert found.flip.changes == {"checkpointing": "none"}
    assert "150 samples/s (+50)" in found.helps
    session.verdicts = [Bottleneck("no core", 0.2, "Others.")]
    assert [one.cause for one in session.examine().findings] == ["no core"], "how fast steps are is not known"
    session.verdicts = []
    session.predicts = lambda settings: dataclasses.replace(predicts(settings), verdict=TIGHT)
    assert "checkpointing is not needed" not in [one.cause for one in session.examine().findings]
