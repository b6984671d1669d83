"""JupyterLab and Chromium, started for a test or a screenshot and ended with everything below them."""

from __future__ import annotations

import ast
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from playwright.sync_api import Browser, Locator, Page, ViewportSize, sync_playwright

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_URL = "/user/somebody"  # as under a JupyterHub: whoever makes addresses by hand forgets it
TIMEOUT_S = 120.0  # at most; a busy machine needs many times as long as an idle one
_NOTEBOOK = "[...jupyterapp.shell.widgets('main')].find(one => one.sessionContext)"  # a docked panel may have the focus
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """The browser: ``CHROMIUM``, or the one on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield started
        started.close()


class Lab:
    """A JupyterLab of its own: folders, port and token are its own, and only this machine reaches it.

    Args:
        scale: how many pixels a picture has in place of one.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self.folder = Path(tempfile.mkdtemp(prefix="gpumem_nb-lab-"))
        self.root = self.folder / "notebooks"
        self.root.mkdir()
        self._set("apputils-extension/notification", '{"fetchNews": "false"}')
        # One that comes while a test saves makes JupyterLab ask whether the file that has changed is to be replaced.
        self._set("docmanager-extension/plugin", '{"autosave": false}')
        self._token = secrets.token_hex(16)
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}{BASE_URL}"
        log = (self.folder / "jupyter.log").open("w")
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self._port,
            "ServerApp.port_retries": 0,
            "ServerApp.base_url": BASE_URL,
            "ServerApp.root_dir": self.root,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": self._token,
            "LabApp.expose_app_in_browser": True,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self.process = psutil.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment(),
        )

    def _set(self, plugin: str, settings: str) -> None:
        file = self.folder / f"jupyter_config_dir/lab/user-settings/@jupyterlab/{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(settings)

    def _environment(self) -> dict[str, str]:
        own = {
            name: str(self.folder / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        }
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        return os.environ | own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def wait_until_up(self) -> None:
        """Return when it answers; raise with its log when it does not."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/api?token={self._token}", timeout=5).close()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"JupyterLab did not start: {(self.folder / 'jupyter.log').read_text()[-2000:]}")

    def stop(self) -> None:
        """End it, its kernels and their ranks, and remove its folder."""
        family = [self.process, *self.process.children(recursive=True)]
        self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Make a notebook; it names its kernel, so that JupyterLab does not ask for one."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        nbformat.write(notebook, self.root / name)

    def open(self, browser: Browser, name: str, width: int = 1400, height: int = 1500) -> Notebook:
        """Open a notebook in a page of its own and wait for its kernel."""
        size: ViewportSize = {"width": width, "height": height}
        page = browser.new_page(viewport=size, device_scale_factor=self._scale)
        page.set_default_timeout(TIMEOUT_S * 1000)
        # A workspace of its own: the shared one would open the notebooks of other pages too.
        page.goto(f"{self.url}/lab/workspaces/{Path(name).stem}/tree/{name}?token={self._token}")
        notebook = Notebook(self, page)
        notebook.wait_until_open()
        return notebook


@contextmanager
def started() -> Iterator[Lab]:
    """Start one and wait for it; end it."""
    lab = Lab()
    try:
        lab.wait_until_up()
        yield lab
    finally:
        lab.stop()


class Notebook:
    """A notebook open in JupyterLab, and a second line to its kernel."""

    def __init__(self, lab: Lab, page: Page) -> None:
        self._lab = lab
        self._client: BlockingKernelClient | None = None
        self.page = page

    def wait_until_open(self) -> None:
        """Wait for the cells and an idle kernel."""
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        self.page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel != null")
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()

    def run(self, number: int, wait: bool = True) -> Locator:
        """Run a cell as a person would, and wait for it; returns the cell."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)
        cell.locator(".jp-InputArea-editor .cm-content").click()
        self.page.keyboard.press("Control+Enter")
        if wait:
            cell.locator(".jp-InputPrompt", has_text="[").filter(has_not_text="*").filter(has_not_text="[ ]").wait_for()
        return cell

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the kernel; one that prints as a literal."""
        if self._client is None:
            kernel = self.page.evaluate(f"{_NOTEBOOK}.sessionContext.session.kernel.id")
            connection = self._lab.folder / "jupyter_runtime_dir" / f"kernel-{kernel}.json"
            self._client = BlockingKernelClient(connection_file=str(connection))
            self._client.load_connection_file()
            self._client.start_channels()
        reply = self._client.execute_interactive(
            "", user_expressions={"it": expression}, silent=True, timeout=TIMEOUT_S
        )
        answer = reply["content"]["user_expressions"]["it"]
        if answer["status"] != "ok":
            raise AssertionError(f"{expression}: {answer['ename']}: {answer['evalue']}")
        return ast.literal_eval(answer["data"]["text/plain"])

    def until(self, expression: str) -> None:
        """Wait until an expression is true in the kernel."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.evaluate(f"bool({expression})"):
            assert time.monotonic() < deadline, f"never became true: {expression}"
            self.page.wait_for_timeout(50)

    def clear_outputs(self) -> None:
        """Take away what all cells have shown."""
        self.page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
        self.page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")

    def theme(self, name: str) -> None:
        """Switch JupyterLab's theme."""
        self.page.evaluate("name => jupyterapp.commands.execute('apputils:change-theme', { theme: name })", name)
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)

    def reload(self) -> None:
        """Load the page again; the kernel goes on."""
        self.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
        self.page.reload()
        self.wait_until_open()

    def close(self) -> None:
        """End the kernel and close the page, unless it was closed."""
        if self._client is not None:
            self._client.stop_channels()
        if not self.page.is_closed():
            self.page.evaluate(f"{_NOTEBOOK}.sessionContext.shutdown()")
            self.page.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
