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

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from .cuda_words import cuda_message
from .difference import Diff
from .ledger import CATEGORIES, Ledger, op_name
from .snapshot import Heap, save

GiB, MiB = 2**30, 2**20
OWNERS = ("category", "phase", "module", "op", "line")         # by which `top` tells bytes apart


@dataclass(frozen=True)
class MemoryReport:
    """Bytes are ints. ``budget`` is what the card leaves to PyTorch (None: no card, no limit).

    ``phases``: one row a phase, its highest ``peak_allocated`` and ``peak_reserved``. ``categories``: one row a
    category, ``bytes`` at the peak. ``timeline``: one row an event (an allocation or a release) with the phase, what
    is allocated and reserved after it, and the bytes of each category. ``oom``: None, or what was asked for
    (``requested``), by which ``op``, ``module`` and ``line``, of which ``category``, in which ``phase``, with what
    ``allocated`` and ``reserved`` by then. ``log``: the events, (+1 or -1, id, bytes, address, op, phase, category)
    each; ``peak_host``: what a simulated run had in the computer's own memory at most. ``origins``: id -> (module, frames), where they are known.

    The timeline ends with the last phase, or with the last allocation after it: what is given back later is the
    script's variables going out of scope, and how many have by then says when the report was asked for, not what the
    code needs. ``log`` has these releases, too.
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
    peak_host: int = 0
    log: list = field(default_factory=list, repr=False, compare=False)
    origins: dict = field(default_factory=dict, repr=False, compare=False)
    heap: Heap = field(default_factory=Heap, repr=False, compare=False)

    @classmethod
    def of(cls, ledger: Ledger, card: str | None = None, budget: int | None = None,
           simulated: bool = True) -> MemoryReport:
        timeline = _timeline(ledger)
        peak = int(timeline["allocated"].argmax()) if len(timeline) else 0
        at_peak = timeline.iloc[peak][CATEGORIES] if len(timeline) else pd.Series(0, CATEGORIES)
        categories = at_peak[at_peak > 0].astype("int64").sort_values(ascending=False).to_frame("bytes")
        categories.index.name = "category"
        log = [(sign, id(r), r.bytes, r.address, op_name(r.op), r.phase, r.category or "temporaries")
               for sign, r, *_ in ledger.events]
        origins = {id(r): (r.module, r.frames) for sign, r, *_ in ledger.events if sign > 0 and (r.module or r.frames)}
        return cls(peak_allocated=int(timeline["allocated"].max()) if len(timeline) else 0,
                   peak_reserved=int(timeline["reserved"].max()) if len(timeline) else 0,
                   budget=budget, phases=_phases(ledger, timeline), categories=categories, timeline=timeline,
                   oom=_oom(ledger), card=card, context=ledger.context, simulated=simulated,
                   peak_host=ledger.host.peak if simulated else 0, log=log, origins=origins,
                   heap=Heap.of(ledger.allocator))

    @property
    def fits(self) -> bool:
        """Whether it ran within the budget (without a budget, always)."""
        return self.oom is None

    @property
    def nvidia_smi(self) -> int:
        """What `nvidia-smi` would show for the process at the peak: reserved bytes and the context, and no tensors.

        The caching allocator keeps what it once reserved, so that this figure doesn't fall with shorter inputs; an engine
        beside the trainer (vLLM) that takes a fixed share of the card doesn't move at all.
        """
        return self.peak_reserved + self.context

    def raise_if_oom(self) -> MemoryReport:
        """Raises ``torch.OutOfMemoryError`` in the card's own words if it ran out; otherwise returns the report."""
        if self.oom is not None:
            raise torch.OutOfMemoryError(cuda_message(self.oom, self.budget, self.context))
        return self

    def plot(self, kind: str = "timeline"):
        """The picture: ``"timeline"`` (stacked by category, phases marked, budget line) or ``"breakdown"``."""
        from .. import plots
        if kind not in ("timeline", "breakdown"):
            raise ValueError(f"kind={kind!r}: takes 'timeline' or 'breakdown'")
        if not len(self.timeline):
            raise ValueError("plot: nothing was allocated, so there is nothing to draw")
        return {"timeline": plots.timeline, "breakdown": plots.breakdown}[kind](self)

    def top(self, n: int | None = 20, by: str | Sequence[str] = OWNERS, each_layer: bool = False) -> pd.DataFrame:
        """What the allocated peak consists of, the largest first: ``n`` rows (None: all, whose sum is the peak).

        >>> from grpo_lab.memory import VirtualGPU
        >>> with VirtualGPU("T4") as gpu:
        ...     x, y = torch.zeros(1024, 1024), torch.ones(1024, 1024)
        >>> gpu.report().top(by="op")
                bytes  count         op
        0     4194304      1  aten.ones
        1     4194304      1 aten.zeros

        ``by``: one or several of "category", "phase", "module", "op", "line"; storages alike in all of them share a
        row, and ``count`` says how many. ``phase`` is the one that made them. The layers of a model are taken
        together ("model.layers.*.mlp") unless ``each_layer``. What is no tensor's storage has its name as op
        ("cuBLAS workspace (backward thread)"). Modules and lines are there where a `Whence` was on.
        """
        by = [by] if isinstance(by, str) else list(by)
        if wrong := [name for name in by if name not in OWNERS] or (["nothing"] if not by else []):
            raise ValueError(f"by={wrong[0]!r}: takes one or several of {', '.join(map(repr, OWNERS))}")
        rows = pd.DataFrame([self._owner(entry, each_layer) for entry in self._alive()], columns=["bytes", *OWNERS])
        unseen = self.peak_allocated - int(rows["bytes"].sum())
        if unseen:                                          # on CUDA the peak is the card's own
            phase = self.timeline["phase"].iloc[int(self.timeline["allocated"].argmax())] if len(self.timeline) else ""
            rows.loc[len(rows)] = [unseen, "other", phase, "", "counted by the card, not seen by the ledger", ""]
        table = rows.groupby(by, sort=False)["bytes"].agg(["sum", "size"]).reset_index()
        table = table.rename(columns={"sum": "bytes", "size": "count"})[["bytes", "count", *by]]
        table = table.sort_values(["bytes", *by], ascending=[False] + [True] * len(by), ignore_index=True)
        return table.head(len(table) if n is None else n)

    def diff(self, other: MemoryReport, top: int = 20) -> Diff:
        """What changes from this report to ``other``: a table, and in words (``print(a.diff(b).text)``).

        >>> from grpo_lab.memory import VirtualGPU
        >>> reports = []
        >>> for width in (1024, 512):
        ...     with VirtualGPU("T4") as gpu, gpu.phase("forward"):
        ...         x = torch.zeros(1024, width)
        ...     reports.append(gpu.report())
        >>> reports[0].diff(reports[1]).loc[("peak", "allocated")].tolist()
        [4194304, 2097152, -2097152]

        Columns ``before`` (self), ``after`` (other) and ``change`` = after - before, in bytes: negative is what
        ``other`` saves. ``a.diff(b)`` is ``b.diff(a)`` with the sign turned. Rows: ``peak``, each ``phase`` (its
        allocated and ``phase, reserved`` peaks; missing where only one report has it), each ``category``, and the
        ``top`` largest changes of what the peak consists of.
        """
        return Diff.of(self, other, top)

    def save_snapshot(self, path: str | Path) -> Path:
        """Writes what PyTorch's viewer opens (``python -m torch.cuda._memory_viz trace_plot FILE``, see
        :mod:`grpo_lab.memory.snapshot`). Returns the path."""
        return save(self.log, path, self.origins, self.heap)

    def _alive(self) -> list[tuple]:
        """The log's entries of the storages that live at the allocated peak."""
        alive: dict[int, tuple] = {}
        for entry in self.log[:int(self.timeline["allocated"].argmax()) + 1] if len(self.timeline) else ():
            if entry[0] > 0:
                alive[entry[1]] = entry
            else:
                del alive[entry[1]]
        return list(alive.values())

    def _owner(self, entry: tuple, each_layer: bool) -> tuple:
        _, key, nbytes, _, op, phase, category = entry
        module, frames = self.origins.get(key, ("", ()))
        return nbytes, category, phase, module if each_layer else all_layers(module), op, where(frames)

    def __str__(self) -> str:
        how = "simulated" if self.simulated else "measured"
        lines = [f"{how} on {self.card or 'this machine'}: peak {self.peak_allocated / GiB:.2f} GiB allocated, "
                 f"{self.peak_reserved / GiB:.2f} GiB reserved"]
        if self.budget is not None:
            lines[0] += f", of {self.budget / GiB:.2f} GiB"
        if self.oom is not None:
            by = f"{self.oom['op']} in {module}" if (module := self.oom.get("module")) else self.oom["op"]
            lines.append(f"does not fit: {by} asked for {self.oom['requested'] / GiB:.2f} GiB in phase "
                         f"{self.oom['phase']!r} when {self.oom['allocated'] / GiB:.2f} GiB were allocated")
            if self.oom.get("line"):
                lines.append(f"at {self.oom['line']}")
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


def all_layers(module: str) -> str:
    """The name without its numbers.

    >>> all_layers("model.layers.11.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def where(frames: tuple) -> str:
    """Lines as one reads them.

    >>> where((("/lib/llama.py", 60, "LlamaMLP.forward"), ("Cell In[3]", 5, "<module>")))
    'llama.py:60 (LlamaMLP.forward) < Cell In[3]:5'
    """
    return " < ".join(f"{file.rsplit('/', 1)[-1]}:{line}" + ("" if name == "<module>" else f" ({name})")
                      for file, line, name in frames)


def _oom(ledger: Ledger) -> dict | None:
    """What ran out, with what became known of it later: where it wasn't enforced, the storage came to be after all."""
    if ledger.oom is None:
        return None
    oom = {"module": "", "frames": (), **ledger.oom}
    sign, record = ledger.events[oom["event"]][:2] if oom["event"] < len(ledger.events) else (0, None)
    if sign > 0 and (record.requested, op_name(record.op)) == (oom["requested"], oom["op"]):
        oom |= {"category": record.category, "module": record.module, "frames": record.frames}
    return oom | {"category": oom["category"] or "temporaries", "line": where(oom["frames"])}


def _end(ledger: Ledger) -> int:
    """How many events belong to the timeline: up to the last phase's end, or the last allocation after it."""
    events = ledger.events
    if not ledger.phases:
        return len(events)
    end = max(entry.get("end", len(events)) for entry in ledger.phases)
    return max(end, 1 + next((i for i in range(len(events) - 1, end - 1, -1) if events[i][0] > 0), -1))


def _timeline(ledger: Ledger) -> pd.DataFrame:
    events = ledger.events[:_end(ledger)]
    place = {name: i for i, name in enumerate(CATEGORIES)}
    signed = np.zeros((len(events), len(CATEGORIES)), dtype=np.int64)
    for row, (sign, record, *_) in enumerate(events):
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
