"""In which order tests of ranks run: ranks are started again as rarely as can be."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that bring ranks of their own come first, then those that share two, then those that share four."""
    items.sort(key=_number_shared)


def _number_shared(item: pytest.Item) -> int:
    fixtures = getattr(item, "fixturenames", ())
    return 4 if "four_ranks" in fixtures else 2 if "two_ranks" in fixtures else 0
