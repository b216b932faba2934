"""Draw the README's picture and write its tables: `make pictures` (minutes the first time).

Numbers of the waterfall come from simulating the course's stages, the claims from `data/claims.csv`; none is typed. Each
table goes between two comments of its name in the README, the picture into docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from grpo_lab import course, plots

ROOT = Path(__file__).resolve().parents[1]
LAST = course.STAGES[-1].notebook
README = ROOT / "README.md"


def put(name: str, text: str) -> None:
    """Write a block of the README, between its two comments."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    README.write_text(block.sub(lambda found: found[1] + text + found[2], README.read_text()))


def claims() -> str:
    """What the article claims, and what was measured, as Markdown."""
    lines = ["| claim | measured | verdict | notebook |", "|---|---|---|---|"]
    for row in pd.read_csv(ROOT / "data" / "claims.csv", dtype=str).itertuples():
        lines.append(f"| {row.claim} | {row.measured} | **{row.verdict}** | {row.notebook} |")
    return "\n".join(lines) + "\n"


def table(rows: pd.DataFrame) -> str:
    """The waterfall as Markdown: what each stage reserves, and whether that fits the 16 GB card."""
    lines = ["| change | notebook | reserved at the peak | fits in 16 GB |", "|---|---|---|---|"]
    for row in rows.itertuples():
        fits = "yes" if row.fits else "no"
        lines.append(f"| {row.label} | {row.notebook} | {plots.size(row.peak_reserved)} | {fits} |")
    return "\n".join(lines)


def main() -> None:
    rows = course.waterfall(LAST)
    picture = plots.waterfall(rows)
    (ROOT / "docs").mkdir(exist_ok=True)
    picture.savefig(ROOT / "docs" / "waterfall.png", dpi=144, facecolor="white", metadata={"Software": None})
    put("waterfall", f"![{picture.alt}](docs/waterfall.png)\n\n{table(rows)}\n")
    put("claims", claims())
    print(picture.alt)


if __name__ == "__main__":
    main()
