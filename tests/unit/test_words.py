"""Ranks in words, folded cell output, completion."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpumem_nb.completion import complete_hvd
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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%hvd_set pre", ["precision="]),
        ("%hvd_set precision=", ["fp32", "fp16", "bf16"]),
        ("%hvd_set precision=b", ["bf16"]),
        ("%hvd_set batch_size=4 clip_norm=n", ["none"]),
        ("%hvd_load digits-s", ["digits-separable"]),
        ("%hvd_load digits-resnet wi", ["width="]),
        ("%hvd_start --device c", ["cuda", "cpu"]),
        ("%hvd_start --mem", ["--memory-limit"]),
        ("%hvd_attach lo", ["loss="]),
        ("%%hvd --r", ["--ranks"]),
        ("%hvd_memory --by m", ["module"]),
        ("%hvd_set", []),
        ("%hvd_stop ", []),
    ],
)
def test_completion_offers_names_and_values(line: str, found: list[str]) -> None:
    assert complete_hvd(None, SimpleNamespace(line=line)) == found
