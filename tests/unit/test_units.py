from __future__ import annotations

import threading

import pytest

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.units import checked_seconds, format_bytes, format_duration, parse_size, typed_size


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("0.5 KiB", 512),
        ("1tib", 2**40),
        ("3MB", 3_000_000),
        ("1234", 1234),
        ("7 B", 7),
        (4096, 4096),
    ],
)
def test_a_size_means_its_bytes(text: str | int, n: int) -> None:
    assert parse_size(text) == n


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "2 GiBs",
        "two",
        "-1GiB",
        "0",
        "0.1 B",
        "1.5",
        "4.0",
        "1e9",
        "inf",
        "nan",
        "1,5GB",
        "2000 TiB",
        "9" * 400,
        "٣GiB",
    ],
)
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not a memory size: it must be .*GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 ms"), (0.6174, "617 ms"), (0.9996, "1.00 s"), (2.345, "2.35 s"), (9.996, "10.0 s"), (14.617, "14.6 s")],
)
def test_a_duration_is_told_in_milliseconds_up_to_a_second(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


@pytest.mark.parametrize("value", [0, -5, True, 2**60, None, 1.5])
def test_numbers_that_are_no_size_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="is not a memory size"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (int(287.4 * 2**20), "287.4 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (2 * 2**30, "2.0 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(n: int | None, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(4 * 2**30, "4GiB"), (1536 * 2**20, "1536MiB"), (5_000_000_000, "5GB"), (2**20 + 1, "1048577"), (1024, "1KiB")],
)
def test_a_size_is_told_as_it_can_be_typed(n: int, text: str) -> None:
    assert typed_size(n) == text
    assert parse_size(text) == n


def test_more_seconds_than_can_be_waited_are_as_many_as_can() -> None:
    assert checked_seconds("timeout", 10**400, 30) == checked_seconds("timeout", 1e12, 30) <= threading.TIMEOUT_MAX
    assert checked_seconds("timeout", 90, 30) == 90
    with pytest.raises(InvalidInput, match="must be a number of seconds above 0"):
        checked_seconds("timeout", -(10**400), 30)
