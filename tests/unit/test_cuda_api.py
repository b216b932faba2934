"""torch.cuda's questions, answered for a card that isn't there."""
import pytest
import torch

from grpo_lab import gpus
from grpo_lab.memory.allocator import CachingAllocator
from grpo_lab.memory.cuda_api import cuda_api

MiB = 2**20


@pytest.fixture
def t4():
    """The allocator of a T4, with torch.cuda answering for it."""
    card = gpus.get("T4")
    allocator = CachingAllocator(card.budget, total_memory=card.total_memory)
    with cuda_api(allocator, card):
        yield allocator, card


def test_memory(t4):
    allocator, card = t4
    block = allocator.allocate(3 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    allocator.synchronize()
    assert torch.cuda.memory_allocated() == torch.cuda.memory.memory_allocated("cuda:0") == 3 * MiB
    assert torch.cuda.max_memory_allocated(torch.device("cuda")) == 33 * MiB
    assert torch.cuda.memory_reserved(0) == torch.cuda.max_memory_reserved() == 50 * MiB
    assert torch.cuda.mem_get_info() == (card.budget - 50 * MiB, card.total_memory)
    assert torch.cuda.empty_cache() is None
    assert torch.cuda.memory_reserved() == 20 * MiB
    torch.cuda.reset_peak_memory_stats()
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == (3 * MiB, 20 * MiB)
    with pytest.warns(FutureWarning):                   # the old names go through the new ones
        assert torch.cuda.memory_cached() == 20 * MiB
    assert torch.cuda.memory_snapshot() == allocator.snapshot()
    allocator.free(block)


def test_memory_stats(t4):
    """By hand: 1,000 B (1,024 of a 2 MiB segment), 3 MiB and 30 MiB (freed) of 20 and 30 MiB; then the cache goes."""
    allocator, _ = t4
    allocator.allocate(1000)
    allocator.allocate(3 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    stats = torch.cuda.memory_stats()
    expected = {
        "allocated_bytes.all.current": 3 * MiB + 1024, "allocated_bytes.small_pool.current": 1024,
        "allocated_bytes.all.peak": 33 * MiB + 1024, "allocated_bytes.all.freed": 30 * MiB,
        "requested_bytes.all.current": 3 * MiB + 1000, "reserved_bytes.all.current": 52 * MiB,
        "reserved_bytes.large_pool.current": 50 * MiB, "active_bytes.all.current": 3 * MiB + 1024,
        "inactive_split_bytes.all.current": 19 * MiB - 1024, "inactive_split.all.current": 2,
        "segment.all.current": 3, "allocation.all.current": 2, "allocation.all.allocated": 3, "num_ooms": 0,
        "num_device_alloc": 3, "max_split_size": -1}
    assert {name: stats[name] for name in expected} == expected
    assert list(stats) == sorted(stats)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["num_device_free"] == 1
    assert torch.cuda.memory_stats()["reserved_bytes.all.freed"] == 30 * MiB


def test_memory_summary(t4):
    t4[0].allocate(3 * MiB)
    summary = torch.cuda.memory_summary(abbreviated=True)
    assert "simulated: T4" in summary and "3.00 MiB" in summary and "20.00 MiB" in summary


def test_a_memory_fraction_set_by_the_code(t4):
    allocator, card = t4
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert allocator.allowed == card.total_memory // 4
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    for wrong in (1, 1.5, -0.1):
        with pytest.raises(ValueError, match="a float from 0.0 to 1.0"):
            torch.cuda.set_per_process_memory_fraction(wrong)


def test_allocator_settings_set_by_the_code(t4):
    allocator, _ = t4
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    allocator.allocate(30 * MiB)
    assert torch.cuda.memory_reserved() == 40 * MiB
    assert torch.cuda.get_allocator_backend() == "native"


def test_the_card(t4):
    _, card = t4
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_name() == "T4"
    assert torch.cuda.get_device_capability("cuda") == (7, 5)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.total_memory) == (7, card.total_memory)
    with pytest.raises(AttributeError, match="multi_processor_count is not known"):
        properties.multi_processor_count
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)


def test_is_available_is_left_alone():
    """True would make accelerate and the Trainer choose cuda:0 and move real tensors to it."""
    before = torch.cuda.is_available()
    with cuda_api(CachingAllocator(2**30), gpus.get(2**30)):
        assert torch.cuda.is_available() is before


def test_streams_and_events_as_far_as_they_go(t4):
    allocator, _ = t4
    block = allocator.allocate(MiB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    torch.cuda.set_device("cuda:0")
    with torch.cuda.device(0):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    assert allocator.active == MiB
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    torch.cuda.synchronize()
    assert allocator.active == 0
    with pytest.raises(RuntimeError, match="no time passes"):
        event.elapsed_time(torch.cuda.Event(enable_timing=True))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: torch.cuda.Stream(), r"torch\.cuda\.Stream: .* one stream; leave"),
    (lambda: torch.cuda.CUDAGraph(), "CUDAGraph: .* without CUDA graphs"),
    (lambda: torch.cuda.graph(None), "without CUDA graphs"),
    (lambda: torch.cuda.memory._record_memory_history(), "save_snapshot"),
    (lambda: torch.cuda.memory._dump_snapshot("x.pickle"), "save_snapshot"),
    (lambda: torch.cuda.set_device(1), "there is one virtual card"),
    (lambda: torch.cuda.memory_allocated("cuda:1"), "device='cuda:1': there is one virtual card"),
    (lambda: torch.cuda.get_device_name("cpu"), "device='cpu'"),
    (lambda: torch.cuda.memory._set_allocator_settings("expandable:True"), "did you mean 'expandable_segments'")])
def test_what_cannot_be_answered_says_so(call, words, t4):
    with pytest.raises((RuntimeError, ValueError), match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_everything_is_put_back():
    """Also after an error: the names of torch.cuda are those of the process, and outlive the simulation."""
    before = {**vars(torch.cuda)}, {**vars(torch.cuda.memory)}
    with pytest.raises(KeyError), cuda_api(CachingAllocator(2**30), gpus.get(2**30)):
        assert torch.cuda.memory_stats is not before[0]["memory_stats"]
        raise KeyError
    assert (vars(torch.cuda), vars(torch.cuda.memory)) == before
