"""The controls: which are seen at once, and which are unfolded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.knobs.communication import COMMUNICATION_KNOBS
from gpumem_nb.ui.controls import Controls
from gpumem_nb.ui.knob_tip import CLASS
from tests.unit.test_knob_tip import Session, load
from tests.unit.test_knob_tip import session as session


def named(box: Any) -> list[str]:
    return [
        next(name.removeprefix(CLASS) for name in knob._dom_classes if name.startswith(CLASS)) for knob in box.children
    ]


def knob(controls: Controls, name: str) -> Any:
    """The box of a knob."""
    boxes = [controls.knobs, *(fold.children[1] for fold in controls.further)]
    return next(one for box in boxes for one, of in zip(box.children, named(box), strict=True) if of == name)


def test_beginners_see_five_and_all_others_are_unfolded_under_headings(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    assert len(named(controls.knobs)) == 5
    folds = {fold.children[0].html: named(fold.children[1]) for fold in controls.further}
    assert folds["Communication"] == [*(one.name for one in COMMUNICATION_KNOBS if one.fold), "autotune"]
    shown = {*named(controls.knobs), *(name for names in folds.values() for name in names)}
    assert shown == {*KNOBS, "autotune"} - {"cache_capacity", "hierarchical_allreduce", "torus_allreduce"}


def test_autotune_is_switched_beside_them_and_shows_when_it_has_ended(session: Session) -> None:
    queue: list[Callable[[], object]] = []
    controls = Controls(session, queue.append, queue.append)  # type: ignore[arg-type]
    switch = knob(controls, "autotune").children[0]
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
    control = knob(controls, name).children[0]
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
    control, said = knob(controls, "batch_size").children
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
