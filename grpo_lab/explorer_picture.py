"""The explorer's picture: a bar a phase, stacked by category, against the card's budget; SVG, for it is drawn often.

Colours and hatches are those of :mod:`grpo_lab.plots`. It computes nothing but places.
"""

from __future__ import annotations

from html import escape
from itertools import count

from ._picture import GREY, INK, RED, size
from .plots import CATEGORIES

WIDTH, LEFT, RIGHT, ROW, BAR = 620, 128, 82, 30, 20
_HATCHES = {
    "": "", "..": '<circle cx="3" cy="3" r="1.1" fill="{line}"/>',
    "//": '<path d="M0 8 L8 0" stroke="{line}"/>', "\\\\": '<path d="M0 0 L8 8" stroke="{line}"/>',
    "xx": '<path d="M0 8 L8 0 M0 0 L8 8" stroke="{line}"/>', "--": '<path d="M0 4 H8" stroke="{line}"/>',
    "||": '<path d="M4 0 V8" stroke="{line}"/>', "oo": '<circle cx="4" cy="4" r="2" fill="none" stroke="{line}"/>',
    "**": '<path d="M4 1 V7 M1 4 H7" stroke="{line}"/>',
}  # fmt: skip
_ids = count()


def picture(phases: dict[str, dict[str, int]], budget: int, description: str,
            pinned: dict[str, int] | None = None, margins: dict[str, int] | None = None) -> str:  # fmt: skip
    """SVG of phase -> category -> bytes; ``pinned``: phase -> bytes of the position to compare with, as outlines.

    ``margins``: phase -> bytes that the allocator keeps beyond the tensors; the sum has to stay within the budget.
    """
    margins = margins or {}
    prefix = f"g{next(_ids)}"  # pictures on one page must not share names
    totals = {name: sum(parts.values()) + margins.get(name, 0) for name, parts in phases.items()}
    most = max([budget * 1.08, *totals.values(), *(pinned or {}).values()])
    scale = (WIDTH - LEFT - RIGHT) / most
    used = [name for name in CATEGORIES if any(name in parts for parts in phases.values())]
    height = ROW * len(phases) + 34 + 20 * -(-(len(used) + bool(margins) + bool(pinned)) // 4)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
             f'style="max-width:{WIDTH}px;background:white" role="img" aria-label="{escape(description)}" '
             f'font-family="sans-serif" font-size="12">', f"<title>{escape(description)}</title>",
             _patterns(prefix, used)]  # fmt: skip
    for row, (name, categories) in enumerate(phases.items()):
        parts += _bar(prefix, row, name, categories, scale, (pinned or {}).get(name), margins.get(name, 0))
    bottom = ROW * len(phases) + 6
    x = LEFT + budget * scale
    labels = [_label(row, totals[name], budget, scale, (pinned or {}).get(name, 0)) for row, name in enumerate(phases)]
    parts += [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}" stroke="{RED}" stroke-width="2" '
              'stroke-dasharray="5 3"/>',
              f'<text x="{min(x, WIDTH - 60):.1f}" y="{bottom + 13}" text-anchor="middle" fill="{RED}">the card: '
              f"{escape(size(budget))}</text>"]  # fmt: skip
    parts += [*labels, *_legend(prefix, used, bottom + 24, bool(margins), bool(pinned))]
    return "".join([*parts, "</svg>"])


def _patterns(prefix: str, used: list[str]) -> str:
    made = []
    for name in used:
        face, hatch, line = CATEGORIES[name]
        made.append(f'<pattern id="{prefix}-{_id(name)}" width="8" height="8" patternUnits="userSpaceOnUse">'
                    f'<rect width="8" height="8" fill="{face}"/>{_HATCHES[hatch].format(line=line)}'
                    "</pattern>")  # fmt: skip
    return f"<defs>{''.join(made)}</defs>"


def _bar(prefix: str, row: int, name: str, categories: dict[str, int], scale: float,
         before: int | None, margin: int) -> list[str]:  # fmt: skip
    y, x = ROW * row + 6, float(LEFT)
    parts = [f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="{INK}">{escape(name)}</text>']
    for category in CATEGORIES:
        width = categories.get(category, 0) * scale
        if width >= 0.3:
            what = f"{name}: {category} {size(categories[category])}"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                         f'fill="url(#{prefix}-{_id(category)})"><title>{escape(what)}</title></rect>')  # fmt: skip
        x += width
    if margin:
        what = f"{name}: the allocator's margin {size(margin)}"
        parts.append(f'<rect x="{x:.1f}" y="{y + 0.5}" width="{margin * scale:.1f}" height="{BAR - 1}" '
                     f'fill="white" stroke="{GREY}"><title>{escape(what)}</title></rect>')  # fmt: skip
    if before is not None:
        parts.append(f'<rect x="{LEFT}" y="{y - 2}" width="{before * scale:.1f}" height="{BAR + 4}" fill="none" '
                     f'stroke="{INK}" stroke-dasharray="2 2"/>')  # fmt: skip
    return parts


def _label(row: int, total: int, budget: int, scale: float, before: int) -> str:
    """The sum behind a bar; a white rim keeps it readable where the budget's line crosses it."""
    x = LEFT + max(total, before) * scale + 5
    look = f'fill="{RED}" font-weight="bold"' if total > budget else f'fill="{INK}"'
    return (f'<text x="{x:.1f}" y="{ROW * row + 20}" {look} stroke="white" stroke-width="4" paint-order="stroke">'
            f"{escape(size(total))}</text>")  # fmt: skip


def _legend(prefix: str, used: list[str], top: int, margins: bool, pinned: bool) -> list[str]:
    keys = [(name, f'fill="url(#{prefix}-{_id(name)})" stroke="{GREY}"') for name in used]
    if margins:
        keys.append(("allocator's margin", f'fill="white" stroke="{GREY}"'))
    if pinned:
        keys.append(("pinned", f'fill="none" stroke="{INK}" stroke-dasharray="2 2"'))
    parts = []
    for place, (name, look) in enumerate(keys):
        x, y = 12 + 150 * (place % 4), top + 20 * (place // 4)
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" {look}/>'
                     f'<text x="{x + 19}" y="{y + 11}" fill="{INK}">{escape(name)}</text>')  # fmt: skip
    return parts


def _id(category: str) -> str:
    return category.replace(" ", "-")
