"""What a reader sees and does in JupyterLab."""

import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

ROOT = Path(__file__).parents[2]
START = ROOT / "notebooks" / "00_start_here.ipynb"
pytestmark = pytest.mark.browser


def move_by_keyboard(page) -> tuple[float, float, str]:
    """Focus the first slider, press the right arrow: (before, after, the name a screen reader says)."""
    handle = page.locator(".noUi-handle[role=slider]").first
    handle.scroll_into_view_if_needed(timeout=30_000)
    expect(handle).to_have_attribute("aria-label", re.compile(r"\w"), timeout=10_000)
    before = handle.get_attribute("aria-valuenow")
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(handle).not_to_have_attribute("aria-valuenow", before, timeout=10_000)
    return float(before), float(handle.get_attribute("aria-valuenow")), handle.get_attribute("aria-label")


@pytest.fixture
def small(lab):
    """A slider and a picture, as every notebook has them."""
    sources = [
        "import pandas as pd; from grpo_lab import course, plots",
        "size = course.guess('How large is it?', 0, 80)",
        "plots.learning(pd.DataFrame({'reward': [0.25, 0.75]}), smooth=1)",
        "course.reveal(size, 160)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(notebook, lab[1] / "small.ipynb")
    return "small.ipynb"


def test_a_guess_can_be_made_with_the_keyboard(open_notebook, small):
    """The handle that takes the keys had no name; and what the browser shows, the kernel has to know."""
    notebook = open_notebook(small)
    notebook.run_all(120)
    assert notebook.errors() == []
    notebook.see("Your guess: 40 GiB. It is 160 GiB, 4.0 times your guess.")
    before, after, name = move_by_keyboard(notebook.page)
    assert (before, after, name) == (40.0, 40.8, "How large is it? (GiB)")
    notebook.page.evaluate("""() => {
        const content = window.jupyterapp.shell.currentWidget.content
        content.activeCellIndex = 3
        return window.jupyterapp.commands.execute('notebook:run-cell')
    }""")
    notebook.see("Your guess: 40.8 GiB.")


def test_a_picture_has_its_words_in_jupyterlab(open_notebook, small):
    notebook = open_notebook(small)
    notebook.run_all(120)
    image = notebook.page.get_by_alt_text("the mean reward goes from 0.25 to 0.75")
    image.scroll_into_view_if_needed(timeout=30_000)
    width = image.bounding_box()["width"]
    assert 300 < width < 1200
    assert image.evaluate("image => image.naturalWidth") > 1.3 * width


@pytest.mark.skipif(not START.exists(), reason=f"{START.name} is not written yet")
def test_the_first_notebook_runs(open_notebook):
    """Its last compared output, as it is stored, appears when a reader runs it in the browser."""
    stored = [line for cell in nbformat.read(START, 4).cells if cell.cell_type == "code"
              and "nbval-ignore-output" not in cell.metadata.get("tags", [])
              for output in cell.outputs if output.output_type == "stream"
              for line in output.text.splitlines() if line.strip() and " at 0x" not in line]
    notebook = open_notebook(START.name)
    notebook.run_all(400)
    assert notebook.errors() == []
    notebook.see(stored[-1].strip())
    before, after, name = move_by_keyboard(notebook.page)
    assert after > before and len(name) > 10
