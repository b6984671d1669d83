"""JupyterLab and a browser, once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from .lab import Lab, browser, chromium


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        missing = "No chromium was found: install it (apt-get install chromium), or name one with CHROMIUM=/path/to/it."
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with browser(path) as started:
        yield started


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    started = Lab()
    try:
        started.wait_until_up()
        yield started
    finally:
        started.stop()
