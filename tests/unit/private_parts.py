"""Checks of private parts of other packages, collected by package and part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[], Any]
CHECKS: list[tuple[str, str, Check]] = []


def checks(package: str, what: str) -> Callable[[Check], Check]:
    """What stands below checks this part of that package."""

    def add(check: Check) -> Check:
        CHECKS.append((package, what, check))
        return check

    return add


def must(condition: object, why: str) -> None:
    if not condition:
        raise AssertionError(why)
