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

# Name -> its places in the message. PyTorch 2.1 and later (2.1 writes "capacty") and XPU; then 2.0: "(GPU 0; 15.73 GiB
# total capacity; 9.90 GiB already allocated; ..."; then the cudaMallocAsync backend's table; then MPS. "allowed" is there
# only under a memory fraction.
SIZE = r"(\d+(?:\.\d+)? \w+)"
PLACES = {
    "requested": (rf"(?:[Tt]ried to allocate|Requested size:) {SIZE}", rf"Requested *: {SIZE}"),
    "capacity": (rf"total capaci?ty of {SIZE}", rf"{SIZE} total capacity", rf"Device limit *: {SIZE}"),
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free;", rf"Free \(according to CUDA\) *: {SIZE}"),
    "in_use": (rf"this process has {SIZE} memory in use",),
    "allowed": (rf"{SIZE} allowed;", rf"max allowed: {SIZE}", rf"user-supplied memory fraction\)\s*: {SIZE}"),
    "allocated": (rf"Of the allocated memory {SIZE} is allocated", rf"{SIZE} already allocated",
                  rf"Currently allocated *: {SIZE}", rf"MPS allocated: {SIZE}"),
    "unallocated": (rf"and {SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}  # fmt: skip
# MPS writes GB for what it divided by 2**30 (aten/src/ATen/mps/MPSAllocator.h).
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 2**10, "MB": 2**20, "GB": 2**30}
NOT_KNOWN = 2**60   # NVML on Windows says -1 of a process's memory, no limit is 2**64 - 1: written "17179869184.00 GiB"


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

    >>> words = "Process 7 has 1.00 GiB memory in use. Process 8 has 9.50 GiB memory in use. "
    >>> other_processes(words + "Including non-PyTorch memory, this process has 512.00 MiB memory in use.") / 2**30
    10.5
    >>> other_processes(words + "Of the allocated memory 9.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
    ...                 "PyTorch but unallocated.") / 2**30
    1.0

    In a container, PyTorch looks for its own number among the host's and doesn't find itself: this process is then one
    of those listed, the smallest that holds what PyTorch has reserved.
    """
    named = [_bytes(words) or 0 for words in re.findall(rf"Process \d+ has {SIZE} memory in use", message)]
    numbers = parse(message)
    if numbers["in_use"] is None and "this process has" not in message:
        at_least = numbers["reserved"] or numbers["allocated"] or 0
        own = [nbytes for nbytes in named if nbytes >= 0.99 * at_least] or named     # sizes are rounded
        if own:
            named.remove(min(own) if at_least else max(own))
    return sum(named)


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
    if unit not in UNITS:
        return None
    nbytes = round(float(number) * UNITS[unit])
    return nbytes if nbytes < NOT_KNOWN else None
