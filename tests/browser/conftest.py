"""JupyterLab and a browser, once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from playwright.sync_api import Browser

from .lab import Lab, browser, chromium


@pytest.fixture(scope="package")
def chrome() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        missing = "No chromium was found: install it (apt-get install chromium), or name one with CHROMIUM=/path/to/it."
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with browser(path) as started:
        yield started


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    started = Lab()
    try:
        started.wait_until_up()
        yield started
    finally:
        started.stop()


@pytest.fixture(autouse=True, scope="module")
def no_process_left(lab: Lab) -> Iterator[None]:
    """After each module no kernel and no rank runs any more; server and browser go on."""
    yield
    _, alive = psutil.wait_procs(lab.process.children(recursive=True), timeout=10)
    assert not alive, [process.cmdline() for process in alive]
