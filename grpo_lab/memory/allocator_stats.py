"""The allocator's statistics under the names that ``torch.cuda.memory_stats()`` gives them.

>>> from grpo_lab.memory.allocator import CachingAllocator
>>> allocator = CachingAllocator()
>>> _ = allocator.allocate(1000)
>>> stats = memory_stats(allocator)
>>> stats["allocated_bytes.all.current"], stats["requested_bytes.all.current"], stats["segment.small_pool.current"]
(1024, 1000, 1)
"""
from __future__ import annotations

from .cuda_words import size


def memory_stats(allocator) -> dict[str, int]:
    """Current values for all pools, and of both kinds of pool; peaks and totals where the replica keeps them: bytes
    allocated, reserved and active, and the number of allocations. Sorted by name, as PyTorch sorts them."""
    counts = {f"{name}.{pool}.current": 0 for pool in ("all", "small_pool", "large_pool") for name in (
        "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes",
        "allocation", "segment", "active", "inactive_split")}
    for segment in allocator.snapshot():
        for pool in ("all", segment["segment_type"] + "_pool"):
            for name, nbytes in _of(segment).items():
                counts[f"{name}.{pool}.current"] += nbytes
    frees = allocator.total_allocated - allocator.allocated
    totals = {"allocated_bytes.all.peak": allocator.peak_allocated,
              "allocated_bytes.all.allocated": allocator.total_allocated, "allocated_bytes.all.freed": frees,
              "reserved_bytes.all.peak": allocator.peak_reserved,
              "reserved_bytes.all.allocated": allocator.total_reserved,
              "reserved_bytes.all.freed": allocator.total_reserved - allocator.reserved,
              "active_bytes.all.peak": allocator.peak_active,
              "active_bytes.all.allocated": allocator.total_allocated,
              "active_bytes.all.freed": allocator.total_allocated - allocator.active,
              "allocation.all.allocated": allocator.total_allocations, "allocation.all.freed": allocator.total_frees,
              "max_split_size": -1 if allocator.settings.max_split_size is None else allocator.settings.max_split_size}
    events = {name: getattr(allocator, name) for name in (
        "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams", "num_device_alloc",
        "num_device_free")}
    return dict(sorted({**counts, **totals, **events}.items()))


def memory_summary(allocator, name: str) -> str:
    """A few lines for people: what is allocated, reserved and cached, now and at the peak."""
    stats = memory_stats(allocator)
    rows = [("allocated", "allocated_bytes"), ("active", "active_bytes"), ("reserved", "reserved_bytes")]
    lines = [f"PyTorch CUDA memory summary, simulated: {name}",
             f"OOMs: {stats['num_ooms']}, retries after releasing the cache: {stats['num_alloc_retries']}",
             f"{'':<16}{'now':>14}{'peak':>14}"]
    lines += [f"{label:<16}{size(stats[key + '.all.current']):>14}{size(stats[key + '.all.peak']):>14}"
              for label, key in rows]
    return "\n".join([*lines, f"{'inactive, split':<16}{size(stats['inactive_split_bytes.all.current']):>14}"])


def _of(segment: dict) -> dict[str, int]:
    """One segment's share. A piece of an expandable segment can always be given back, so that none is "split"; nor
    does PyTorch count expandable segments in ``segment``."""
    states = [block["state"] for block in segment["blocks"]]
    split = len(states) > 1 and not segment["is_expandable"]
    inactive = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"] if split else []
    return {"allocated_bytes": segment["allocated_size"], "reserved_bytes": segment["total_size"],
            "active_bytes": segment["active_size"], "requested_bytes": segment["requested_size"],
            "inactive_split_bytes": sum(inactive), "inactive_split": len(inactive),
            "allocation": states.count("active_allocated"), "segment": int(not segment["is_expandable"]),
            "active": len(states) - states.count("inactive")}
