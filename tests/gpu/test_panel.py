"""JupyterLab with the panel over a rank on a real GPU, where Chromium is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumem_nb.cluster.resources import visible_gpus

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed here")
pytest.importorskip("jupyterlab", reason="JupyterLab is not installed here")

from playwright.sync_api import Browser, expect

from tests.browser.conftest import chrome, lab
from tests.browser.lab import Lab
from tests.browser.panel_page import PanelPage, open_panel

pytestmark = pytest.mark.gpu
__all__ = ["chrome", "lab"]


@pytest.fixture(scope="module")
def panel(lab: Lab, chrome: Browser) -> Iterator[PanelPage]:
    if not visible_gpus():
        pytest.skip("there is no GPU here")
    panel = open_panel(lab, chrome, "gpu.ipynb", "s = gm.start(1, device='cuda')")
    yield panel
    panel.notebook.evaluate("s.stop()")
    panel.notebook.close()


def test_the_panel_trains_on_a_gpu_and_follows_a_flip(panel: PanelPage) -> None:
    panel.play()
    panel.wait_for_steps(3)
    panel.choose("precision", "bf16")
    panel.wait_for_steps(3)
    panel.pause()
    expect(panel.status).to_contain_text("Paused at step")
    name = panel.notebook.evaluate("s.ranks[0].device_name")
    assert name
    assert not panel.notebook.evaluate("s.ranks[0].virtual")
    assert "virtual" not in panel.page.locator(".gpumem-panel").inner_text()
    bars = {trace["name"]: trace["y"] for trace in panel.traces("x")}
    total_mib = panel.notebook.evaluate("s.memory().ranks[0].device_use.total_bytes") / 2**20
    assert 0 < bars["live now"][0] < bars["limit"][0]
    assert bars["limit"][0] == pytest.approx(total_mib, rel=0.02) or bars["limit"][0] * 1024 == pytest.approx(
        total_mib, rel=0.02
    )  # in MiB or GiB, as the chart's unit is
    for axis in ("x2", "x3", "x4"):
        for trace in panel.traces(axis):
            assert len(trace["x"]) > 2
