"""The allocator replica: PyTorch's constants by example, and what must hold whatever is asked."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.memory.allocator import GiB, CachingAllocator, DoesNotFit, KiB, MiB, segment_size


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


def test_cached_segments_are_released_before_giving_up():
    allocator = CachingAllocator(budget=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)                        # doesn't fit beside the cached 60
    assert allocator.reserved == 80 * MiB
    with pytest.raises(DoesNotFit):
        allocator.allocate(40 * MiB)
    assert allocator.allocated == 80 * MiB


def test_empty_cache_keeps_what_is_in_use():
    allocator = CachingAllocator()
    kept = allocator.allocate(20 * MiB)
    allocator.free(allocator.allocate(50 * MiB))
    assert allocator.empty_cache() == 50 * MiB
    assert allocator.reserved == 20 * MiB
    allocator.free(kept)


def test_freeing_twice_is_refused():
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(block)


@given(st.data())
def test_the_laws(data):
    """Live bytes ≤ reserved, blocks don't overlap, everything freed merges back into whole segments."""
    allocator, live = CachingAllocator(budget=2 * GiB), []
    for _ in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            allocator.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            try:
                live.append(allocator.allocate(data.draw(st.integers(1, 300 * MiB))))
            except DoesNotFit as error:
                assert allocator.reserved + segment_size(error.requested) > allocator.budget - 2 * MiB
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.allocated <= allocator.reserved <= allocator.budget
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.releasable == allocator.reserved == sum(allocator.segments.values())
    allocator.empty_cache()
    assert allocator.reserved == 0
