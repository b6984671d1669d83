"""The browser is closed, then JupyterLab is stopped: ranks outlive the one, nothing outlives the other."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser

from .lab import PATIENCE_S, Lab
from .panel_page import open_panel

pytestmark = pytest.mark.browser
GONE_S = 15.0  # the server waits for its kernel; ranks that lost theirs end within ten seconds


def test_a_closed_browser_leaves_the_ranks_and_a_stopped_jupyterlab_leaves_nothing(chrome: Browser) -> None:
    own = Lab()
    try:
        own.wait_until_up()
        panel = open_panel(own, chrome, "stopped.ipynb", "s = gm.start(2, device='cpu', memory_limit='96MiB')")
        panel.press("Play")
        panel.wait_for_steps(2)
        steps = panel.notebook.evaluate("s.history.steps")
        panel.page.close()
        deadline = time.monotonic() + PATIENCE_S
        while panel.notebook.evaluate("s.history.steps") <= steps:
            assert time.monotonic() < deadline, "training must go on without a browser"
        folders = panel.notebook.evaluate("list(s._ranks._launched._record.folders)")
        assert all(Path(folder).exists() for folder in folders)
        family = own.process.children(recursive=True)
        assert len([process for process in family if "ipyparallel" in " ".join(process.cmdline())]) >= 3
        own.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=GONE_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not [folder for folder in folders if Path(folder).exists()]
    finally:
        own.stop()
