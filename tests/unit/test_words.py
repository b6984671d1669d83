"""Ranks in words, folded cell output."""

from __future__ import annotations

import pytest

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.ranklist import name_ranks, parse_ranks
from gpumem_nb.ui.cells import fold


@pytest.mark.parametrize(
    ("ranks", "words"), [([0], "rank 0"), ([0, 1, 2], "ranks 0-2"), ([3, 0, 1], "ranks 0-1,3"), ([0, 2], "ranks 0,2")]
)
def test_ranks_in_words_and_back(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words
    assert sorted(parse_ranks(words.split()[1])) == sorted(ranks)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1.5"])
def test_ranks_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="Write single ranks and ranges"):
        parse_ranks(text)


def test_identical_output_is_one_block() -> None:
    folded = fold([0, 1, 2, 3], ["same\n", "same\n", "one\ntwo\n", ""])
    assert folded == "[ranks 0-1] same\n[rank 2]\none\ntwo"
