"""Out of memory in a notebook: catch the error, keep its numbers, and get the memory back.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with oom_guard() as oom:
...     with VirtualGPU("T4"):
...         x = torch.empty(20 * 2**30, dtype=torch.uint8)
>>> oom.requested // 2**30
20

A traceback keeps the local variables of every frame that it passed, an error keeps the errors that it came from, and
a notebook keeps the last of them: tensors of a failed call stay alive until the next error. The guard clears the
frames, so that they don't. Variables of the cell itself, and of functions that still run, are the user's and stay.
"""
from __future__ import annotations

import gc
import re
import sys
import traceback

import torch

from .cuda_words import parse

# Out of memory by other names: the driver's own error, cuBLAS without a workspace, the CPU's allocator
# (c10/cuda/CUDAException.cpp, ATen/cuda/CUDABlas.cpp, c10/core/impl/alloc_cpu.cpp).
_OTHER_WORDS = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory")


class oom_guard:  # noqa: N801 - used as a function
    """``with oom_guard() as oom``: an out-of-memory error inside ends the block, not the notebook.

    Afterwards ``oom.message`` is its text (None if there was none) and ``requested``, ``capacity``, ``free``,
    ``allocated``, ``unallocated`` its numbers in bytes (None where the message has none; rounded as it rounds). Other
    errors pass through. Retry *after* the block: only then is the memory back.

    An out-of-memory error is ``torch.OutOfMemoryError``, on a card or a virtual one, ``MemoryError``, what CUDA,
    cuBLAS and the CPU's allocator raise in their own words, an error that was raised ``from`` one of these, and a
    group of nothing else.
    """

    message: str | None = None
    requested = capacity = free = in_use = allowed = allocated = unallocated = reserved = None

    def __enter__(self) -> oom_guard:
        return self

    def __exit__(self, kind, error, tb) -> bool:
        found = _out_of_memory(error)
        if found is None:
            return False
        self.message = str(found) or type(found).__name__
        for name, value in parse(self.message).items():
            setattr(self, name, value)
        del found, tb
        _let_go(error)
        free_memory()
        return True

    def __bool__(self) -> bool:
        """True if memory ran out."""
        return self.message is not None

    def __repr__(self) -> str:
        return "oom_guard: " + (self.message or "no error")


def forget_last_error() -> None:
    """Gives back what an error that nobody caught still holds: the notebook's own copies of it and of its traceback.

    For the cell after one that failed with a red traceback.
    """
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        value = getattr(sys, name, None)
        if isinstance(value, BaseException):
            _let_go(value)
        elif name == "last_traceback" and value is not None:
            traceback.clear_frames(value)
        if hasattr(sys, name):
            setattr(sys, name, None)
    try:
        shell = get_ipython()                               # noqa: F821 - IPython's own builtin
    except NameError:
        shell = None
    if shell is not None:
        _forget_in(shell)
    free_memory()


def _forget_in(shell) -> None:
    """What IPython 9 keeps besides ``sys.last_*``: the formatter's traceback, the debugger's, the cell's result."""
    formatter, result = getattr(shell, "InteractiveTB", None), getattr(shell, "last_execution_result", None)
    if result is not None:
        _let_go(result.error_in_exec)
        shell.last_execution_result = None
    if getattr(formatter, "tb", None) is not None:
        traceback.clear_frames(formatter.tb)
        formatter.tb = None
    if getattr(formatter, "pdb", None) is not None:         # after %debug
        formatter.pdb = None                                # the next %debug makes a new one


def free_memory() -> None:
    """Collects garbage and returns cached segments to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The out-of-memory error that this one is, or was raised from; of a group, the first, if it has no others."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            found = [_out_of_memory(part) for part in error.exceptions]
            if all(part is not None for part in found):
                return found[0]
        elif isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return error
        elif isinstance(error, RuntimeError) and _OTHER_WORDS.search(str(error)):
            return error
        error = error.__cause__
    return None


def _let_go(error: BaseException | None) -> None:
    """Empties the frames that the error passed through, and those of all errors that it came from or consists of."""
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        if isinstance(error, AttributeError):
            error.obj = None                                # what the attribute was looked for in
