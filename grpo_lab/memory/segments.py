"""What the allocator's memory is made of: segments from the driver, cut into blocks, kept in pools.

>>> segment_size(512), segment_size(3 * MiB), segment_size(11 * MiB)     # what such a request asks of the driver
(2097152, 20971520, 12582912)

Constants and rules are those of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``.
"""
from __future__ import annotations

from bisect import bisect_left, insort

KiB, MiB, GiB = 2**10, 2**20, 2**30

ROUND = 512                # kMinBlockSize: every request is rounded up to a multiple of it
SMALL = 1 * MiB            # kSmallSize: requests up to this come from the pool of small segments
SMALL_SEGMENT = 2 * MiB    # kSmallBuffer: what a small segment measures; the page of a small expandable segment
MIN_LARGE = 10 * MiB       # kMinLargeAlloc: requests below it are cut from a 20 MiB segment
LARGE_SEGMENT = 20 * MiB   # large_segment_size (kLargeBuffer): that segment; the page of a large expandable segment
ROUND_LARGE = 2 * MiB      # kRoundLarge: larger segments are rounded up to a multiple of it

# What a block is: free to take; in use; given back but still used by another stream (record_stream); address space
# of an expandable segment without memory behind it. Only neighbours that are both free, or both unmapped, merge.
FREE, USED, PENDING, UNMAPPED = range(4)
STATES = {FREE: "inactive", USED: "active_allocated", PENDING: "active_pending_free"}    # as memory_snapshot.cpp


def round_up(nbytes: int, multiple: int = ROUND) -> int:
    """The next multiple.

    >>> round_up(1), round_up(512), round_up(513)
    (512, 512, 1024)
    """
    return -(-nbytes // multiple) * multiple


def segment_size(nbytes: int, large: int = LARGE_SEGMENT) -> int:
    """How much the allocator asks of the driver when no cached block serves ``nbytes`` (rounded) bytes.

    ``get_allocation_size``. ``large``: the setting large_segment_size_mb, in bytes.
    """
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < MIN_LARGE:
        return large
    return round_up(nbytes, ROUND_LARGE)


class DoesNotFit(Exception):
    """What was asked for can't be had. By now, as in PyTorch, everything cached has been given back to the driver.

    ``requested``: bytes asked for; ``segment``: what the driver was asked for on their behalf (the figure in CUDA's
    message); ``allocated``, ``reserved`` and ``free`` after the release; ``allowed``: the limit that a memory fraction
    sets, or None; ``rejected``: whether throw_on_cudamalloc_oom refused it beforehand, with nothing released.
    """

    def __init__(self, requested: int, segment: int, allocator, rejected: bool = False):
        super().__init__(f"{requested} bytes do not fit")
        self.requested, self.segment, self.allowed, self.rejected = requested, segment, allocator.allowed, rejected
        self.allocated, self.reserved = allocator.allocated, allocator.reserved
        self.free = allocator.budget - allocator.reserved


class Pool:
    """The small or the large blocks of one stream: which are free, for best fit, and which are unmapped.

    Both lists are sorted triples (size, address, block); unmapped blocks count as size 0, so that the lowest address
    comes first. C++ keeps one set for all streams, sorted by stream first, which comes to the same.
    """

    __slots__ = ("small", "stream", "blocks", "unmapped")

    def __init__(self, small: bool, stream: int):
        self.small, self.stream = small, stream
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []


class Segment:
    """What the driver gave in one piece, or (``expandable``) a range of addresses that memory is mapped into."""

    __slots__ = ("address", "size", "pool", "expandable", "head")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False):
        self.address, self.size, self.pool, self.expandable = address, size, pool, expandable
        self.head = Block(address, size, pool, self)        # its first block; the others hang on `next`


class Block:
    """A piece of a segment: ``address``, ``size`` and ``requested`` in bytes, its state, and its neighbours."""

    __slots__ = ("address", "size", "requested", "pool", "segment", "state", "uses", "born", "previous", "next")

    def __init__(self, address: int, size: int, pool: Pool, segment: Segment):
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.requested, self.born, self.state = 0, 0, FREE
        self.uses = self.previous = self.next = None        # uses: other streams that work on it, or None

    @property
    def used(self) -> bool:
        return self.state == USED

    @property
    def stream(self) -> int:
        return self.pool.stream

    @property
    def whole(self) -> bool:
        """Whether the block is a segment of its own, which can be given back to the driver."""
        return self.previous is None and self.next is None and not self.segment.expandable

    def __repr__(self) -> str:
        return f"<Block {self.address:#x} {self.size} B {STATES.get(self.state, 'unmapped')}>"


def put(block: Block) -> None:
    """Enters a free or unmapped block into its pool."""
    if block.state == UNMAPPED:
        insort(block.pool.unmapped, (0, block.address, block))
    else:
        insort(block.pool.blocks, (block.size, block.address, block))


def take(block: Block) -> None:
    """Takes a free or unmapped block out of its pool."""
    if block.state == UNMAPPED:
        del block.pool.unmapped[bisect_left(block.pool.unmapped, (0, block.address))]
    else:
        del block.pool.blocks[bisect_left(block.pool.blocks, (block.size, block.address))]


def cut(block: Block, size: int, state: int = FREE) -> Block:
    """Leaves ``size`` bytes to ``block``; the rest becomes a new block behind it, in ``state``, not yet in a pool."""
    rest = Block(block.address + size, block.size - size, block.pool, block.segment)
    rest.state, rest.born = state, block.born
    rest.previous, rest.next, block.next, block.size = block, block.next, rest, size
    if rest.next is not None:
        rest.next.previous = rest
    return rest


def merge(block: Block) -> None:
    """Takes in the neighbours that are in the same state (free or unmapped); the block itself is in no pool yet."""
    state = block.state
    before, after = block.previous, block.next
    if before is not None and before.state == state:
        take(before)
        block.address, block.previous, block.size = before.address, before.previous, block.size + before.size
        if block.previous is not None:
            block.previous.next = block
        else:
            block.segment.head = block
    if after is not None and after.state == state:
        take(after)
        block.next, block.size = after.next, block.size + after.size
        if block.next is not None:
            block.next.previous = block


def describe(segment: Segment) -> list[dict]:
    """A segment as ``torch.cuda.memory._snapshot()["segments"]`` lists it: one entry for each mapped stretch."""
    entries, entry, block = [], None, segment.head
    while block is not None:
        if block.state == UNMAPPED:
            entry = None
        else:
            if entry is None:
                entry = {"device": 0, "address": block.address, "total_size": 0, "allocated_size": 0, "active_size": 0,
                         "requested_size": 0, "stream": segment.pool.stream, "segment_pool_id": (0, 0),
                         "segment_type": "small" if segment.pool.small else "large",
                         "is_expandable": segment.expandable, "frames": [], "blocks": []}
                entries.append(entry)
            active = block.state != FREE
            requested = block.requested if active else 0
            entry["total_size"] += block.size
            entry["allocated_size"] += block.size if block.state == USED else 0
            entry["active_size"] += block.size if active else 0
            entry["requested_size"] += requested
            entry["blocks"].append({"address": block.address, "size": block.size, "requested_size": requested,
                                    "state": STATES[block.state], "frames": []})
        block = block.next
    return entries
