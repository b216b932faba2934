"""The explorer in JupyterLab: moved by keyboard, read as a screen reader reads it."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from grpo_lab import Recipe, explore

pytestmark = pytest.mark.browser


@pytest.fixture
def sliders(lab):
    sources = ["from grpo_lab import Recipe, explore", "explore(Recipe.preset('laptop_8gb'))"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(notebook, lab[1] / "sliders.ipynb")
    return "sliders.ipynb"


def test_sliders_move_by_keyboard_and_bar_verdict_and_lines_follow(open_notebook, sliders, tmp_path):
    notebook = open_notebook(sliders)
    notebook.run_all(120)
    assert notebook.errors() == []
    page = notebook.page
    verdict = page.locator(".jp-OutputArea [role=status]").first
    expect(verdict).to_contain_text("It fits", timeout=30_000)
    bar = page.locator(".jp-OutputArea svg[role=img]").first
    before = bar.get_attribute("aria-label")
    lines = page.locator(".jp-OutputArea pre", has_text="GRPOConfig(").first
    expect(lines).to_contain_text("max_completion_length=1024")
    handle = page.get_by_role("slider", name="completion tokens")
    handle.scroll_into_view_if_needed(timeout=30_000)
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(lines).to_contain_text("max_completion_length=1088", timeout=15_000)
    assert page.locator(".jp-OutputArea svg[role=img]").first.get_attribute("aria-label") != before
    pin = page.get_by_role("button", name="pin this")
    pin.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="unpin")).to_be_visible(timeout=10_000)
    rank = page.get_by_label("LoRA rank").first
    expect(rank).to_have_value("16")
    rank.focus()
    page.keyboard.press("Home")                                 # none: every weight is trained
    expect(verdict).to_contain_text("It does not fit", timeout=15_000)
    expect(lines).not_to_contain_text("LoraConfig")
    seen = page.locator(".jp-OutputArea .widget-vbox").first
    shot = Path(os.environ.get("SCREENSHOT") or tmp_path / "explorer.png")     # make screenshot: the README's
    box = seen.bounding_box()
    assert _cut_off(seen) == []
    page.screenshot(path=shot, clip={"x": box["x"], "y": box["y"], "width": box["width"], "height": 640})
    assert shot.stat().st_size > 20_000
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = page.get_by_role("button", name="copy the lines for TRL")
    copy.focus()
    page.keyboard.press("Enter")
    expect(copy).to_have_text("copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[0] == "from trl import GRPOConfig" and "max_completion_length=1088" in copied
    compile(copied, "copied", "exec")
    quantized = page.get_by_label("quantization").first
    quantized.select_option("nf4")
    expect(verdict).to_contain_text(re.compile("don.t go together.*nothing to train"), timeout=15_000)
    assert seen.bounding_box()["width"] <= 960


def test_a_notebook_that_is_opened_and_not_run_shows_the_picture(lab, browser):
    """JupyterLab cleans the HTML of a notebook from elsewhere: of an inline SVG only words were left, in one heap."""
    html = explore(Recipe.preset("laptop_8gb"))._repr_mimebundle_()["text/html"]
    output = nbformat.v4.new_output("execute_result", data={"text/html": html, "text/plain": ""}, execution_count=1)
    cell = nbformat.v4.new_code_cell("explore()", outputs=[output], execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), lab[1] / "still.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    try:
        page.goto(f"{lab[0]}/lab/tree/still.ipynb?reset", wait_until="domcontentloaded")
        image = page.locator(".jp-OutputArea img")
        expect(image).to_be_visible(timeout=60_000)
        assert image.evaluate("e => e.decode().then(() => e.naturalWidth)") > 0
        expect(image).to_have_attribute("alt", re.compile("Estimated memory by phase: load .*backward"))
        expect(page.locator(".jp-OutputArea pre")).to_contain_text("GRPOConfig(")
    finally:
        page.close()


def _cut_off(seen) -> list[str]:
    """Words that don't have the room they need: labels of controls, and what is wider than its part."""
    return seen.evaluate("""box => {
        const right = box.getBoundingClientRect().right
        const labels = [...box.querySelectorAll('.widget-label')].filter(e => e.scrollWidth > e.clientWidth + 1)
        const wide = [...box.querySelectorAll('table, svg, li')]
            .filter(e => e.getBoundingClientRect().right > right + 1)
        return [...labels, ...wide].map(e => e.textContent.slice(0, 40))
    }""")
