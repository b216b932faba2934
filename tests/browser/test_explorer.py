"""The explorer in JupyterLab: moved by keyboard, read as a screen reader reads it."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

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
    page.screenshot(path=shot, clip={"x": box["x"], "y": box["y"], "width": box["width"], "height": 600})
    assert shot.stat().st_size > 20_000
    quantized = page.get_by_label("quantization").first
    quantized.select_option("nf4")
    expect(verdict).to_contain_text(re.compile("don.t go together.*nothing to train"), timeout=15_000)
    assert seen.bounding_box()["width"] <= 960
