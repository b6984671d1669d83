"""JupyterLab and a browser, for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from .lab import TIMEOUT_S, Lab, browser, chromium, started

expect.set_options(timeout=TIMEOUT_S * 1000)  # playwright's own 5 s are too short for a busy machine


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        missing = "No chromium was found: install it (apt-get install chromium), or name one with CHROMIUM=/path/to/it."
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with browser(path) as chrome:
        yield chrome


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with started() as lab:
        yield lab
