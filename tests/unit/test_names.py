"""Cells find what is trained under names that nobody holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from gpumem_nb.engine import building, rank
from gpumem_nb.engine.cells import OfferedNames, attached_names, taken
from gpumem_nb.shared.errors import WorkloadError


def test_free_names_are_offered_kept_up_and_taken_away_again() -> None:
    variables: dict[str, Any] = {"rank": 0}
    names, first, second = OfferedNames(variables), nn.Linear(1, 1), nn.Linear(1, 1)
    assert names.offer({"model": first}) == []
    assert variables["model"] is first
    assert names.offer({"model": second}) == []
    assert variables["model"] is second
    names.withdraw()
    assert variables == {"rank": 0}


def test_a_name_that_somebody_holds_is_left_alone() -> None:
    own, trained = nn.Linear(1, 1), nn.Linear(1, 1)
    variables: dict[str, Any] = {"model": own}
    names = OfferedNames(variables)
    assert names.offer({"model": trained, "optimizer": trained}) == ["model"]
    assert variables["model"] is own
    names.withdraw()
    assert variables == {"model": own}


def test_a_name_that_somebody_took_over_is_theirs_until_they_delete_it() -> None:
    variables: dict[str, Any] = {}
    names, trained = OfferedNames(variables), nn.Linear(1, 1)
    names.offer({"model": trained})
    for taken_over in (None, nn.Linear(1, 1)):
        variables["model"] = taken_over
        assert names.offer({"model": trained}) == ["model"]
        assert variables["model"] is taken_over
    del variables["model"]
    assert names.offer({"model": trained}) == []
    assert variables["model"] is trained


def test_a_name_that_a_cell_takes_over_is_told_once() -> None:
    variables: dict[str, Any] = {}
    names, trained = OfferedNames(variables), nn.Linear(1, 1)
    names.offer({"model": trained, "optimizer": nn.ReLU()})
    assert names.taken_over() == []
    variables |= {"model": nn.Linear(1, 1), "optimizer": "of another kind"}
    assert names.taken_over() == ["model"]
    assert names.taken_over() == []
    del variables["model"]
    names.offer({"model": trained})
    assert names.taken_over() == []
    assert "which training does not use: model" in taken(["model"])


def test_what_is_trained_under_the_name_of_its_own_stays_when_something_else_is() -> None:
    own, other = nn.Linear(1, 1), nn.Linear(1, 1)
    variables: dict[str, Any] = {"model": own}
    names = OfferedNames(variables)
    assert names.offer({"model": own}) == []
    names.withdraw()
    assert names.offer({"model": other}) == ["model"]
    assert variables["model"] is own


def test_a_name_taken_over_keeps_nothing_alive() -> None:
    variables: dict[str, Any] = {}
    names = OfferedNames(variables)
    names.offer({"model": nn.Linear(1, 1)})
    variables["model"] = None  # the toolkit's is gone now
    assert names.offer({"model": nn.Linear(1, 1)}) == ["model"]
    assert variables["model"] is None


def test_the_sentence_says_how_to_get_there() -> None:
    assert "After `del model, optimizer` in a %%hvd cell" in taken(["model", "optimizer"])


def test_where_the_next_model_cannot_be_built_nothing_stays_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise WorkloadError("The model has no trainable parameters.")

    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    attached_names.attached({"model": "net"}, {"net": old})
    monkeypatch.setattr(rank, "_device", SimpleNamespace(empty_cache=list), raising=False)
    monkeypatch.setattr(building, "prepare", lambda *_: (None, None, None))
    monkeypatch.setattr(building, "build", fails)
    with pytest.raises(WorkloadError):
        rank.load(b"", 0)
    assert attached_names.replaced({"net": new}) == "", "nothing is trained, so there is no old model to speak of"
