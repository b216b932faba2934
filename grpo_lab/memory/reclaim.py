"""How the allocator takes cached segments apart to make room, short of giving everything back.

Both work only where a setting asks for them: ``max_split_size_mb`` and ``garbage_collection_threshold``.

>>> from grpo_lab.memory.allocator import CachingAllocator, MiB
>>> allocator = CachingAllocator(budget=100 * MiB, settings="max_split_size_mb:20")
>>> for size in (30, 40):
...     allocator.free(allocator.allocate(size * MiB))
>>> block = allocator.allocate(64 * MiB)            # 40 and 30 are given back, the largest first
>>> allocator.reserved // MiB, allocator.num_alloc_retries
(64, 0)
"""
from __future__ import annotations

from bisect import bisect_left

from .segments import Pool


def oversize(allocator, pool: Pool, size: int) -> bool:
    """Gives back one oversize block that is large enough, or several from the largest down, until they are; whether
    it got that far (``release_available_cached_blocks``)."""
    limit = allocator.settings.max_split_size
    if limit is None:
        return False
    size = max(size, limit)
    index = bisect_left(pool.blocks, (size,))
    if index < len(pool.blocks) and not pool.blocks[index][2].segment.expandable:
        allocator.release(pool.blocks[index][2])
        return True
    released = 0
    for found, _, block in reversed(pool.blocks[:index]):
        if released >= size or found < limit:
            break
        if not block.segment.expandable:
            released += found
            allocator.release(block)
    return released >= size


def garbage(allocator, pools: list[Pool]) -> None:
    """Above the threshold: gives back cached large segments that were passed over more often than the average, until
    enough is free or no more can be (``garbage_collect_cached_blocks``).

    A segment's age is the number of searches for a large block since it was last freed.
    """
    goal = allocator.reserved - int(allocator.settings.garbage_collection_threshold * allocator.allowed)
    old = [block for pool in pools if not pool.small for _, _, block in pool.blocks
           if block.previous is None and block.next is None]
    while goal > 0 and old:
        average = sum(allocator.searches - block.born for block in old) / len(old)
        gone = [block for block in old if block.whole and allocator.searches - block.born >= average]
        if not gone:
            return
        for block in gone:
            goal -= block.size
            old.remove(block)
            allocator.release(block)
