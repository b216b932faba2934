"""Writes what happened in the layout of ``torch.cuda.memory._snapshot()``, for PyTorch's own viewer.

``python -m torch.cuda._memory_viz trace_plot FILE -o FILE.html`` draws the allocations over time, coloured by category
(``-s``: the segments instead), ``segment_plot`` the segments with their blocks at every moment, ``memory`` and
``segments`` flame graphs; ``stats`` and ``trace`` print text. https://pytorch.org/memory_viz opens the file too.

>>> import tempfile, torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu:
...     x = torch.zeros(1024, 1024)
>>> with tempfile.TemporaryDirectory() as folder:
...     gpu.report().save_snapshot(folder + "/snapshot.pickle").stat().st_size > 0
True

Each allocation's stack is, innermost first: the op, the Python lines (if they were asked for), the module, the phase.
"""
from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


class DriverLog(list):
    """What the allocator asks of the driver, each entry with the number of ledger events that came before it.

    >>> events = ["an allocation"]
    >>> log = DriverLog(events)
    >>> log.append(("segment_alloc", 0x7F0000000000, 2097152)); log[0][:2]
    (1, 'segment_alloc')
    """

    def __init__(self, events: list):
        super().__init__()
        self.events = events

    def append(self, entry: tuple[str, int, int]) -> None:
        super().append((len(self.events), *entry))


@dataclass(frozen=True)
class Heap:
    """The allocator's side of a report: its segments at the end (``CachingAllocator.snapshot()``), and ``driver``, a
    (number of events before it, action, address, bytes) for each segment that came or went."""

    segments: list[dict] = field(default_factory=list)
    driver: list[tuple[int, str, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, allocator) -> Heap:
        log = getattr(allocator, "log", None)
        segments = allocator.snapshot() if hasattr(allocator, "snapshot") else []
        return cls(segments, list(log) if isinstance(log, DriverLog) else [])


def save(log: list[tuple], path: str | Path, origins: dict[int, tuple] | None = None,
         heap: Heap | None = None) -> Path:
    """Writes aside, then moves into place.

    ``log``: one (sign, id, bytes, address, op, phase, category) an event; ``origins``: id -> (module, frames).
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_snapshot: the folder {path.parent} does not exist; make it first")
    stacks = Stacks(origins or {})
    heap = heap or Heap()
    trace = list(_trace(log, stacks, heap.driver))
    snapshot = {"segments": _with_stacks(heap.segments, log, stacks), "device_traces": [trace],
                "allocator_settings": {}, "external_annotations": []}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(snapshot, file)
    os.replace(temporary, path)
    return path


class Stacks:
    """The stack of a log entry as the viewer wants it; equal ones are one object, which keeps the file small."""

    def __init__(self, origins: dict[int, tuple]):
        self.origins, self.made = origins, {}

    def __call__(self, entry: tuple) -> list[dict]:
        _, key, _, _, op, phase, category = entry
        module, frames = self.origins.get(key, ("", ()))
        place = op, phase, category, module, frames
        if place not in self.made:
            rows = [(category, 0, op), *frames, *([("module", 0, module)] if module else []), ("phase", 0, phase)]
            self.made[place] = [{"filename": file, "line": line, "name": name} for file, line, name in rows]
        return self.made[place]


def _trace(log: list[tuple], stacks: Stacks, driver: list[tuple]) -> Iterator[dict]:
    waiting = iter([*driver, (len(log) + 1, "", 0, 0)])
    upcoming = next(waiting)
    for time, entry in enumerate([*log, None]):
        while upcoming[0] <= time:
            yield _driver_event(time, *upcoming[1:])
            upcoming = next(waiting)
        if entry is None:
            break
        sign, _, nbytes, address, _, _, category = entry
        common = {"addr": address, "size": nbytes, "stream": 0, "time_us": time, "frames": stacks(entry)}
        if driver:                  # colours by category; needs one event of category "unknown" (MemoryViz.js)
            common["category"] = category
        if sign > 0:
            yield {"action": "alloc", **common}
        else:
            yield {"action": "free_requested", **common}
            yield {"action": "free_completed", **common}


def _driver_event(time: int, action: str, address: int, nbytes: int) -> dict:
    event = {"action": action, "size": nbytes, "stream": 0, "time_us": time, "frames": [], "category": "unknown"}
    return event | ({"device_free": address} if action == "oom" else {"addr": address})


def _with_stacks(segments: list[dict], log: list[tuple], stacks: Stacks) -> list[dict]:
    """The segments, each block in use with the stack of who holds it."""
    holders: dict[int, tuple] = {}
    for entry in log if segments else ():
        if entry[0] > 0:
            holders[entry[3]] = entry
        else:
            holders.pop(entry[3], None)
    return [{**segment, "blocks": [
        {**block, "frames": stacks(holders[block["address"]])} if block["address"] in holders else block
        for block in segment["blocks"]]} for segment in segments]
