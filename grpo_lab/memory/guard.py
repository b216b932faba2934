"""Out of memory in a notebook: catch the error, keep its numbers, and get the memory back.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with oom_guard() as oom:
...     with VirtualGPU("T4"):
...         x = torch.empty(20 * 2**30, dtype=torch.uint8)
>>> oom.requested // 2**30
20

A traceback keeps the local variables of every frame that it passed, and a notebook keeps the last traceback: tensors
of a failed call stay alive until the next error. The guard clears the frames, so that they don't.
"""
from __future__ import annotations

import gc
import re
import sys
import traceback

import torch

_NUMBERS = {                    # attribute -> its place in CUDA's message (PyTorch 2.1 and later)
    "requested": r"Tried to allocate ([\d.]+ \w+)",
    "capacity": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "allocated": r"Of the allocated memory ([\d.]+ \w+) is allocated",
    "unallocated": r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",
}
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class oom_guard:  # noqa: N801 - used as a function
    """``with oom_guard() as oom``: an out-of-memory error inside ends the block, not the notebook.

    Afterwards ``oom.message`` is its text (None if there was none) and ``requested``, ``capacity``, ``free``,
    ``allocated``, ``unallocated`` its numbers in bytes (None where the message has none; rounded as it rounds). Other
    errors pass through. Retry *after* the block: only then is the memory back.
    """

    message: str | None = None
    requested = capacity = free = allocated = unallocated = None

    def __enter__(self) -> oom_guard:
        return self

    def __exit__(self, kind, error, tb) -> bool:
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.message = str(error)
        for name, pattern in _NUMBERS.items():
            if found := re.search(pattern, self.message):
                value, unit = found[1].split()
                setattr(self, name, round(float(value) * _UNITS[unit]))
        _let_go(error)
        free_memory()
        return True

    def __bool__(self) -> bool:
        """True if memory ran out."""
        return self.message is not None

    def __repr__(self) -> str:
        return "oom_guard: " + (self.message or "no error")


def forget_last_error() -> None:
    """Gives back what an error that nobody caught still holds: the notebook's own copies of its traceback.

    For the cell after one that failed with a red traceback.
    """
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        value = getattr(sys, name, None)
        if isinstance(value, BaseException):
            _let_go(value)
        if hasattr(sys, name):
            setattr(sys, name, None)
    try:
        shell = get_ipython()                               # noqa: F821 - IPython's own builtin
    except NameError:
        shell = None
    if shell is not None and getattr(shell, "InteractiveTB", None) is not None:
        shell.InteractiveTB.tb = None                       # IPython 9 keeps one more
    free_memory()


def free_memory() -> None:
    """Collects garbage and returns cached segments to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _let_go(error: BaseException | None) -> None:
    """Empties the frames that the error, its cause and its context passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__cause__ or error.__context__
