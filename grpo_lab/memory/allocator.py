"""A replica of PyTorch's CUDA caching allocator: which segments it would hold, and when it would give up.

>>> allocator = CachingAllocator(budget=100 * MiB)
>>> block = allocator.allocate(3 * MiB)             # below 10 MiB: cut from a 20 MiB segment
>>> allocator.allocated // MiB, allocator.reserved // MiB
(3, 20)
>>> allocator.free(block); allocator.allocated, allocator.reserved // MiB
(0, 20)

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` in PyTorch 2.13, compared with it step by step
(``scripts/record_allocator``); 2.12 may take another of several free blocks of the same size. Each method names its
counterpart there. Nothing here knows of tensors: bytes in, blocks out. Not replicated: private pools of CUDA graphs.
"""
from __future__ import annotations

from bisect import bisect_left, insort

from . import expandable, reclaim
from .allocator_settings import AllocatorSettings
from .segments import (  # noqa: F401  (the constants are re-exported)
    FREE, LARGE_SEGMENT, MIN_LARGE, PENDING, ROUND, ROUND_LARGE, SMALL, SMALL_SEGMENT, USED, Block, DoesNotFit, GiB,
    KiB, MiB, Pool, Segment, cut, describe, merge, round_up, segment_size)


class CachingAllocator:
    """Allocates and frees within ``budget`` bytes (None: without end), as one CUDA process would.

    ``settings``: an :class:`AllocatorSettings`, a string as in PYTORCH_ALLOC_CONF, or None for PyTorch's defaults.
    ``total_memory``: all of the card's memory, of which a memory fraction is taken (None: the budget).

    ``allocated`` counts the blocks in use, ``reserved`` what is held from the driver, ``requested`` the bytes asked
    for before rounding; the peaks of the first two since the last :meth:`reset_peaks` are ``peak_allocated`` and
    ``peak_reserved``. ``log``, if set to a list, gets (action, address, size) of each segment, with PyTorch's names.
    """

    def __init__(self, budget: int | None = None, settings: AllocatorSettings | str | None = None,
                 total_memory: int | None = None):
        self.budget, self.total_memory = budget, budget if total_memory is None else total_memory
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.requested = 0
        self.pending = self._peak_active = 0                # bytes given back that another stream still uses
        self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.total_allocations = self.total_frees = self.total_allocated = self.total_reserved = 0
        self.log: list[tuple[str, int, int]] | None = None
        self._pools: dict[tuple[bool, int], Pool] = {}
        self.pieces: dict[int, Segment] = {}
        self._waiting: list[Block] = []                     # freed, but in use on another stream
        self._top = 0x7F0000000000                          # where the next segment is placed
        self.searches = 0                                  # of large blocks: the clock of garbage collection
        self.settings = AllocatorSettings.of(settings)
        self.memory_fraction = self.settings.per_process_memory_fraction

    # ---- what a process asks for ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least ``nbytes`` bytes, rounded up to 512. Raises :class:`DoesNotFit`."""
        size = self._round(nbytes) if self._round is not None else -(-nbytes // 512) * 512 or 512
        pool = self._pools.get((size <= SMALL, stream)) or self._new_pool(size <= SMALL, stream)
        if self._plain:                                     # best fit: the smallest that serves, lowest address first
            blocks = pool.blocks
            index = bisect_left(blocks, (size,))
            block = blocks.pop(index)[2] if index < len(blocks) else self._obtain(pool, size, nbytes)
        else:
            block = self._search(pool, size) or self._obtain(pool, size, nbytes)
        rest = block.size - size
        if rest >= 512 if pool.small or self._expands else rest > SMALL and size < self._oversize:     # should_split
            tail = cut(block, size)
            insort(pool.blocks, (rest, tail.address, tail))
            if self._collects:
                tail.born = self.searches
        block.state, block.requested = USED, nbytes
        self.requested += nbytes
        self.total_allocations += 1
        self.total_allocated += block.size
        self.allocated = allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self.pending:
            self._peak_active = max(self._peak_active, allocated + self.pending)
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to its pool, merged with free neighbours. The segment stays reserved.

        If another stream was recorded on it, it waits until that stream is done.
        """
        if block.state != USED:
            raise ValueError(f"the block at {block.address:#x} is not in use: it was freed before")
        self.allocated -= block.size
        self.total_frees += 1
        if block.uses:
            block.state = PENDING
            self.pending += block.size
            self._waiting.append(block)
        else:
            self._give_back(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """``Tensor.record_stream``: the block is also used on ``stream``, and can't be reused before that is done."""
        if stream != block.pool.stream:
            block.uses = (block.uses or set()) | {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """All work is done, or all on ``stream``: blocks that waited for it become free.

        No time passes here, so that nothing is done earlier than somebody waits for it. On a card, work may be done
        by itself before (``process_events``); this is the case that needs the most memory.
        """
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            block.uses = set() if stream is None else block.uses - {stream}
            if block.uses:
                self._waiting.append(block)
            else:
                self.pending -= block.size
                self._give_back(block)

    def empty_cache(self) -> int:
        """Returns every wholly free segment to the driver, as ``torch.cuda.empty_cache()``; the bytes released."""
        before = self.reserved
        self.num_sync_all_streams += 1                      # release_cached_blocks: waits for all streams first
        self.synchronize()
        for pool in sorted(self._pools.values(), key=lambda pool: pool.small):
            for _, _, block in list(pool.blocks):
                if block.segment.expandable:
                    expandable.unmap(self, block)
                elif block.whole:
                    self.release(block)
        return before - self.reserved

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self._peak_active = self.allocated + self.pending

    # ---- what can be asked of it --------------------------------------------------------------------------------

    @property
    def settings(self) -> AllocatorSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._round = settings.round_size if settings.roundup_power2_divisions else None
        self._oversize = float("inf") if settings.max_split_size is None else settings.max_split_size
        self._expands = settings.expandable_segments
        self._collects = settings.garbage_collection_threshold > 0
        self._plain = not (self._expands or self._collects or settings.max_split_size or self._has_expandable())

    @property
    def allowed(self) -> int | None:
        """Bytes that the memory fraction allows (``allowed_memory_maximum``); None without a budget or at 1.0."""
        if self.budget is None or self.memory_fraction >= 1:
            return None
        return int(self.memory_fraction * self.total_memory)

    @property
    def active(self) -> int:
        """Bytes in use or waiting for another stream."""
        return self.allocated + self.pending

    @property
    def peak_active(self) -> int:
        return max(self.peak_allocated, self._peak_active)

    @property
    def releasable(self) -> int:
        """Bytes that :meth:`empty_cache` would give back, if no stream is waited for."""
        blocks = (block for pool in self._pools.values() for _, _, block in pool.blocks)
        return sum(expandable.releasable(self, b) if b.segment.expandable else b.size * b.whole for b in blocks)

    @property
    def segments(self) -> dict[int, int]:
        """Address -> size of each segment (of an expandable one: of each mapped stretch)."""
        return {entry["address"]: entry["total_size"] for entry in self.snapshot()}

    def snapshot(self) -> list[dict]:
        """The segments with their blocks, by address, in the layout of ``torch.cuda.memory._snapshot()["segments"]``.

        >>> allocator = CachingAllocator()
        >>> _ = allocator.allocate(1000)
        >>> [(block["size"], block["state"]) for block in allocator.snapshot()[0]["blocks"]]
        [(1024, 'active_allocated'), (2096128, 'inactive')]
        """
        return [entry for address in sorted(self.pieces) for entry in describe(self.pieces[address])]

    # ---- how it gets memory ---------------------------------------------------------------------------------------

    def _search(self, pool: Pool, size: int) -> Block | None:
        """``get_free_block`` with every setting."""
        if self._collects and self.allowed is not None:
            self.searches += not pool.small
        blocks = pool.blocks
        index = bisect_left(blocks, (size,))
        if index < len(blocks) and blocks[index][2].segment.expandable:
            if self._expands:                               # an expandable block counts for what it can grow to
                reach = expandable.reach
                while index + 1 < len(blocks) and reach(blocks[index + 1][2]) < reach(blocks[index][2]) \
                        and blocks[index][2].segment.expandable:
                    index += 1
            else:                                           # the setting was turned off: pass over them
                while index < len(blocks) and blocks[index][2].segment.expandable:
                    index += 1
        if index == len(blocks):
            return None
        found = blocks[index][0]
        if size < self._oversize <= found:                  # oversize blocks are for oversize requests,
            return None
        if size >= self._oversize and found >= size + self._settings.max_non_split_rounding_size:
            return None                                     # and not for much smaller ones
        return blocks.pop(index)[2]

    def _obtain(self, pool: Pool, size: int, nbytes: int) -> Block:
        """Memory from the driver, after as much of what is cached was given back as it takes (``malloc``)."""
        need = segment_size(size, self._settings.large_segment_size)
        if self._collects and self.allowed is not None:
            reclaim.garbage(self, list(self._pools.values()))
        block = self._new_block(pool, size, need)
        rejected = block is None and self._is_hopeless(need)
        if block is None and not rejected:
            if reclaim.oversize(self, pool, size):
                block = self._new_block(pool, size, need)
            if block is None:
                self.empty_cache()
                self.num_alloc_retries += 1
                block = self._new_block(pool, size, need)
        if block is None:
            self.num_oom_rejections += rejected
            self.num_ooms += not rejected
            self._note("oom", self.budget - self.reserved, size)
            raise DoesNotFit(nbytes, need, self, rejected)
        return block

    def _is_allowed(self, need: int) -> bool:
        return self.allowed is None or self.reserved + need <= self.allowed

    def _is_hopeless(self, need: int) -> bool:
        """throw_on_cudamalloc_oom: more than all of the card's memory is refused at once, and the cache kept. (Under a
        memory fraction its own check comes first, and the cache is released as always.)"""
        return (self._settings.throw_on_cudamalloc_oom and self.allowed is None
                and self.reserved + need > self.total_memory)

    def _new_block(self, pool: Pool, size: int, need: int) -> Block | None:
        """``alloc_block``: a new segment of ``need`` bytes, or more pages of an expandable one; None: no memory."""
        if not self._is_allowed(need):
            return None
        if self._expands:
            return expandable.obtain(self, pool, size)
        if self.budget is not None and self.reserved + need > self.budget:
            return None
        segment = self.place(need, pool)
        self.gain(need, "segment_alloc", segment.address)
        return segment.head

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def _give_back(self, block: Block) -> None:
        """``free_block``: into the pool, merged with free neighbours."""
        block.state = FREE
        self.requested -= block.requested
        if block.previous is not None or block.next is not None:
            merge(block)
        insort(block.pool.blocks, (block.size, block.address, block))
        block.born = self.searches

    def _new_pool(self, small: bool, stream: int) -> Pool:
        pool = self._pools[small, stream] = Pool(small, stream)
        return pool

    def _has_expandable(self) -> bool:
        return any(segment.expandable for segment in self.pieces.values())

    def place(self, size: int, pool: Pool, expandable: bool = False) -> Segment:
        segment = self.pieces[self._top] = Segment(self._top, size, pool, expandable)
        self._top += size
        return segment

    def release(self, block: Block) -> None:
        """``release_block``: cudaFree."""
        del block.pool.blocks[bisect_left(block.pool.blocks, (block.size, block.address))]
        del self.pieces[block.address]
        self.lose(block.size, "segment_free", block.address)

    def gain(self, size: int, action: str, address: int) -> None:
        self.reserved += size
        self.total_reserved += size
        self.num_device_alloc += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._note(action, address, size)

    def lose(self, size: int, action: str, address: int) -> None:
        self.reserved -= size
        self.num_device_free += 1
        self._note(action, address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        if self.log is not None:
            self.log.append((action, address, size))
