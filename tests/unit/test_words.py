"""Ranks in words, folded cell output."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.units import choose_ranks, name_ranks, parse_ranks
from gpumem_nb.ui import cells
from gpumem_nb.ui.cells import CellOutput, fold


@pytest.mark.parametrize(
    ("ranks", "words"), [([0], "rank 0"), ([0, 1, 2], "ranks 0-2"), ([3, 0, 1], "ranks 0-1,3"), ([0, 2], "ranks 0,2")]
)
def test_ranks_in_words_and_back(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words
    assert sorted(parse_ranks(words.split()[1], size=4)) == sorted(ranks)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1.5", "²", "1" * 5000])
def test_ranks_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="Write single ranks and ranges"):
        parse_ranks(text, size=4)


def test_a_range_that_runs_backwards_is_told_the_right_way_round() -> None:
    with pytest.raises(InvalidInput, match=r"the range 3-1 runs backwards\. Write 1-3\."):
        parse_ranks("3-1", size=4)


@pytest.mark.parametrize("ranks", ["4", "0-4", "0-999999999999", 4, -1, [0, 4], range(10**12), [], {4}])
def test_ranks_that_are_not_there_are_refused_at_once(ranks: Any) -> None:
    with pytest.raises(InvalidInput, match="there are ranks 0-3") as caught:
        choose_ranks(ranks, size=4)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(None, None), (1, [1]), (np.int64(2), [2]), ("3,0-1", [0, 1, 3]), ([3, 0, 3], [0, 3]), (range(2), [0, 1])],
)
def test_ranks_are_chosen_by_number_numbers_or_text(ranks: Any, chosen: list[int] | None) -> None:
    assert choose_ranks(ranks, size=4) == chosen


@pytest.mark.parametrize("ranks", [True, 1.5, [1.5], [True], ["1"], {}, {"a": 1}, b"1", object()])
def test_what_cannot_be_ranks_is_refused_in_a_sentence(ranks: Any) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be read\. Write single ranks and ranges"):
        choose_ranks(ranks, size=4)


def test_identical_output_is_one_block() -> None:
    folded = fold([0, 1, 2, 3], ["same\n", "same\n", "one\ntwo\n", ""])
    assert folded == "[ranks 0-1] same\n[rank 2]\none\ntwo"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\r  0%|\r 50%|\r100%|", "100%|"),
        ("\r  0%|\r100%|\nloss 1\n", "100%|\nloss 1"),
        ("of Windows\r\ntwo\r\n", "of Windows\ntwo"),
        ("half\r", "half"),
    ],
)
def test_a_line_that_is_written_anew_takes_the_place_of_itself(printed: str, shown: str) -> None:
    assert fold([0], [printed]).split("]", 1)[1].strip() == shown


class Printed:
    """A call of a cell that displays the same on two ranks."""

    ranks = (0, 1)

    def outputs(self) -> list[str]:
        return ["loss 0.5", "loss 0.5\n"]

    def displays(self) -> list[list[Any]]:
        return [[{"text/plain": "a figure"}]] * 2


def test_what_a_cell_printed_and_what_it_gave_are_on_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    CellOutput(quiet=False).finish(cast(Any, Printed()), ["42", "42"])
    assert capsys.readouterr().out.startswith("[ranks 0-1]\nloss 0.5\n42\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_what_a_cell_displayed_before_it_failed_is_shown(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(cells, "display", lambda bundle, **_: shown.append(bundle["text/plain"]))
    output = CellOutput(quiet)
    output.failed()  # before it was asked for
    output(cast(Any, Printed()))
    output.failed()
    assert shown == ([] if quiet else ["[ranks 0-1]", "a figure"])
