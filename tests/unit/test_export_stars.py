"""Imports of everything of Python's own modules: a script imports what it uses of it, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_nb.export.order import Source
from gpumem_nb.export.selecting import selected
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell
from gpumem_nb.shared.settings import Settings

from .test_export_script import OWN, written


def found(*cells: Cell | str) -> Source:
    whole = [Cell(one) if isinstance(one, str) else one for one in cells]
    return selected(whole, ["net"], 0, forgotten=False)


@pytest.mark.parametrize(
    "cells",
    [
        ("from math import *", "net = [int(sqrt(9)), pi]"),
        ("from typing import *", "def make(x: Optional[int]): return [x]", "net = make(1)"),
        ("from math import *\nnet = [sqrt(9)]", "e = 3\nnet.append(e)"),
        ("from math import *", "from cmath import *", "net = [sqrt(9), ceil(2.5)]"),
        ("import os; from math import *; from time import *", "net = [sqrt(9)]"),
        ("from os.path import *", "from math import *", "net = [join('a', 'b'), sqrt(4)]"),
        ("def sqrt(x): return x", "from math import *", "net = [sqrt(4)]"),
        ("from os import *", "environ['A'] = 'b'", "net = [1]"),
    ],
)
def test_an_import_of_everything_of_pythons_own_stays_as_it_is(cells: tuple[str, ...]) -> None:
    text = found(*cells).definitions
    assert all(cell in text for cell in cells if "*" in cell)
    names: dict[str, object] = {}
    exec(text, names)
    direct: dict[str, object] = {}
    exec("\n".join(cells), direct)
    assert names["net"] == direct["net"]


def test_an_import_of_everything_that_nothing_is_used_of_is_left_out() -> None:
    assert found("from math import *", "net = [1]").definitions == "net = [1]"


def test_what_such_an_import_does_not_bring_is_missing_as_anything_else() -> None:
    with pytest.raises(WorkloadError, match=r"needs thing.*no %%hvd cell"):
        found("from math import *", "net = thing()")
    with pytest.raises(WorkloadError, match=r"needs thing.*imports \*"):
        found("from math import *\nfrom layers import *", "net = thing()")


def test_one_name_with_two_meanings_is_refused_there_too() -> None:
    with pytest.raises(WorkloadError, match="What sqrt is cannot be told"):
        found("def sqrt(x): return x", Cell("from math import *\n1 / 0", finished=False), "net = [sqrt(4)]")
    kept = found("from random import *", "net = [random()]")
    with pytest.raises(WorkloadError, match=r"both call something random.*by its name instead of \*"):
        written(Settings(), replace(OWN, definitions=kept.definitions))


def test_two_meanings_of_a_name_are_there_in_their_order() -> None:
    cells = ("def sqrt(x): return x\nnet = [sqrt(4)]", "from math import *\nnet.append(sqrt(4))")
    inside = ("e = 3", "try:\n    from math import *\nexcept ImportError:\n    pass", "net = [e]")
    for code in (cells, inside):
        here: dict[str, object] = {}
        there: dict[str, object] = {}
        exec(found(*code).definitions, here)
        exec("\n".join(code), there)
        assert here["net"] == there["net"]
