"""Draw the README's picture and write the table under it: `make pictures` (minutes the first time).

Every number comes from simulating the course's stages; none is typed. The table goes between the README's two
`waterfall` comments, the picture into docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from grpo_lab import course, plots

ROOT = Path(__file__).resolve().parents[1]
LAST = course.STAGES[-1].notebook
BLOCK = re.compile(r"(<!-- waterfall -->\n).*?(<!-- end of waterfall -->)", re.DOTALL)


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
    readme = ROOT / "README.md"
    block = f"![{picture.alt}](docs/waterfall.png)\n\n{table(rows)}\n"
    readme.write_text(BLOCK.sub(lambda found: found[1] + block + found[2], readme.read_text()))
    print(picture.alt)


if __name__ == "__main__":
    main()
