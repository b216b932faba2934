"""What the explorer says of a position, as HTML: verdict, numbers, what else would fit, the lines to copy.

>>> from grpo_lab.recipe import Recipe
>>> "It fits" in verdict_html(estimate(Recipe.preset("laptop_8gb")))
True
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from typing import Any

from ._trl_text import trl_lines
from .estimation import Estimate, estimate, human, reserved
from .explorer_picture import WIDTH, picture
from .recipe import Recipe

GOOD, BAD, UNCLEAR = "#005a32", "#a50f15", "#8a6d00"
LAST = ["allocated", "margin", "reserved"]
TABLE = "text-align:right;border-collapse:collapse;white-space:nowrap;line-height:1.35"
CELLS = "<style>.grpo-lab-numbers :is(td,th){padding:0 0 0 12px;text-align:right;vertical-align:bottom}</style>"
# Scripts don't run in a widget's HTML, but handlers do. Where there is no clipboard the text can be marked as ever.
COPY = ('<button type="button" class="jupyter-button" style="float:right" aria-label="copy the lines for TRL" '
        "onclick=\"navigator.clipboard.writeText(this.parentNode.querySelector('pre').innerText).then("
        "() => {this.textContent = 'copied'})\">copy</button>")  # fmt: skip


def verdict_html(found: Estimate) -> str:
    """One sentence, announced by screen readers."""
    left = found.budget - found.peak_reserved
    need = (f"{human(found.peak_allocated)} of tensors at the peak, in {found.peak_phase}; about "
            f"{human(found.peak_reserved)} with what the allocator keeps")  # fmt: skip
    card = f"of the {human(found.budget)} that the card leaves to PyTorch"
    if left >= 0:
        return _status(GOOD, "It fits", f"{need}, {card}. Free: {human(left)}.")
    return _status(BAD, "It does not fit", f"{need}, {card}. Too much: {human(-left)}.")


def problem_html(problem: str) -> str:
    return _status(UNCLEAR, "These don't go together", f"{problem.rstrip('.')}. (Below: the last position that does.)")


def _status(colour: str, head: str, words: str) -> str:
    style = f"border-left:6px solid {colour};padding:4px 10px;margin:4px 0;line-height:1.4"
    words = f"<b>{escape(head)}:</b> {escape(words)}"
    return f'<div role="status" aria-live="polite" style="{style}">{words}</div>'


def picture_svg(found: Estimate, pinned: Estimate | None = None) -> str:
    phases = {name: found.by_category(name) for name in found.moments}
    margins = {name: reserved(moment.bytes) - moment.bytes for name, moment in found.moments.items()}
    before = None if pinned is None else {name: reserved(moment.bytes) for name, moment in pinned.moments.items()}
    return picture(phases, found.budget, in_words(found), before, margins)


def in_words(found: Estimate) -> str:
    """What the picture shows, for those who don't see it."""
    sizes = ", ".join(f"{name} {human(reserved(moment.bytes))}" for name, moment in found.moments.items())
    return f"Estimated memory by phase: {sizes}; the card has {human(found.budget)}."


def static_html(verdict: str, most: Mapping[str, Any], found: Estimate, pinned: Estimate | None = None) -> str:
    """All of it for where no kernel runs. The SVG is an image: a notebook that isn't trusted yet drops inline SVG."""
    svg = base64.b64encode(picture_svg(found, pinned).encode()).decode()
    image = f'<img alt="{escape(in_words(found))}" width="{WIDTH}" src="data:image/svg+xml;base64,{svg}">'
    return (f"<div>{verdict}{image}{table_html(found, pinned)}{most_html(most, found.recipe)}"
            f"{lines_html(found.recipe, copy='')}<p><i>Run the cell for the sliders.</i></p></div>")  # fmt: skip


def table_html(found: Estimate, pinned: Estimate | None = None) -> str:
    """The picture in numbers: the peak by category, beside the pinned position's."""
    made = {"now": found} if pinned is None else {"now": found, "pinned": pinned}
    columns = [_numbers(one) for one in made.values()]
    names = [name for name in dict.fromkeys(name for column in columns for name in column) if name not in LAST]
    head = "".join(f'<th scope="col">{when}<br>{escape(one.peak_phase)}</th>' for when, one in made.items())
    rows = "".join(_row(name, [column.get(name, 0) for column in columns]) for name in [*names, *LAST])
    head = f'<thead><tr><th scope="col">peak, in phase</th>{head}</tr></thead>'
    return f'<table class="grpo-lab-numbers" style="{TABLE}">{CELLS}{head}<tbody>{rows}</tbody></table>'


def _row(name: str, sizes: list[int]) -> str:
    rule = ' style="border-top:1px solid #6E6E6E"' if name == LAST[0] else ""
    cells = "".join(f"<td>{human(nbytes) if nbytes else '–'}</td>" for nbytes in sizes)
    return f'<tr{rule}><th scope="row" style="font-weight:normal">{escape(name)}</th>{cells}</tr>'


def _numbers(found: Estimate) -> dict[str, int]:
    sums = dict(zip(LAST, (found.peak_allocated, found.peak_reserved - found.peak_allocated, found.peak_reserved),
                    strict=True))  # fmt: skip
    return {name: nbytes for name, nbytes in found.by_category().items() if nbytes} | sums


def most_html(most: Mapping[str, Any], recipe: Recipe) -> str:
    """What :func:`grpo_lab._explorer_search.most_that_fits` found, beside what is chosen."""
    now = {"completion tokens": recipe.max_completion_length, "micro-batch": recipe.per_device_train_batch_size,
           "model": recipe.model}  # fmt: skip
    items = "".join(f"<li>{name}: <b>{'none' if value is None else _said(value)}</b> (now {_said(now[name])})</li>"
                    for name, value in most.items())  # fmt: skip
    return f"<div style='line-height:1.4'>The most that would fit, each alone:<ul style='margin:0'>{items}</ul></div>"


def pinned_html(labels: Mapping[str, str], pinned: Recipe | None, recipe: Recipe) -> str:
    """Which choices differ from the pinned position."""
    if pinned is None:
        return ""
    differ = [f"{label} <b>{_said(getattr(pinned, name))}</b> → <b>{_said(getattr(recipe, name))}</b>"
              for name, label in labels.items() if getattr(pinned, name) != getattr(recipe, name)]  # fmt: skip
    return f"<div style='line-height:1.4'>Pinned → now: {', '.join(differ) or 'no difference yet'}</div>"


def lines_html(recipe: Recipe, copy: str = COPY) -> str:
    return (f"<details open><summary>the same in TRL and PEFT</summary>{copy}<pre style='line-height:1.3'>"
            f"{escape(trl_lines(recipe))}</pre></details>")  # fmt: skip


def simulated_html(report: Any, formula: Estimate) -> str:
    verdict = "fits" if report.fits else "does not fit"
    return (f"<b>simulated</b>: {human(report.peak_allocated)} allocated ({human(report.peak_reserved)} reserved), "
            f"{verdict}; the formula said {human(formula.peak_allocated)} ({human(formula.peak_reserved)}), "
            f"{formula.peak_allocated / report.peak_allocated - 1:+.1%}")  # fmt: skip


def _said(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
