"""Writes a report's events in the layout of ``torch.cuda.memory._snapshot()``, for PyTorch's own viewer.

``python -m torch.cuda._memory_viz trace_plot FILE -o FILE.html`` opens it; so does https://pytorch.org/memory_viz.
"""
from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path


def save(log: list[tuple], path: str | Path) -> Path:
    """``log``: one (sign, id, bytes, address, op, phase, category) an event. Written aside, then moved into place."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_snapshot: the folder {path.parent} does not exist; make it first")
    trace = [_event(time, *entry) for time, entry in enumerate(log)]
    snapshot = {"segments": [], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(snapshot, file)
    os.replace(temporary, path)
    return path


def _event(time: int, sign: int, key: int, nbytes: int, address: int, op: str, phase: str, category: str) -> dict:
    frames = [{"name": op, "filename": category, "line": 0}, {"name": phase, "filename": "phase", "line": 0}]
    return {"action": "alloc" if sign > 0 else "free_completed", "addr": address, "size": nbytes, "stream": 0,
            "time_us": time, "frames": frames}
