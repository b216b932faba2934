"""The allocator replica: PyTorch's rules by example, and what must hold whatever is asked.

The worked examples were derived by hand from the rules in c10/cuda/CUDACachingAllocator.cpp, not from this replica.
"""
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.memory.allocator import GiB, CachingAllocator, DoesNotFit, KiB, MiB, round_up, segment_size

EXPANDABLE = "expandable_segments:True"


def states(allocator) -> list[list[tuple[int, bool]]]:
    """Each segment's blocks as (MiB, in use)."""
    return [[(b["size"] // MiB, b["state"] != "inactive") for b in s["blocks"]] for s in allocator.snapshot()]


def cached(allocator, *sizes: int) -> None:
    """Leaves free segments of so many MiB."""
    for block in [allocator.allocate(size * MiB) for size in sizes]:
        allocator.free(block)


# ---- splitting, merging, segments -----------------------------------------------------------------------------------

@pytest.mark.parametrize(("nbytes", "reserved"), [
    (1, 2 * MiB), (MiB, 2 * MiB), (MiB + 512, 20 * MiB), (10 * MiB - 512, 20 * MiB), (10 * MiB, 10 * MiB),
    (10 * MiB + 512, 12 * MiB), (GiB + 1, GiB + 2 * MiB)])
def test_what_a_first_request_reserves(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved == reserved


def test_a_freed_block_serves_the_next_request_of_its_size():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MiB))
    allocator.allocate(29 * MiB)
    assert (allocator.allocated, allocator.reserved) == (30 * MiB, 30 * MiB)    # a rest of up to 1 MiB isn't cut off


def test_best_fit_takes_the_smallest_then_the_lowest():
    allocator = CachingAllocator()
    cached(allocator, 40, 24, 32, 24)
    lowest = min(address for address, size in allocator.segments.items() if size == 24 * MiB)
    assert allocator.allocate(22 * MiB).address == lowest


def test_a_block_between_two_free_ones_merges_with_both():
    allocator = CachingAllocator()
    a, b, c = (allocator.allocate(4 * MiB) for _ in range(3))
    assert states(allocator) == [[(4, True), (4, True), (4, True), (8, False)]]
    allocator.free(a)
    allocator.free(c)
    assert states(allocator) == [[(4, False), (4, True), (12, False)]]
    allocator.free(b)
    assert states(allocator) == [[(20, False)]]


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MiB))
    allocator.allocate(4 * KiB)
    assert allocator.reserved == 22 * MiB


def test_fragmentation_reserves_more_than_is_allocated():
    """Holes of 20 MiB between blocks in use can't serve one request of 40 MiB."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MiB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(40 * MiB)
    assert (allocator.allocated, allocator.reserved) == (80 * MiB, 120 * MiB)


def test_large_segment_size():
    allocator = CachingAllocator(settings="large_segment_size_mb:40")
    allocator.allocate(2 * MiB)
    assert allocator.reserved == 40 * MiB
    allocator.allocate(12 * MiB)                        # fits into the rest
    assert allocator.reserved == 40 * MiB


def test_freeing_twice_is_refused():
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(block)


# ---- when memory runs out -------------------------------------------------------------------------------------------

def test_cached_segments_are_released_before_giving_up():
    allocator = CachingAllocator(budget=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)                        # doesn't fit beside the cached 60
    assert (allocator.reserved, allocator.num_alloc_retries, allocator.num_ooms) == (80 * MiB, 1, 0)
    with pytest.raises(DoesNotFit):
        allocator.allocate(40 * MiB)
    assert (allocator.allocated, allocator.num_ooms) == (80 * MiB, 1)


def test_a_failed_request_leaves_the_cache_released():
    """The replica once refused without releasing anything: its message then named memory as reserved that PyTorch had
    already given back by the time it spoke."""
    allocator = CachingAllocator(budget=100 * MiB)
    allocator.allocate(30 * MiB)
    cached(allocator, 60)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(81 * MiB - 1)
    assert (error.value.requested, error.value.segment) == (81 * MiB - 1, 82 * MiB)
    assert (error.value.allocated, error.value.reserved, error.value.free) == (30 * MiB, 30 * MiB, 70 * MiB)
    assert allocator.reserved == 30 * MiB
    allocator.allocate(70 * MiB)                        # a smaller request still fits


def test_memory_freed_while_giving_up_is_not_searched_again():
    """PyTorch waits for other streams, but then only asks the driver once more: it can run out beside a free block
    that would do (https://github.com/pytorch/pytorch/issues/189504). The next try finds it."""
    allocator = CachingAllocator(budget=20 * MiB)
    allocator.allocate(5 * MiB)
    late = allocator.allocate(5 * MiB)
    allocator.record_stream(late, stream=1)
    allocator.free(late)
    with pytest.raises(DoesNotFit):
        allocator.allocate(12 * MiB)
    assert states(allocator) == [[(5, True), (15, False)]]
    allocator.allocate(12 * MiB)


def test_empty_cache_keeps_what_is_in_use():
    allocator = CachingAllocator()
    kept = allocator.allocate(20 * MiB)
    allocator.free(allocator.allocate(50 * MiB))
    assert allocator.empty_cache() == 50 * MiB
    assert allocator.reserved == 20 * MiB
    allocator.free(kept)


def test_a_memory_fraction_counts_from_the_whole_card():
    """set_per_process_memory_fraction: 0.1 of 1,024 MiB are 102.4, whatever else takes from the card."""
    allocator = CachingAllocator(1000 * MiB, "per_process_memory_fraction:0.1", total_memory=1024 * MiB)
    allocator.allocate(60 * MiB)
    allocator.allocate(42 * MiB)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(1)                           # 2 MiB more would be 104
    assert error.value.allowed == int(102.4 * MiB)
    assert error.value.free == 898 * MiB
    allocator.memory_fraction = 1.0
    allocator.allocate(1)


def test_throw_on_cudamalloc_oom_rejects_without_releasing():
    """More than the whole card has is refused at once, and the cache kept. Under a fraction, whatever the setting's
    documentation says, the cache is released and asked again: PyTorch looks at the fraction first."""
    allocator = CachingAllocator(200 * MiB, "throw_on_cudamalloc_oom:True")
    cached(allocator, 150)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(160 * MiB)
    assert error.value.rejected and allocator.reserved == 150 * MiB
    assert (allocator.num_oom_rejections, allocator.num_ooms, allocator.num_alloc_retries) == (1, 0, 0)
    allocator = CachingAllocator(200 * MiB, "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5")
    cached(allocator, 60)
    allocator.allocate(80 * MiB)
    assert (allocator.num_oom_rejections, allocator.num_alloc_retries) == (0, 1)


# ---- max_split_size_mb ----------------------------------------------------------------------------------------------

def test_oversize_blocks_are_not_split():
    """Above 64 MiB: a cached 100 serves no 30, nor an 80 (20 MiB less), but a 90, uncut."""
    allocator = CachingAllocator(settings="max_split_size_mb:64")
    cached(allocator, 100)
    allocator.allocate(30 * MiB)
    assert allocator.reserved == 130 * MiB
    allocator.allocate(80 * MiB)
    assert allocator.reserved == 210 * MiB
    allocator.allocate(90 * MiB)
    assert (allocator.reserved, allocator.allocated) == (210 * MiB, 210 * MiB)


def test_max_non_split_rounding():
    allocator = CachingAllocator(settings="max_split_size_mb:64,max_non_split_rounding_mb:40")
    cached(allocator, 100)
    allocator.allocate(70 * MiB)                        # 100 < 70 + 40
    assert (allocator.reserved, allocator.allocated) == (100 * MiB, 100 * MiB)


def test_one_sufficient_oversize_block_is_released_first():
    """A request of 66 may not use a cached 90, but releasing it is enough: 120, and everything else, stay cached."""
    allocator = CachingAllocator(budget=300 * MiB, settings="max_split_size_mb:64")
    cached(allocator, 90, 120, 30)
    allocator.allocate(66 * MiB)                        # 240 + 66 > 300
    assert sorted(allocator.segments.values()) == [30 * MiB, 66 * MiB, 120 * MiB]
    assert allocator.num_alloc_retries == 0


def test_several_oversize_blocks_are_released_from_the_largest_down():
    allocator = CachingAllocator(budget=300 * MiB, settings="max_split_size_mb:64")
    cached(allocator, 70, 80, 100, 30)
    allocator.allocate(150 * MiB)                       # 280 cached: 100 and 80 go, 70 and 30 stay
    assert sorted(allocator.segments.values()) == [30 * MiB, 70 * MiB, 150 * MiB]
    assert allocator.num_alloc_retries == 0


# ---- roundup, garbage collection ------------------------------------------------------------------------------------

def test_roundup_power2_divisions():
    """Between 32 and 64 MiB four steps: 40, 48, 56, 64."""
    allocator = CachingAllocator(settings="roundup_power2_divisions:4")
    allocator.allocate(33 * MiB)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (40 * MiB, 40 * MiB, 33 * MiB)


@pytest.mark.parametrize(("fraction", "reserved"), [("per_process_memory_fraction:0.5,", 270), ("", 370)])
def test_garbage_collection(fraction, reserved):
    """0.4 of the allowed 500 MiB are 200. Before the third request 220 are reserved, 20 too many. The first segment
    was passed over by two searches, the second by one: the first is older than the average of 1.5 and goes. Without
    a memory fraction PyTorch knows of nothing allowed, and never collects."""
    allocator = CachingAllocator(1000 * MiB, fraction + "garbage_collection_threshold:0.4")
    cached(allocator, 100)
    cached(allocator, 120)
    allocator.allocate(150 * MiB)
    assert allocator.reserved == reserved * MiB


# ---- expandable segments --------------------------------------------------------------------------------------------

def test_expandable_segments_grow_by_pages():
    """3 MiB map a page of 20; 30 more take the 17 that are left and one page; 1,000 bytes map 2 MiB elsewhere."""
    allocator = CachingAllocator(settings=EXPANDABLE)
    allocator.allocate(3 * MiB)
    assert allocator.reserved == 20 * MiB
    allocator.allocate(30 * MiB)
    assert allocator.reserved == 40 * MiB
    allocator.allocate(1000)
    assert allocator.reserved == 42 * MiB
    assert states(allocator) == [[(3, True), (30, True), (7, False)], [(0, True), (1, False)]]


def test_expandable_blocks_are_cut_to_the_byte():
    """Every rest from 512 bytes on is cut off, where a plain large block keeps up to 1 MiB."""
    allocator = CachingAllocator(settings=EXPANDABLE)
    allocator.allocate(20 * MiB - 512)
    assert allocator.allocated == 20 * MiB - 512


def test_expandable_segments_need_less_for_growing_sizes():
    """64, 65 and 66 MiB, each in turn: one segment of four pages, against three."""
    plain, growing = CachingAllocator(), CachingAllocator(settings=EXPANDABLE)
    for allocator in (plain, growing):
        for size in (64, 65, 66):
            cached(allocator, size)
    assert (len(plain.segments), plain.reserved) == (2, 130 * MiB)        # 65 rounds to 66, which serves the 66
    assert (len(growing.segments), growing.reserved) == (1, 80 * MiB)


def test_whole_pages_are_unmapped_and_filled_again():
    """Two blocks of 30 MiB lie on three pages. Freeing the first leaves one whole page to give back; the next block
    of 20 MiB goes there, at the lowest address, and not to the end."""
    allocator = CachingAllocator(settings=EXPANDABLE)
    first, second = allocator.allocate(30 * MiB), allocator.allocate(30 * MiB)
    start = first.address
    allocator.free(first)
    assert allocator.releasable == allocator.empty_cache() == 20 * MiB
    assert (allocator.reserved, states(allocator)) == (40 * MiB, [[(10, False), (30, True)]])
    assert allocator.allocate(20 * MiB).address == start
    assert allocator.reserved == 60 * MiB
    allocator.free(second)
    assert states(allocator) == [[(20, True), (40, False)]]


def test_expandable_out_of_memory():
    """15 MiB lie on one page; 40 more need 5 of it and two pages, of which a card of 50 has room for one. Pages that
    hold nothing would go back, but there is none."""
    allocator = CachingAllocator(budget=50 * MiB, settings=EXPANDABLE)
    allocator.allocate(15 * MiB)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(40 * MiB)
    assert (error.value.segment, error.value.reserved) == (40 * MiB, 20 * MiB)
    allocator.allocate(25 * MiB)
    assert allocator.reserved == 40 * MiB


def test_turning_expandable_segments_off_passes_over_them():
    allocator = CachingAllocator(settings=EXPANDABLE)
    cached(allocator, 40)
    allocator.settings = allocator.settings.parse("expandable_segments:False", base=allocator.settings)
    allocator.allocate(30 * MiB)
    assert [s["is_expandable"] for s in allocator.snapshot()] == [True, False]


def test_pools_do_not_see_each_others_expandable_memory():
    allocator = CachingAllocator(settings=EXPANDABLE)
    cached(allocator, 40)
    allocator.allocate(1000)
    assert allocator.reserved == 42 * MiB


# ---- streams --------------------------------------------------------------------------------------------------------

def test_a_stream_does_not_get_anothers_memory():
    allocator = CachingAllocator()
    cached(allocator, 40)
    assert allocator.allocate(40 * MiB, stream=1).stream == 1
    assert [s["stream"] for s in allocator.snapshot()] == [0, 1]


def test_record_stream_delays_reuse():
    allocator = CachingAllocator()
    block = allocator.allocate(40 * MiB)
    allocator.record_stream(block, stream=1)
    allocator.free(block)
    assert (allocator.allocated, allocator.active) == (0, 40 * MiB)
    assert allocator.snapshot()[0]["blocks"][0]["state"] == "active_pending_free"
    allocator.allocate(40 * MiB)
    assert (allocator.reserved, allocator.peak_active) == (80 * MiB, 80 * MiB)
    allocator.synchronize(stream=2)                     # not the one that is waited for
    assert allocator.active == 80 * MiB
    allocator.synchronize(stream=1)
    allocator.allocate(40 * MiB)
    assert allocator.reserved == 80 * MiB


def test_the_own_stream_needs_no_recording():
    allocator = CachingAllocator()
    block = allocator.allocate(40 * MiB, stream=3)
    allocator.record_stream(block, stream=3)
    allocator.free(block)
    assert allocator.active == 0


# ---- what can be seen of it -----------------------------------------------------------------------------------------

def test_snapshot_has_the_fields_of_pytorch():
    """Their names are those that torch/csrc/cuda/memory_snapshot.cpp writes."""
    allocator = CachingAllocator()
    allocator.allocate(1000)
    [segment] = allocator.snapshot()
    assert set(segment) == {"device", "address", "total_size", "allocated_size", "active_size", "requested_size",
                            "stream", "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"}
    assert set(segment["blocks"][0]) == {"address", "size", "requested_size", "state", "frames"}
    assert (segment["segment_type"], segment["requested_size"], segment["allocated_size"]) == ("small", 1000, 1024)


def test_pytorchs_own_viewer_draws_the_segments():
    """torch.cuda._memory_viz reads a snapshot's segments by these keys."""
    from torch.cuda import _memory_viz
    allocator = CachingAllocator(settings=EXPANDABLE)
    allocator.allocate(3 * MiB)
    allocator.allocate(1000)
    snapshot = {"segments": allocator.snapshot(), "device_traces": [], "allocator_settings": {}}
    assert "20.0MiB" in _memory_viz.segsum(snapshot)


def test_the_log_names_what_happens_to_segments():
    allocator = CachingAllocator(budget=40 * MiB)
    allocator.log = []
    cached(allocator, 30)
    with pytest.raises(DoesNotFit):
        allocator.allocate(50 * MiB)
    address = allocator.log[0][1]
    assert allocator.log == [("segment_alloc", address, 30 * MiB), ("segment_free", address, 30 * MiB),
                             ("oom", 40 * MiB, 50 * MiB)]


# ---- laws -----------------------------------------------------------------------------------------------------------

SETTINGS = ["", EXPANDABLE, "max_split_size_mb:32", "roundup_power2_divisions:[1:2,16:4,>:8]",
            "per_process_memory_fraction:0.6,garbage_collection_threshold:0.3", "large_segment_size_mb:32",
            EXPANDABLE + ",max_split_size_mb:64", EXPANDABLE + ",per_process_memory_fraction:0.5",
            "throw_on_cudamalloc_oom:True",
            "max_split_size_mb:20,per_process_memory_fraction:0.7,garbage_collection_threshold:0.5"]
SIZES = st.one_of(st.integers(1, 4 * KiB), st.integers(1, 2 * MiB), st.integers(1, 300 * MiB),
                  st.sampled_from([MiB, MiB + 1, 10 * MiB - 1, 10 * MiB, 20 * MiB, 32 * MiB, 64 * MiB]))
STEPS = st.lists(st.tuples(st.sampled_from("aaaaaafffffrse"), SIZES, st.integers(0, 10**6)), max_size=60)


def check(allocator: CachingAllocator, live: list) -> None:
    segments = allocator.snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.requested >= sum(block.requested for block in live)
    assert allocator.allocated <= allocator.active <= allocator.reserved <= allocator.budget
    assert allocator.allowed is None or allocator.reserved <= allocator.allowed
    assert allocator.reserved == sum(segment["total_size"] for segment in segments) == sum(b["size"] for b in blocks)
    assert allocator.active == sum(segment["active_size"] for segment in segments)
    spans = sorted((block["address"], block["size"]) for block in blocks)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))
    assert {(b.address, b.size) for b in live} == {
        (b["address"], b["size"]) for b in blocks if b["state"] == "active_allocated"}
    for segment in segments:                            # free neighbours are one block
        free = [block["state"] == "inactive" for block in segment["blocks"]]
        assert not any(a and b for a, b in itertools.pairwise(free))
    for pool in allocator._pools.values():
        assert pool.blocks == sorted(pool.blocks) and pool.unmapped == sorted(pool.unmapped)
    assert allocator.peak_allocated >= allocator.allocated and allocator.peak_reserved >= allocator.reserved


@settings(deadline=None)
@given(st.sampled_from(SETTINGS), STEPS)
def test_the_laws(text, steps):
    """Whatever is asked, under whatever settings: live bytes ≤ reserved ≤ the budget, no two blocks overlap, free
    neighbours are merged, a refusal leaves nothing more to release; and when all is freed, nothing stays."""
    allocator, live = CachingAllocator(2 * GiB, text), []
    for action, size, pick in steps:
        block = live[pick % len(live)] if live else None
        if action == "a":
            try:
                live.append(allocator.allocate(size, stream=pick % 3 // 2))
                assert live[-1].size >= size
            except DoesNotFit as error:
                assert error.requested == size and (error.rejected or allocator.releasable == 0)
        elif action == "f" and block is not None:
            live.remove(block)
            allocator.free(block)
        elif action == "r" and block is not None:
            allocator.record_stream(block, pick % 4)
        elif action == "s":
            allocator.synchronize(pick % 4)
        elif action == "e":
            assert allocator.releasable <= allocator.empty_cache()      # which also waits for other streams
        check(allocator, live)
    for block in live:
        allocator.free(block)
    allocator.synchronize()
    check(allocator, [])
    assert allocator.requested == 0 and allocator.releasable == allocator.reserved
    allocator.empty_cache()
    assert (allocator.reserved, allocator.snapshot(), allocator.segments) == (0, [], {})
    assert allocator.total_allocations == allocator.total_frees
    assert allocator.num_device_alloc >= allocator.num_device_free


@given(st.lists(st.integers(1, MiB), min_size=1, max_size=40), st.randoms())
def test_small_requests_count_their_rounded_size_in_any_order(sizes, random):
    shuffled = random.sample(sizes, len(sizes))
    for order in (sizes, shuffled):
        allocator = CachingAllocator()
        for size in order:
            allocator.allocate(size)
        assert allocator.allocated == sum(round_up(size) for size in sizes)


@given(st.lists(st.integers(1, 200 * MiB), min_size=1, max_size=20), st.randoms())
def test_expandable_requests_count_their_rounded_size_in_any_order(sizes, random):
    """So that expandable segments reserve at most one page more than is needed in each pool."""
    totals = set()
    for order in (sizes, random.sample(sizes, len(sizes))):
        allocator = CachingAllocator(settings=EXPANDABLE)
        for size in order:
            allocator.allocate(size)
        totals.add((allocator.allocated, allocator.reserved))
    large = sum(round_up(size) for size in sizes if round_up(size) > MiB)
    small = sum(round_up(size) for size in sizes) - large
    assert totals == {(large + small, round_up(large, 20 * MiB) + round_up(small, 2 * MiB))}


@given(st.lists(st.integers(1, 200 * MiB), min_size=1, max_size=20))
def test_large_requests_keep_at_most_one_mib_more(sizes):
    """What ``torch.cuda.memory_allocated`` counts is the block, which may be up to 1 MiB larger than the request."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        assert 0 <= block.size - round_up(size) <= (MiB if size > MiB else 0)


@given(st.lists(st.builds(lambda pages, less: pages * 2 * MiB - less, st.integers(6, 150), st.integers(0, MiB)),
                min_size=1, max_size=20), st.randoms())
def test_what_fresh_large_requests_reserve_does_not_depend_on_their_order(sizes, random):
    """Where no segment leaves a rest that a later request could use (up to 1 MiB is not cut off)."""
    for order in (sizes, random.sample(sizes, len(sizes))):
        allocator = CachingAllocator()
        for size in order:
            allocator.allocate(size)
        assert allocator.reserved == sum(segment_size(round_up(size)) for size in sizes)
