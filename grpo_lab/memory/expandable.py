"""Expandable segments: one range of addresses a pool and stream, into which memory is mapped page by page.

``PYTORCH_ALLOC_CONF=expandable_segments:True``. Pages are 2 MiB in the small pool and 20 MiB in the large one. The
range grows at its end, so that blocks of changing sizes tile it instead of leaving a sliver in a segment each.
``map`` and ``unmap`` are what ``ExpandableSegment`` in CUDACachingAllocator.cpp does with cuMemMap and cuMemUnmap.

>>> from grpo_lab.memory.allocator import CachingAllocator
>>> allocator = CachingAllocator(settings="expandable_segments:True")
>>> for size in (30, 31, 32):                       # MiB, each freed before the next is asked for
...     allocator.free(allocator.allocate(size * MiB))
>>> allocator.reserved // MiB                       # without the setting: 30 + 32 + 32, less what fits again
40
"""
from __future__ import annotations

from .segments import FREE, SMALL_SEGMENT, UNMAPPED, Block, MiB, Pool, Segment, cut, merge, put, round_up, take

UNLIMITED = 2**46           # the range's size where no card says how much memory there is


def page(allocator, pool: Pool) -> int:
    """Bytes that are mapped at once."""
    return SMALL_SEGMENT if pool.small else allocator.settings.large_segment_size


def obtain(allocator, pool: Pool, size: int) -> Block | None:
    """A free block of at least ``size`` bytes, in no pool; memory is mapped as needed. None: no memory left.

    ``try_allocate_expandable_block``. What was mapped before memory ran out stays, as a free block.
    """
    block = _room(allocator, pool, size)
    if block.state == UNMAPPED and not _map(allocator, block, min(size, block.size)):
        return None
    while block.size < size:
        following = block.next                          # unmapped; once mapped it takes `block` in
        if following is None or not _map(allocator, following, min(size - block.size, following.size)):
            return None
        block = following
    take(block)
    return block


def unmap(allocator, block: Block) -> int:
    """Gives the whole pages inside a free block back to the driver; the bytes given back (``unmap_block``)."""
    segment, size = block.segment, page(allocator, block.pool)
    start = segment.address + round_up(block.address - segment.address, size)
    end = segment.address + (block.address + block.size - segment.address) // size * size
    if start >= end:
        return 0
    take(block)
    if end < block.address + block.size:
        put(cut(block, end - block.address))
    if start > block.address:
        pages = cut(block, start - block.address)
        put(block)
        block = pages
    block.state = UNMAPPED
    merge(block)
    put(block)
    if block.previous is None and block.next is None:
        take(block)
        del allocator.pieces[segment.address]
    allocator.lose(end - start, "segment_unmap", start)
    return end - start


def releasable(allocator, block: Block) -> int:
    """What :func:`unmap` would give back."""
    size, offset = page(allocator, block.pool), block.address - block.segment.address
    return max(0, (offset + block.size) // size * size - round_up(offset, size))


def reach(block: Block) -> int:
    """How large a block of an expandable segment can get: with the unmapped block behind it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def _room(allocator, pool: Pool, size: int) -> Block:
    """Where ``size`` bytes can be had at the lowest address: an unmapped block, or a free one with unmapped ones
    behind it (``find_expandable_block``)."""
    for _, _, block in pool.unmapped:
        if block.previous is not None and block.previous.state == FREE:
            block = block.previous
        room, other = 0, block
        while room < size and other is not None and other.state in (FREE, UNMAPPED):
            room, other = room + other.size, other.next
        if room >= size:
            return block
    total = allocator.total_memory                      # PyTorch takes addresses for 1 1/8 of the card's memory
    space = UNLIMITED if allocator.budget is None else total + total // 8
    segment = allocator.place(round_up(space, page(allocator, pool)), pool, expandable=True)
    segment.head.state = UNMAPPED
    put(segment.head)
    return segment.head


def _map(allocator, block: Block, size: int) -> bool:
    """Puts memory behind the first ``size`` bytes of an unmapped block, rounded up to pages (``map_block``)."""
    size = round_up(size, page(allocator, block.pool))
    if allocator.budget is not None and allocator.reserved + size > allocator.budget:
        return False
    take(block)
    if size < block.size:
        put(cut(block, size, UNMAPPED))
    address, block.state, block.born = block.address, FREE, allocator.searches
    merge(block)
    put(block)
    allocator.gain(size, "segment_map", address)
    return True
