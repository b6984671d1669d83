"""A cell of what fits is applied, or it is said why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumem_nb.kernel.questions.fitting import Fitting
from gpumem_nb.planning.what_if import Cell, WhatFits
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB
from tests.unit.test_doctor import prediction

CELLS = (
    Cell("fp32", "none", 8, settings=Settings(batch_size=8)),
    Cell("bf16", "none", 0),
    Cell("fp32", "blocks", 0, unknown="one sample may need 1.2 GiB"),
)


def test_a_cell_sets_its_precision_its_checkpointing_and_its_micro_batch() -> None:
    changed: list[dict[str, Any]] = []
    WhatFits(CELLS, Settings(), None, {}, changed.append).apply("fp32", "none")
    assert changed == [{"precision": "fp32", "checkpointing": "none", "batch_size": 8}]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (("bf-16", "none"), "bf-16 none cannot be applied: it was not tried. What fits: fp32 none."),
        (("bf16", "none"), "not even one sample fits there. What fits: fp32 none."),
        (("fp16", "none"), "no fp16 here. What fits"),
        (("fp32", "blocks"), "fp32 blocks cannot be applied: one sample may need 1.2 GiB. What fits: fp32 none."),
    ],
)
def test_where_nothing_can_be_set_it_says_so(place: tuple[str, str], why: str) -> None:
    found = WhatFits(CELLS, Settings(), None, {("fp16", "none"): "no fp16 here."}, lambda changes: None)
    with pytest.raises(InvalidInput, match=why):
        found.apply(*place)


def test_what_cannot_be_said_to_fit_is_not_counted_as_nothing() -> None:
    found = WhatFits(CELLS, Settings(), None, {}, lambda changes: None)
    assert [row["largest_batch"] for row in found.records] == [8, 0, None]


def test_where_nothing_fits_it_says_what_one_sample_needs_at_least() -> None:
    plain, blocks = Settings(batch_size=1), Settings(batch_size=1, checkpointing="blocks")
    ran_out = prediction(plain, live=900, lower_bound=True, verdict="does not fit")
    cells = (
        Cell("fp32", "none", 0, predicted=ran_out),
        Cell("fp32", "blocks", 0, predicted=prediction(blocks, live=1100, verdict="does not fit")),
    )
    found = WhatFits(cells, Settings(), 1000 * MIB, {}, lambda changes: None)
    assert found.notes[-1] == "One sample needs 1.1 GiB with fp32, blocks."
    assert "more than 900.0 MiB with fp32, none" in WhatFits(cells[:1], Settings(), None, {}, print).notes[-1]
    assert [row["reserved_peak_bytes"] for row in found.records] == [None, None]


def test_stop_while_another_way_of_the_update_is_looked_for_keeps_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("foreground", "policy", "origin", "record", "snapshots")
    predicting = SimpleNamespace(of_any_batch=lambda knobs: (Settings(), 64))
    history = SimpleNamespace(loaded_as=0, model_version=0, readings=[None])
    training = SimpleNamespace(settings=Settings(), workload=None)
    held: Any = dict.fromkeys(parts) | {"predicting": predicting, "history": history, "training": training}
    fitting = Fitting(cast(Any, SimpleNamespace(ranks=SimpleNamespace(infos=[]), **held)))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "_cell", lambda now, place, *_: Cell(place[0], place[1], 0))
    monkeypatch.setattr(fitting, "_instead", stopped)
    found = fitting.what_fits(lambda what, done: None, lambda now: lambda knobs: None)
    assert [cell.precision for cell in found.cells] == ["fp32", "fp16", "bf16", "bf16_weights"]
    assert found.instead is None
