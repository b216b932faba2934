"""CUDA's out-of-memory message: written as PyTorch writes it, and read back.

>>> GiB = 2**30
>>> message = cuda_message({"requested": 2 * GiB, "allocated": 12 * GiB, "reserved": 13 * GiB}, 15 * GiB, GiB // 2)
>>> message[:88]
'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.50 GiB '
>>> parse(message)["unallocated"] == GiB
True

The words are those that PyTorch 2.12 and 2.13 have in their libc10_cuda.so (``DeviceCachingAllocator::malloc``); 2.10
differs in the tip at the end only (PYTORCH_ALLOC_CONF, and another address).
"""
from __future__ import annotations

import re

from .segments import round_up, segment_size

# Name -> its places in the message. PyTorch 2.1 and later (2.1 writes "capacty"); then 2.0 and XPU: "(GPU 0; 15.73 GiB
# total capacity; 9.90 GiB already allocated; ..."; then MPS. "allowed" is there only under a memory fraction.
PLACES = {
    "requested": (r"(?:[Tt]ried to allocate|Requested size:) ([\d.]+ \w+)",),
    "capacity": (r"total capaci?ty of ([\d.]+ \w+)", r"([\d.]+ \w+) total capacity"),
    "free": (r"of which ([\d.]+ \w+) is free", r"([\d.]+ \w+) free;"),
    "in_use": (r"this process has ([\d.]+ \w+) memory in use",),
    "allowed": (r"([\d.]+ \w+) allowed;", r"max allowed: ([\d.]+ \w+)"),
    "allocated": (r"Of the allocated memory ([\d.]+ \w+) is allocated", r"([\d.]+ \w+) already allocated",
                  r"MPS allocated: ([\d.]+ \w+)"),
    "unallocated": (r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",),
    "reserved": (r"([\d.]+ \w+) reserved in total by PyTorch",),
}
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def cuda_message(oom: dict, budget: int, context: int) -> str:
    """The words of PyTorch 2.12 and 2.13 for the same event on a card with ``budget + context`` bytes.

    ``oom`` (``vars`` of a :class:`DoesNotFit` will do): ``allocated`` and ``reserved`` bytes as they were when the
    error was raised, that is after everything cached had been given back; ``segment``, what the driver was asked for
    (if it isn't there, what PyTorch's default settings ask for on behalf of ``requested`` bytes); ``allowed``, the
    limit of a memory fraction, if there is one; ``rejected``, whether it was refused beforehand.
    PyTorch names the segment, not the tensor: a tensor of 3 MiB is "Tried to allocate 20.00 MiB".
    """
    if oom.get("rejected"):                                     # throw_on_cudamalloc_oom
        return ("CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                f"per_process_memory_fraction limit. Requested size: {size(oom['requested'])}")
    allocated, reserved, allowed = oom["allocated"], oom["reserved"], oom.get("allowed")
    segment = oom.get("segment") or segment_size(round_up(oom["requested"]))
    return (f"CUDA out of memory. Tried to allocate {size(segment)}. GPU 0 has a total capacity of "
            f"{size(budget + context)} of which {size(max(0, budget - reserved))} is free. Including non-PyTorch "
            f"memory, this process has {size(reserved + context)} memory in use. "
            + (f"{size(allowed)} allowed; " if allowed is not None else "") +
            f"Of the allocated memory {size(allocated)} is allocated by PyTorch, and {size(reserved - allocated)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)")


def parse(message: str) -> dict[str, int | None]:
    """The numbers of such a message in bytes, as precisely as it gives them; None where it has none.

    >>> parse("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")["requested"]
    20971520
    """
    found: dict[str, int | None] = {}
    for name, places in PLACES.items():
        match = next(filter(None, (re.search(place, message) for place in places)), None)
        found[name] = match and _bytes(match[1])
    allocated, unallocated, reserved = (found[name] for name in ("allocated", "unallocated", "reserved"))
    if reserved is None and unallocated is not None and allocated is not None:
        found["reserved"] = allocated + unallocated
    if unallocated is None and reserved is not None and allocated is not None:
        found["unallocated"] = max(0, reserved - allocated)
    return found


def other_processes(message: str) -> int:
    """Bytes that other processes had in use, as far as the message names them.

    >>> other_processes("Process 7 has 1.00 GiB memory in use. Process 8 has 512.00 MiB memory in use. Of the ...") // 2**20
    1536
    """
    return sum(_bytes(words) or 0 for words in re.findall(r"Process \d+ has ([\d.]+ \w+) memory in use", message))


def size(nbytes: int) -> str:
    """Bytes as CUDA's messages write them (``format_size`` in c10/core/CachingDeviceAllocator.h).

    A unit starts above its first multiple: exactly 1 GiB is still written in MiB.

    >>> size(512), size(2048), size(2**30), size(5 * 2**30 // 2)
    ('512 bytes', '2.00 KiB', '1024.00 MiB', '2.50 GiB')
    """
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes > UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f} {unit}"
    return f"{nbytes} bytes"


def _bytes(words: str) -> int | None:
    number, unit = words.split()
    return round(float(number) * UNITS[unit]) if unit in UNITS else None
