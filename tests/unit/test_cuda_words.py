"""CUDA's out-of-memory message: those of real cards are read, and the simulation's are PyTorch's to the letter."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.memory.allocator import CachingAllocator, DoesNotFit
from grpo_lab.memory.cuda_words import cuda_message, parse, size

KiB, MiB, GiB = 2**10, 2**20, 2**30
OLD_TIP = ("is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
           "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
           "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)")
TIP = ("is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
       "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
       "Management  "
       "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)")

# From continuous integration of TRL, PyTorch 2.10 (https://github.com/huggingface/trl/pull/5197): several processes.
FROM_TRL = ("CUDA out of memory. Tried to allocate 2.60 GiB. GPU 0 has a total capacity of 14.74 GiB of which 2.44 "
            "GiB is free. Process 21197 has 366.00 MiB memory in use. Process 21194 has 8.07 GiB memory in use. "
            "Process 21200 has 3.40 GiB memory in use. Process 21203 has 484.00 MiB memory in use. Of the allocated "
            "memory 7.85 GiB is allocated by PyTorch, and 86.90 MiB " + OLD_TIP)
# From https://github.com/kohya-ss/sd-scripts/issues/2029.
FROM_KOHYA = ("CUDA out of memory. Tried to allocate 1.99 GiB. GPU 0 has a total capacity of 23.56 GiB of which "
              "1.23 GiB is free. Including non-PyTorch memory, this process has 22.27 GiB memory in use. Of the "
              "allocated memory 14.73 GiB is allocated by PyTorch, and 6.39 GiB " + OLD_TIP)
# From https://github.com/ROCm/TheRock/issues/2118: under a memory fraction, with CUDA graphs.
FROM_ROCM = ("HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which "
             "244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, "
             "with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB " + OLD_TIP)


def test_messages_from_real_cards_are_read():
    assert parse(FROM_TRL) == {
        "requested": round(2.6 * GiB), "capacity": round(14.74 * GiB), "free": round(2.44 * GiB), "in_use": None,
        "allowed": None, "allocated": round(7.85 * GiB), "unallocated": round(86.9 * MiB),
        "reserved": round(7.85 * GiB) + round(86.9 * MiB)}
    assert parse(FROM_KOHYA)["in_use"] == round(22.27 * GiB)
    assert (parse(FROM_ROCM)["allowed"], parse(FROM_ROCM)["unallocated"]) == (round(1.05 * GiB), round(54.99 * MiB))
    assert not any(parse("something else").values())


@pytest.mark.parametrize("message, expected", [
    ("CUDA out of memory. Tried to allocate 1.20 GiB (GPU 0; 15.73 GiB total capacity; 9.90 GiB already allocated; 317.19 "
     "MiB free; 14.92 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting",
     {"requested": 1.2, "capacity": 15.73, "allocated": 9.9, "free": 317.19 / 1024, "reserved": 14.92,
      "unallocated": 14.92 - 9.9}),
    ("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacty of 15.73 GiB of which 1.50 GiB is free.",
     {"requested": 1.2, "capacity": 15.73, "free": 1.5, "reserved": None}),
    ("MPS backend out of memory (MPS allocated: 17.65 GiB, other allocations: 1.31 GiB, max allowed: 18.13 GiB). Tried to "
     "allocate 0.49 GiB on private pool.", {"requested": 0.49, "allocated": 17.65, "allowed": 18.13}),
], ids=["2.0", "2.1", "MPS"])
def test_older_and_other_words(message, expected):
    """2.0 writes all in parentheses, 2.1 misspells "capacity", and Apple's backend has its own sentence."""
    found = parse(message)
    for name, value in expected.items():
        assert found[name] is value is None or found[name] == pytest.approx(value * GiB, abs=4)


# Written by PyTorch 2.13.0's own allocator, over a stand-in of CUDA's driver (scripts/record_allocator), for a card of
# 1 GiB with 100 MiB taken, a fraction of 0.5, 400 MiB in use, and a request of 500 MiB and 1 byte.
FROM_PYTORCH = ("CUDA out of memory. Tried to allocate 502.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of "
                "which 524.00 MiB is free. Including non-PyTorch memory, this process has 500.00 MiB memory in use. "
                "512.00 MiB allowed; Of the allocated memory 400.00 MiB is allocated by PyTorch, and 0 bytes " + TIP)


def test_the_words_are_pytorchs_to_the_letter():
    allocator = CachingAllocator(924 * MiB, "per_process_memory_fraction:0.5", total_memory=GiB)
    allocator.allocate(400 * MiB)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(500 * MiB + 1)
    assert cuda_message(vars(error.value), budget=924 * MiB, context=100 * MiB) == FROM_PYTORCH


def test_a_rejection_has_words_of_its_own():
    """throw_on_cudamalloc_oom; from the same recording, for 700 MiB beside a cached 600 on a card of 1 GiB."""
    allocator = CachingAllocator(GiB, "throw_on_cudamalloc_oom:True")
    allocator.free(allocator.allocate(600 * MiB))
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(700 * MiB)
    message = cuda_message(vars(error.value), budget=GiB, context=0)
    assert message == ("CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                       "per_process_memory_fraction limit. Requested size: 700.00 MiB")
    assert parse(message)["requested"] == 700 * MiB


def test_the_segment_is_named_not_the_tensor():
    """PyTorch says what it asked the driver for. A message once named 3.00 MiB where a card says 20.00 MiB."""
    assert "Tried to allocate 20.00 MiB." in cuda_message(
        {"requested": 3 * MiB, "allocated": 0, "reserved": 0}, budget=GiB, context=0)


def test_a_refusal_of_the_replica_in_words():
    allocator = CachingAllocator(100 * MiB, "per_process_memory_fraction:0.5", total_memory=120 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    kept = allocator.allocate(512)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(59 * MiB)
    read = parse(cuda_message(vars(error.value), budget=100 * MiB, context=20 * MiB))
    assert read == {"requested": 60 * MiB, "capacity": 120 * MiB, "free": 98 * MiB, "in_use": 22 * MiB,
                    "allowed": 60 * MiB, "allocated": kept.size, "unallocated": 2 * MiB,    # less 512 B, in two digits
                    "reserved": kept.size + 2 * MiB}


@pytest.mark.parametrize(("nbytes", "words"), [
    (0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (MiB, "1024.00 KiB"), (MiB + 1, "1.00 MiB"),
    (GiB, "1024.00 MiB"), (GiB + 1, "1.00 GiB"), (20 * MiB, "20.00 MiB"), (96 * GiB, "96.00 GiB")])
def test_sizes_as_cuda_writes_them(nbytes, words):
    """format_size: a unit starts above its first multiple."""
    assert size(nbytes) == words


@given(st.integers(0, 100 * GiB), st.integers(0, 80 * GiB), st.integers(0, 40 * GiB), st.integers(0, GiB))
def test_what_is_written_is_read(segment, allocated, cached, context):
    """To half a unit of the last digit that the message shows."""
    budget = allocated + cached + GiB
    oom = {"requested": 1, "segment": segment + 1, "allocated": allocated, "reserved": allocated + cached}
    read = parse(cuda_message(oom, budget, context))
    meant = {"requested": segment + 1, "capacity": budget + context, "free": GiB,
             "in_use": allocated + cached + context, "allocated": allocated, "unallocated": cached}
    for name, value in meant.items():
        unit = next((u for u in (GiB, MiB, KiB) if value > u), 1)
        assert abs(read[name] - value) <= 0.0051 * unit, name
    assert read["allowed"] is None
