"""A replica of PyTorch's CUDA caching allocator: which segments it would hold, and when it would give up.

>>> allocator = CachingAllocator(budget=100 * MiB)
>>> block = allocator.allocate(3 * MiB)             # below 10 MiB: cut from a 20 MiB segment
>>> allocator.allocated // MiB, allocator.reserved // MiB
(3, 20)
>>> allocator.free(block); allocator.allocated, allocator.reserved // MiB
(0, 20)

The rules and their constants are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.10 to 2.13, default
settings, one stream). Nothing here knows of tensors: bytes in, blocks out.
"""
from __future__ import annotations

from bisect import bisect_left, insort

KiB, MiB, GiB = 2**10, 2**20, 2**30

ROUND = 512                # kMinBlockSize: every request is rounded up to a multiple of it
SMALL = 1 * MiB            # kSmallSize: requests up to this come from the pool of small segments
SMALL_SEGMENT = 2 * MiB    # kSmallBuffer: what a small segment measures
MIN_LARGE = 10 * MiB       # kMinLargeAlloc: requests below it are cut from a 20 MiB segment
LARGE_SEGMENT = 20 * MiB   # kLargeBuffer
ROUND_LARGE = 2 * MiB      # kRoundLarge: larger segments are rounded up to a multiple of it


def round_up(nbytes: int, multiple: int = ROUND) -> int:
    """The next multiple.

    >>> round_up(1), round_up(512), round_up(513)
    (512, 512, 1024)
    """
    return -(-nbytes // multiple) * multiple


def segment_size(nbytes: int) -> int:
    """How much the allocator asks of the driver when no cached block serves ``nbytes`` (rounded) bytes."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < MIN_LARGE:
        return LARGE_SEGMENT
    return round_up(nbytes, ROUND_LARGE)


class Block:
    """A piece of a segment: ``address`` and ``size`` in bytes, whether it is in use, and its neighbours."""

    __slots__ = ("address", "size", "segment_size", "small", "used", "previous", "next")

    def __init__(self, address: int, size: int, segment_size: int, small: bool):
        self.address, self.size, self.segment_size, self.small = address, size, segment_size, small
        self.used, self.previous, self.next = False, None, None

    def __lt__(self, other: Block) -> bool:          # best fit: the smallest, then the lowest address
        return (self.size, self.address) < (other.size, other.address)

    @property
    def is_segment(self) -> bool:
        return self.previous is None and self.next is None


class DoesNotFit(Exception):
    """What was asked for can't be had within the budget. Attributes: ``requested`` bytes; the state is unchanged."""

    def __init__(self, requested: int):
        super().__init__(f"{requested} bytes do not fit")
        self.requested = requested


class CachingAllocator:
    """Allocates and frees within ``budget`` bytes (None: without end), as one CUDA process on one stream would.

    ``allocated`` counts the blocks in use, ``reserved`` the segments held, both in bytes; their peaks since the
    last :meth:`reset_peaks` are ``peak_allocated`` and ``peak_reserved``.
    """

    def __init__(self, budget: int | None = None):
        self.budget = budget
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}     # by pool (small?), sorted for best fit
        self._top = 0x7F0000000000                                      # where the next segment is placed
        self.segments: dict[int, int] = {}                              # address -> size
        self.log: list[tuple[str, int, int]] | None = None              # ("segment_alloc"|"segment_free", address, size)

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes`` bytes, rounded up to 512. Raises :class:`DoesNotFit`."""
        size = max(ROUND, round_up(nbytes))
        small = size <= SMALL
        block = self._best_fit(size, small) or self._new_segment(size, small, nbytes)
        self._split(block, size)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to its pool, merged with free neighbours. The segment stays reserved."""
        if not block.used:
            raise ValueError(f"the block at {block.address:#x} is not in use: it was freed before")
        block.used = False
        self.allocated -= block.size
        pool = self._free[block.small]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.used:
                del pool[bisect_left(pool, neighbour)]
                self._absorb(block, neighbour)
        insort(pool, block)

    def empty_cache(self) -> int:
        """Returns every wholly free segment to the driver, as ``torch.cuda.empty_cache()``; the bytes released."""
        before = self.reserved
        for small, pool in self._free.items():
            for block in (b for b in pool if b.is_segment):
                self.reserved -= block.size
                del self.segments[block.address]
                self._note("segment_free", block.address, block.size)
            self._free[small] = [b for b in pool if not b.is_segment]
        return before - self.reserved

    @property
    def releasable(self) -> int:
        """Bytes in wholly free segments: what :meth:`empty_cache` would give back."""
        return sum(b.size for pool in self._free.values() for b in pool if b.is_segment)

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _best_fit(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        probe = Block(0, size, 0, small)
        index = bisect_left(pool, probe)
        return pool.pop(index) if index < len(pool) else None

    def _new_segment(self, size: int, small: bool, nbytes: int) -> Block:
        need = segment_size(size)
        if self.budget is not None and self.reserved + need > self.budget:
            if self.reserved - self.releasable + need > self.budget:
                raise DoesNotFit(nbytes)
            self.empty_cache()                      # release what is cached and try again, as the card does
        address, self._top = self._top, self._top + need
        self.segments[address] = need
        self.reserved += need
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._note("segment_alloc", address, need)
        return Block(address, need, need, small)

    def _split(self, block: Block, size: int) -> None:
        """Cuts off what is not needed: from 512 B on in the small pool, above 1 MiB in the large one."""
        rest = block.size - size
        if rest < ROUND if block.small else rest <= SMALL:
            return
        tail = Block(block.address + size, rest, block.segment_size, block.small)
        tail.previous, tail.next, block.next, block.size = block, block.next, tail, size
        if tail.next is not None:
            tail.next.previous = tail
        insort(self._free[block.small], tail)

    @staticmethod
    def _absorb(block: Block, neighbour: Block) -> None:
        if neighbour is block.previous:
            block.address, block.previous = neighbour.address, neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        block.size += neighbour.size

    def _note(self, action: str, address: int, size: int) -> None:
        if self.log is not None:
            self.log.append((action, address, size))
