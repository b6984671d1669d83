"""The button that applies what the tuner found: made on another thread, and what came of it is said beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.tune_view import ApplyView
from gpumem_nb.ui.widgets import Region
from tests.internals import widgets_in
from tests.timing import until
from tests.unit.tuned_machine import tuned


@pytest.fixture(scope="module")
def found() -> TuneResult:
    result: TuneResult = tuned(Settings(batch_size=8, accumulation_steps=8), 600)[0]
    return result


def _button(view: ApplyView) -> Any:
    [button] = [one for one in widgets_in(view.view) if type(one).__name__ == "Button"]
    return button


def _said(view: ApplyView) -> str:
    [region] = [one for one in widgets_in(view.view) if isinstance(one, Region)]
    return str(region.html)


def test_a_press_applies_the_best_away_from_the_page(found: TuneResult) -> None:
    applied: list[dict[str, Any]] = []
    queue: list[Callable[[], object]] = []
    view = ApplyView(dataclasses.replace(found, _set=applied.append), queue.append)
    button = _button(view)
    assert button.description == "Apply"
    button.click()
    assert button.disabled
    assert applied == [], "not on the page's own thread"
    queue.pop()()
    assert found.best is not None
    assert applied[0].items() >= found.best.settings.changed_from(found.present).items()
    assert "Changed" in _said(view)


def test_by_itself_it_uses_a_thread(found: TuneResult) -> None:
    applied: list[dict[str, Any]] = []
    view = ApplyView(dataclasses.replace(found, _set=applied.append))
    assert _button(view).description == f"Apply {found.typed}"
    _button(view).click()
    until(lambda: "Changed" in _said(view))
    assert len(applied) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [(InvalidInput("Load <it> again."), "Load &lt;it&gt; again."), (OSError("gone"), "OSError: gone")],
)
def test_what_is_refused_is_said_and_may_be_tried_again(found: TuneResult, error: Exception, said: str) -> None:
    def refuse(_: dict[str, Any]) -> None:
        raise error

    view = ApplyView(dataclasses.replace(found, _set=refuse), lambda action: action())
    _button(view).click()
    assert said in _said(view)
    assert not _button(view).disabled


def test_a_saved_page_says_what_to_type(found: TuneResult) -> None:
    bundle = ApplyView(found)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert f"%hvd_set {found.typed}" in bundle["text/html"]
    assert f"%hvd_set {found.typed}" in bundle["text/plain"]
