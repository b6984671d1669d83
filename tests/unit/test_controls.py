"""The controls: which are seen at once, and which behind a button."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.knobs.communication import COMMUNICATION_KNOBS
from gpumem_nb.ui.controls import Controls
from tests.unit.test_flip_predictions import Session, load
from tests.unit.test_flip_predictions import session as session


def named(box: Any) -> list[str]:
    return [knob.children[0].description for knob in box.children]


def test_beginners_see_five_and_each_fold_opens_with_its_button(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    assert len(named(controls.knobs)) == 5
    folds = {fold.description: box for fold, box in zip(controls.buttons.children[3:], controls.folds, strict=True)}
    assert named(folds["communication"]) == [*(knob.name for knob in COMMUNICATION_KNOBS if knob.fold), "autotune"]
    shown = {*named(controls.knobs), *(name for box in folds.values() for name in named(box))}
    assert shown == {*KNOBS, "autotune"} - {"cache_capacity", "hierarchical_allreduce", "torus_allreduce"}
    assert all(box.layout.display == "none" for box in folds.values())
    for toggle in controls.buttons.children[3:]:
        toggle.value = True
        assert folds[toggle.description].layout.display == ""
    controls.buttons.children[3].value = False
    assert folds[controls.buttons.children[3].description].layout.display == "none"
    assert folds["communication"].layout.display == ""


def test_autotune_is_switched_beside_them_and_shows_when_it_has_ended(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    switch = next(fold for fold in controls.folds if "autotune" in named(fold)).children[-1].children[0]
    controls.follow()
    assert switch.value == "off"
    assert not queue, "nobody has asked for anything yet"
    switch.value = "on"
    queue.pop()()
    assert session.policy.autotune
    controls.follow()
    assert switch.value == "on"
    session.set(autotune="off")
    controls.follow()
    assert switch.value == "off"
    assert not queue


@pytest.mark.parametrize(("name", "there", "back"), [("precision", "bf16", "fp32"), ("autotune", "on", "off")])
def test_a_choice_that_is_taken_back_before_it_was_made_is_made_and_taken_back(
    session: Session, name: str, there: str, back: str
) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    boxes = [*controls.knobs.children, *(knob for fold in controls.folds for knob in fold.children)]
    control = next(knob.children[0] for knob in boxes if knob.children[0].description == name)
    controls.follow()
    control.value = there
    control.value = back  # a question to the ranks is under way meanwhile
    for action in queue:
        action()
    controls.follow()
    assert control.value == back
    assert not session.policy.autotune
    assert session.settings.precision == "fp32"


def test_that_a_flip_will_not_fit_is_said_again_of_another_model(session: Session) -> None:
    controls = Controls(session, lambda action: action(), lambda action: None)  # type: ignore[arg-type]
    knob = next(knob for knob in controls.knobs.children if knob.children[0].description == "batch_size")
    control, said = knob.children[:2]
    for _ in range(2):
        session.predict(batch_size=256)
        controls.follow()
        assert said.html == "", "nothing is left of the model before"
        control.value = "256"
        assert "Choose it again to flip anyway" in said.html
        assert session.settings.batch_size == 32
        controls.follow()
        load(session)
    session.predict(batch_size=256)
    controls.follow()
    for _ in range(2):
        control.value = "256"
        controls.follow()
    assert session.settings.batch_size == 256
