"""The versions of the toolkit and of torch, for what must know them without importing the face or torch."""

from __future__ import annotations

import re
from functools import cache

__version__ = "0.1.0"


@cache
def torch_version() -> tuple[int, int]:
    """Return the first two numbers of the torch that is installed."""
    from importlib.metadata import version

    number = re.match(r"(\d+)\.(\d+)", version("torch"))
    assert number
    return int(number[1]), int(number[2])
