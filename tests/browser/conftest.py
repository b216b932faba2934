"""A real JupyterLab on a copy of the notebooks, and a real browser."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
# Asks, in front of the notebook, whether one wants news from Jupyter.
QUIET = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}


@pytest.fixture(scope="session")
def lab(tmp_path_factory, request) -> Iterator[tuple[str, Path]]:
    """(address, folder) of a JupyterLab that serves a copy of notebooks/; it ends with the tests."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder) if (ROOT / "notebooks").is_dir() else folder.mkdir()
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(QUIET))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
                "IPYTHONDIR": "ipython"}
    settings = {name: str(home / place) for name, place in settings.items()}
    log = open(home / "log", "w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
         f"--port={port}", "--ServerApp.token=", f"--ServerApp.root_dir={folder}",
         "--LabApp.expose_app_in_browser=True"],
        env=os.environ | settings, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{address}/api/status", server, home / "log")
        yield address, folder
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def _wait(url: str, server: subprocess.Popen, log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"JupyterLab does not answer at {url}:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def browser(chromium_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        yield made
        made.close()


class Notebook:
    """A notebook open in the browser."""

    def __init__(self, page, address: str, name: str):
        self.page = page
        page.goto(f"{address}/lab/tree/{name}?reset", wait_until="domcontentloaded")
        page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length > 0",
                               timeout=120_000)
        page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=120_000)

    def run_all(self, seconds: float) -> None:
        """Run every cell from the top and wait until the last has its count."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(
            """() => {
                const cells = window.jupyterapp.shell.currentWidget.content.widgets.map(w => w.model)
                const code = cells.filter(m => m.type === 'code' && m.sharedModel.source.trim())
                return code.every(m => m.executionCount) || code.some(m =>
                    m.sharedModel.outputs.some(o => o.output_type === 'error'))
            }""", timeout=seconds * 1000)

    def errors(self) -> list[str]:
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.map(w => w.model)
                .filter(m => m.type === 'code').flatMap(m => m.sharedModel.outputs)
                .filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)""")

    def see(self, text: str):
        """Scroll to an output that says `text`; fails where none does."""
        place = self.page.locator(".jp-OutputArea-output", has_text=text).first
        place.scroll_into_view_if_needed(timeout=30_000)
        return place


@pytest.fixture
def open_notebook(lab, browser):
    """`open_notebook(name)`: a notebook of the served folder without stored outputs, its kernel ready."""
    address, folder = lab
    pages = []

    def open_(name: str) -> Notebook:
        notebook = nbformat.read(folder / name, 4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / name)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        pages.append(page)
        return Notebook(page, address, name)

    yield open_
    for page in pages:
        page.close()
