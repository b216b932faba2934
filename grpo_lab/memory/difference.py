"""What changed between two reports, as a table and in words.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> reports = []
>>> for rows in (1024, 4096):
...     with VirtualGPU("T4") as gpu:
...         x = torch.zeros(1024, rows)
...     reports.append(gpu.report())
>>> print(reports[0].diff(reports[1]).text.splitlines()[0])
peak: allocated: 4.00 MiB -> 16.00 MiB (+12.00 MiB)
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .cuda_words import size

if TYPE_CHECKING:
    from .report import MemoryReport


class Diff(pd.DataFrame):
    """What :meth:`MemoryReport.diff` returns: a DataFrame with :attr:`text`, the same in words."""

    @classmethod
    def of(cls, before: MemoryReport, after: MemoryReport, top: int) -> Diff:
        pairs: dict[tuple[str, str], list] = {
            ("peak", "allocated"): [before.peak_allocated, after.peak_allocated],
            ("peak", "reserved"): [before.peak_reserved, after.peak_reserved]}
        parts = [("phase", "phases", "peak_allocated", pd.NA), ("phase, reserved", "phases", "peak_reserved", pd.NA),
                 ("category", "categories", "bytes", 0)]
        for part, table, column, absent in parts:
            old, new = getattr(before, table)[column], getattr(after, table)[column]
            for name in dict.fromkeys([*old.index, *new.index]):
                pairs[part, name] = [old.get(name, absent), new.get(name, absent)]
        old, new = ({owner: nbytes for nbytes, owner in _by_owner(report)} for report in (before, after))
        change = {owner: new.get(owner, 0) - old.get(owner, 0) for owner in [*old, *new]}
        for owner in sorted(change, key=lambda owner: (-abs(change[owner]), owner))[:top]:
            if change[owner]:
                pairs["top", owner] = [old.get(owner, 0), new.get(owner, 0)]
        index = pd.MultiIndex.from_tuples(pairs, names=["part", "name"])
        table = pd.DataFrame(list(pairs.values()), index=index, columns=["before", "after"]).astype("Int64")
        return cls(table.assign(change=table["after"] - table["before"]))

    @property
    def text(self) -> str:
        """One line a row that changed."""
        lines = []
        for (part, name), row in self.iterrows():
            if row.isna().any():
                only, value = ("after", row["after"]) if pd.isna(row["before"]) else ("before", row["before"])
                lines.append(f"{part}: {name}: {size(value)}, only {only}")
            elif row["change"] or part == "peak":
                sign = "-" if row["change"] < 0 else "+"
                lines.append(f"{part}: {name}: {size(row['before'])} -> {size(row['after'])} "
                             f"({sign}{size(abs(row['change']))})")
        return "\n".join(lines)


def _by_owner(report: MemoryReport) -> list[tuple[int, str]]:
    """(bytes, who) at the peak; lines are left out, for they move with every edit."""
    table = report.top(None, by=["category", "phase", "module", "op"])
    return [(int(row.bytes), ", ".join(filter(None, (row.category, row.module, row.op, f"made in {row.phase}"))))
            for row in table.itertuples()]
