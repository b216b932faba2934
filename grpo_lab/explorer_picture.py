"""The explorer's picture: a bar a phase, stacked by category, against the card's budget; as SVG, for it is drawn often.

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
            pinned: dict[str, int] | None = None) -> str:  # fmt: skip
    """SVG of phase -> category -> bytes; ``pinned``: phase -> bytes of the position to compare with, as outlines."""
    prefix = f"g{next(_ids)}"  # pictures on one page must not share names
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    most = max([budget * 1.08, *totals.values(), *(pinned or {}).values()])
    scale = (WIDTH - LEFT - RIGHT) / most
    used = [name for name in CATEGORIES if any(name in parts for parts in phases.values())]
    height = ROW * len(phases) + 34 + 20 * -(-len(used) // 4)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
             f'style="max-width:{WIDTH}px;background:white" role="img" aria-label="{escape(description)}" '
             f'font-family="sans-serif" font-size="12">', f"<title>{escape(description)}</title>",
             _patterns(prefix, used)]  # fmt: skip
    for row, (name, categories) in enumerate(phases.items()):
        parts += _bar(prefix, row, name, categories, totals[name], budget, scale, (pinned or {}).get(name))
    bottom = ROW * len(phases) + 6
    x = LEFT + budget * scale
    parts += [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}" stroke="{RED}" stroke-width="2" '
              'stroke-dasharray="5 3"/>',
              f'<text x="{min(x, WIDTH - 60):.1f}" y="{bottom + 13}" text-anchor="middle" fill="{RED}">the card: '
              f"{escape(size(budget))}</text>"]  # fmt: skip
    parts += _legend(prefix, used, bottom + 24)
    return "".join([*parts, "</svg>"])


def _patterns(prefix: str, used: list[str]) -> str:
    made = []
    for name in used:
        face, hatch, line = CATEGORIES[name]
        made.append(f'<pattern id="{prefix}-{_id(name)}" width="8" height="8" patternUnits="userSpaceOnUse">'
                    f'<rect width="8" height="8" fill="{face}"/>{_HATCHES[hatch].format(line=line)}</pattern>')  # fmt: skip
    return f"<defs>{''.join(made)}</defs>"


def _bar(prefix: str, row: int, name: str, categories: dict[str, int], total: int, budget: int, scale: float,
         before: int | None) -> list[str]:  # fmt: skip
    y, x = ROW * row + 6, float(LEFT)
    over = total > budget
    parts = [f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="{INK}">{escape(name)}</text>']
    for category in CATEGORIES:
        width = categories.get(category, 0) * scale
        if width >= 0.3:
            what = f"{name}: {category} {size(categories[category])}"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                         f'fill="url(#{prefix}-{_id(category)})"><title>{escape(what)}</title></rect>')  # fmt: skip
        x += width
    if before is not None:
        parts.append(f'<rect x="{LEFT}" y="{y - 2}" width="{before * scale:.1f}" height="{BAR + 4}" fill="none" '
                     f'stroke="{INK}" stroke-dasharray="2 2"/>')  # fmt: skip
    end = max(x, LEFT + (before or 0) * scale)
    parts.append(f'<text x="{end + 5:.1f}" y="{y + 14}" fill="{RED if over else INK}" '
                 f'font-weight="{"bold" if over else "normal"}">{escape(size(total))}</text>')  # fmt: skip
    return parts


def _legend(prefix: str, used: list[str], top: int) -> list[str]:
    parts = []
    for place, name in enumerate(used):
        x, y = 12 + 150 * (place % 4), top + 20 * (place // 4)
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="url(#{prefix}-{_id(name)})" stroke="{GREY}"/>'
                     f'<text x="{x + 19}" y="{y + 11}" fill="{INK}">{escape(name)}</text>')  # fmt: skip
    return parts


def _id(category: str) -> str:
    return category.replace(" ", "-")
