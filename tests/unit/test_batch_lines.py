"""Peaks against the batch size, as a picture."""

from __future__ import annotations

import re

from gpumem_nb.ui.pictures import batch_lines

MIB = 2**20
LINES = {"as it is": {8: 20 * MIB, 32: 40 * MIB, 128: 400 * MIB}, "a <b>": {8: 10 * MIB, 32: 20 * MIB, 128: 60 * MIB}}


def points(drawn: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r"<polyline points='([^']*)'", drawn)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in lines]


def test_more_memory_is_higher_and_a_larger_batch_is_further_right() -> None:
    first, second = points(batch_lines(LINES, 32, 100 * MIB))
    for line in (first, second):
        assert [x for x, _ in line] == sorted(x for x, _ in line)
        assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)
    assert all(one[1] < other[1] for one, other in zip(first, second, strict=True))


def test_the_limit_lies_between_what_fits_and_what_does_not() -> None:
    drawn = batch_lines(LINES, 32, 50 * MIB)
    limit = float(re.findall(r"y1='([\d.]+)' y2='[\d.]+' stroke='#D55E00'", drawn)[0])
    first, second = points(drawn)
    assert first[1][1] > limit > first[2][1]
    assert second[1][1] > limit > second[2][1]
    assert ">50.0 MiB<" in drawn


def test_a_limit_far_above_all_of_it_is_left_out() -> None:
    assert "#D55E00" not in batch_lines(LINES, 32, 10_000 * MIB)
    assert "#D55E00" not in batch_lines(LINES, 32, None)


def test_names_are_words_and_nothing_is_no_picture() -> None:
    assert "a &lt;b&gt;" in batch_lines(LINES, 32, None)
    assert batch_lines({}, 32, None) == ""
    assert len(points(batch_lines({"one": {4: MIB}}, 4, None))[0]) == 1
