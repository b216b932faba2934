"""What a run did with memory: peaks, phases, owners, the timeline, and whether it fits.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu:
...     with gpu.phase("forward"):
...         x = torch.zeros(1024, 1024)
>>> report = gpu.report()
>>> report.peak_allocated, report.fits
(4194304, True)
>>> report.phases.loc["forward", "peak_allocated"].item()
4194304
"""
from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from .ledger import CATEGORIES, Ledger, cuda_message, op_name

GiB, MiB = 2**30, 2**20


@dataclass(frozen=True)
class MemoryReport:
    """Bytes are ints. ``budget`` is what the card leaves to PyTorch (None: no card, no limit).

    ``phases``: one row a phase, its highest ``peak_allocated`` and ``peak_reserved``. ``categories``: one row a
    category, ``bytes`` at the peak. ``timeline``: one row an event (an allocation or a release) with the phase, what is
    allocated and reserved after it, and the bytes of each category. ``oom``: None, or what was asked for
    (``requested``), by which ``op``, in which ``phase``, with what ``allocated`` and ``reserved`` by then.
    """

    peak_allocated: int
    peak_reserved: int
    budget: int | None
    phases: pd.DataFrame
    categories: pd.DataFrame
    timeline: pd.DataFrame
    oom: dict | None = None
    card: str | None = None
    context: int = 0
    simulated: bool = True
    log: list = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, ledger: Ledger, card: str | None = None, budget: int | None = None,
           simulated: bool = True) -> MemoryReport:
        timeline = _timeline(ledger)
        peak = int(timeline["allocated"].argmax()) if len(timeline) else 0
        at_peak = timeline.iloc[peak][CATEGORIES] if len(timeline) else pd.Series(0, CATEGORIES)
        categories = at_peak[at_peak > 0].astype("int64").sort_values(ascending=False).to_frame("bytes")
        categories.index.name = "category"
        log = [(sign, id(r), r.bytes, r.address, op_name(r.op), r.phase, r.category or "temporaries")
               for sign, r, _, _ in ledger.events]
        return cls(peak_allocated=int(timeline["allocated"].max()) if len(timeline) else 0,
                   peak_reserved=int(timeline["reserved"].max()) if len(timeline) else 0,
                   budget=budget, phases=_phases(ledger, timeline), categories=categories, timeline=timeline,
                   oom=ledger.oom, card=card, context=ledger.context, simulated=simulated, log=log)

    @property
    def fits(self) -> bool:
        """Whether it ran within the budget (without a budget, always)."""
        return self.oom is None

    def raise_if_oom(self) -> MemoryReport:
        """Raises ``torch.OutOfMemoryError`` in the card's own words if it ran out; otherwise returns the report."""
        if self.oom is not None:
            raise torch.OutOfMemoryError(cuda_message(self.oom, self.budget, self.context))
        return self

    def plot(self, kind: str = "timeline"):
        """The picture: ``"timeline"`` (stacked by category, phases marked, budget line) or ``"breakdown"``."""
        from .. import plots
        return {"timeline": plots.timeline, "breakdown": plots.breakdown}[kind](self)

    def save_snapshot(self, path: str | Path) -> Path:
        """Writes what ``python -m torch.cuda._memory_viz trace_plot FILE`` opens. Returns the path."""
        from .snapshot import save
        return save(self.log, path)

    def __str__(self) -> str:
        how = "simulated" if self.simulated else "measured"
        lines = [f"{how} on {self.card or 'this machine'}: peak {self.peak_allocated / GiB:.2f} GiB allocated, "
                 f"{self.peak_reserved / GiB:.2f} GiB reserved"]
        if self.budget is not None:
            lines[0] += f", of {self.budget / GiB:.2f} GiB"
        if self.oom is not None:
            lines.append(f"does not fit: {self.oom['op']} asked for {self.oom['requested'] / GiB:.2f} GiB in phase "
                         f"{self.oom['phase']!r} when {self.oom['allocated'] / GiB:.2f} GiB were allocated")
        elif self.budget is not None:
            lines.append("fits")
        owners = ", ".join(f"{name} {row.bytes / GiB:.2f}" for name, row in self.categories.head(4).iterrows())
        return "\n".join([*lines, f"at the peak (GiB): {owners}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = (self.categories["bytes"] / GiB).rename("GiB at the peak").to_frame()
        table["share"] = self.categories["bytes"] / max(1, self.peak_allocated)
        html = table.to_html(formatters={"GiB at the peak": "{:.2f}".format, "share": "{:.0%}".format})
        return "<p>" + escape(str(self)).rsplit("\n", 1)[0].replace("\n", "<br>") + "</p>" + html


def _timeline(ledger: Ledger) -> pd.DataFrame:
    events = ledger.events
    place = {name: i for i, name in enumerate(CATEGORIES)}
    signed = np.zeros((len(events), len(CATEGORIES)), dtype=np.int64)
    for row, (sign, record, _, _) in enumerate(events):
        signed[row, place[record.category or "temporaries"]] = sign * record.bytes
    frame = pd.DataFrame(signed.cumsum(axis=0), columns=CATEGORIES)
    frame.insert(0, "reserved", np.fromiter((e[3] for e in events), np.int64, len(events)))
    frame.insert(0, "allocated", frame[CATEGORIES].sum(axis=1))
    names = np.full(len(events), "start", dtype=object)
    for entry in ledger.phases:                       # inner phases come later and win
        names[entry["start"]:entry.get("end", len(events))] = entry["phase"]
    frame.insert(0, "phase", names)
    frame.index.name = "event"
    return frame


def _phases(ledger: Ledger, timeline: pd.DataFrame) -> pd.DataFrame:
    peaks: dict[str, list[int]] = {}
    for entry in ledger.phases:
        span = timeline.iloc[entry["start"]:entry.get("end", len(timeline))]
        allocated = int(max(span["allocated"].max() if len(span) else 0, entry["allocated"]))
        reserved = int(max(span["reserved"].max() if len(span) else 0, entry["reserved"]))
        old = peaks.setdefault(entry["phase"], [0, 0])
        peaks[entry["phase"]] = [max(old[0], allocated), max(old[1], reserved)]
    frame = pd.DataFrame(peaks.values(), index=list(peaks), columns=["peak_allocated", "peak_reserved"], dtype="int64")
    frame.index.name = "phase"
    return frame
