"""What the panel costs with 64 ranks: a share of a core in the notebook's kernel, and memory there and in the browser.

``python -m tests.bench.many_ranks --minutes 60`` takes an hour. So many ranks do not run on one machine: their samples
are made beforehand and reach the history as those of real ranks do, one step of all ranks in each quarter of a second.
History, panel, kernel, JupyterLab and browser are the real ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import threading
import time
from typing import Any

import psutil

from gpumem_nb.shared.messages import Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.units import format_bytes
from gpumem_nb.ui.panel import Panel
from tests.bench.figures import Figure, say
from tests.browser.lab import Notebook, browser, started
from tests.browser.panel_page import PanelPage
from tests.ledgers import MIB, info, ledger, reading, sample
from tests.unit.test_panel import Session

RANKS, RATE_HZ = 64, 4
MADE = 400  # steps; afterwards the same come again, under numbers that go on
RECORDED_EVERY = 20
WARM_UP_S = 60.0  # what is kept for good has come by then: 240 steps are drawn
CELLS = ("from tests.bench.many_ranks import Fed\nfed = Fed()", "fed.shown()")


class Fed(Session):
    """A session whose ranks seem to train, up to a step where one is named."""

    def __init__(self, ranks: int = RANKS, steps: float = math.inf) -> None:
        from gpumem_nb.kernel.history import History

        super().__init__()
        self.size, self.playing, self.doing = ranks, True, "training"
        self.last = steps
        self.ranks = tuple(info(rank) for rank in range(ranks))  # type: ignore[assignment]
        self.history = History(ranks)
        self.history.mark("load", "mine")
        self.history.begin(1, "mine", Settings())
        self.readings = [reading(limit=96 * MIB) for _ in range(ranks)]
        self.made = [self._step(number) for number in range(1, MADE + 1)]

    def _step(self, number: int) -> list[Sample]:
        recorded = ledger() if number % RECORDED_EVERY == 1 else None
        live = {"live_peak_bytes": 40 * MIB, "loss": 1 / number, "step_s": 0.1 + number % 7 / 100}
        return [sample(number, rank, recorded, **live) for rank in range(self.size)]

    def shown(self) -> Any:
        """Show the panel and begin."""
        panel: Any = Panel(self)  # type: ignore[arg-type]
        threading.Thread(target=self._train, daemon=True).start()
        panel.show(self)
        return panel

    def _train(self) -> None:
        began_s = time.monotonic()
        while (done := self.history.steps) < self.last:
            time.sleep(max(0.0, began_s + done / RATE_HZ - time.monotonic()))
            of_ranks = self.made[done % MADE]
            if done >= MADE:
                of_ranks = [dataclasses.replace(one, step=done + 1) for one in of_ranks]
            self.history.add(of_ranks, self.readings)


def figures(minutes: float) -> list[Figure]:
    """The kernel's share of a core, and what its memory and the page's grow by after the first minute."""
    chromium = shutil.which("chromium") or sys.exit("No chromium was found.")
    with started() as lab, browser(chromium) as chrome:
        lab.write("many.ipynb", CELLS)
        notebook = lab.open(chrome, "many.ipynb", 1366, 768)
        for number in range(len(CELLS)):
            said = notebook.run(number).inner_text()
            assert "Traceback" not in said, said
        PanelPage(notebook).wait_until_shown()
        kernel, page = psutil.Process(notebook.evaluate("__import__('os').getpid()")), _Page(notebook)
        notebook.page.wait_for_timeout(WARM_UP_S * 1000)
        before, heap, began_s, spent_s = kernel.memory_info().rss, page.heap(), time.monotonic(), _cpu_s(kernel)
        shares, steps = list[float](), notebook.evaluate("fed.history.steps")
        for _ in range(max(1, round(minutes))):
            notebook.page.wait_for_timeout(60_000 * min(1.0, minutes))
            now_s, now_spent_s = time.monotonic(), _cpu_s(kernel)
            shares.append(100 * (now_spent_s - spent_s) / (now_s - began_s))
            began_s, spent_s = now_s, now_spent_s
            now_heap, now_rss = page.heap(), kernel.memory_info().rss
            say(f"{shares[-1]:.1f} % of a core, kernel {format_bytes(now_rss)}, page {format_bytes(now_heap)}")
        # By another line to the kernel: what was drawn meanwhile waits in the first.
        steps = Notebook(lab, notebook.page).evaluate("fed.history.steps") - steps
        kernel_mib, page_mib = (kernel.memory_info().rss - before) / MIB, (page.heap() - heap) / MIB
        over = f"{steps} steps of {RANKS} ranks in {minutes:g} minutes"
        notebook.close()
    return [
        Figure(f"panel of {RANKS} ranks at {RATE_HZ} Hz: of a core in the kernel", "≤ 10 %", " %", shares, over),
        Figure("the same: growth of the kernel", "≤ 20 MiB", " MiB", [kernel_mib], f"from {format_bytes(before)}"),
        Figure("the same: growth of the page's heap", "≤ 20 MiB", " MiB", [page_mib], f"from {format_bytes(heap)}"),
    ]


class _Page:
    """What a page holds, after its garbage was collected."""

    def __init__(self, notebook: Notebook) -> None:
        self._tools = notebook.page.context.new_cdp_session(notebook.page)
        self._tools.send("Performance.enable")

    def heap(self) -> int:
        self._tools.send("HeapProfiler.collectGarbage")
        metrics = self._tools.send("Performance.getMetrics")["metrics"]
        return int(next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize"))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    for figure in figures(parser.parse_args().minutes):
        print(f"{figure.name}: {figure.measured} ({figure.target}; {figure.details})")
