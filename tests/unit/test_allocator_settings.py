"""PYTORCH_ALLOC_CONF, read as PyTorch reads it: beside the parser of the PyTorch that is installed."""
import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.memory.allocator_settings import AllocatorSettings
from grpo_lab.memory.segments import GiB, KiB, MiB


@pytest.fixture
def pytorch():
    """PyTorch's own parser of device-independent settings; put back afterwards. Without CUDA nothing listens to it."""
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of PyTorch would change its allocator's settings")
    parse = torch._C._accelerator_setAllocatorSettings
    yield parse
    parse("large_segment_size_mb:20,expandable_segments:False")


@pytest.fixture(scope="module")
def divisions():
    """``AcceleratorAllocatorConfig::roundup_power2_divisions(size)`` in libc10."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    return function


@pytest.mark.parametrize("text", [
    "max_split_size_mb:20", "max_split_size_mb:19", "max_split_size_mb:x", "max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:5", "large_segment_size_mb:11", "large_segment_size_mb:10", "expandable_segments:True",
    "large_segment_size_mb:40,max_split_size_mb:20", "max_split_size_mb:20,large_segment_size_mb:40",
    "expandable_segments:true", "expandable_segments:1", "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:1", "garbage_collection_threshold:0", "garbage_collection_threshold:x",
    "roundup_power2_divisions:4", "roundup_power2_divisions:3", "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions:[256:1,512:0]",
    "roundup_power2_divisions:[3:2]", "roundup_power2_divisions:[256:3]", "roundup_power2_divisions:[256:2",
    "max_split_size_mb", "max_split_size_mb:", "", "expandable_segments:True,", "pinned_use_background_threads:True",
    " max_split_size_mb : 128 , expandable_segments:False"])
def test_what_pytorch_refuses_is_refused(text, pytorch):
    pytorch("large_segment_size_mb:20")                 # PyTorch keeps this one from string to string
    outcomes = []
    for parse in (pytorch, AllocatorSettings.parse):
        try:
            parse(text)
            outcomes.append("taken")
        except (ValueError, RuntimeError):
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1], text


POWERS = st.integers(0, 18).map(lambda n: 2**n)
PAIRS = st.lists(st.tuples(st.one_of(POWERS.map(str), st.just(">")), st.sampled_from([0, 1, 2, 4, 8, 16])),
                 min_size=1, max_size=5)


@given(st.one_of(POWERS.map(str), PAIRS.map(lambda pairs: "[" + ",".join(f"{s}:{v}" for s, v in pairs) + "]")),
       st.lists(st.integers(1, 200 * GiB), max_size=20))
def test_divisions_are_pytorchs(divisions, text, sizes):
    """Asked of libc10 for every power of two and for sizes at random."""
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of PyTorch would change its allocator's settings")
    text = f"roundup_power2_divisions:{text}"
    torch._C._accelerator_setAllocatorSettings(text)
    table = AllocatorSettings.parse(text).roundup_power2_divisions
    try:
        for size in [*sizes, *(2**n for n in range(38))]:
            assert table[min(max(size.bit_length() - 21, 0), 15)] == divisions(size), size
    finally:
        torch._C._accelerator_setAllocatorSettings("")


@given(st.integers(1, 100 * GiB), st.sampled_from(["1", "2", "8", "64", "[1:4,64:2,>:8]"]))
def test_rounding_up(nbytes, divisions):
    """Never down, idempotent, at most to the next power of two, and always to 512 bytes."""
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    size = settings.round_size(nbytes)
    assert nbytes <= size <= max(512, 1 << (nbytes - 1).bit_length(), nbytes + 511)
    assert size % 512 == 0 and settings.round_size(size) == size


@pytest.mark.parametrize(("nbytes", "size"), [
    (33 * MiB, 40 * MiB), (64 * MiB, 64 * MiB), (65 * MiB, 80 * MiB), (2048, 2048), (2049, 2560),
    (100 * KiB, 112 * KiB)])
def test_the_steps_between_two_powers(nbytes, size):
    """Worked by hand after PyTorch's comment: 4 divisions from 1,024 to 2,048 are 1,024, 1,280, 1,536 and 1,792."""
    assert AllocatorSettings.parse("roundup_power2_divisions:4").round_size(nbytes) == size


@pytest.mark.parametrize(("text", "words"), [
    ("expandable_segment:True", "did you mean 'expandable_segments'"), ("nonsense:1", "known: backend"),
    ("max_split_size_mb:19", "at least 20"), ("max_split_size_mb:12.5", "whole number of MiB"),
    ("max_split_size_mb:128kB", "whole number of MiB"), ("max_split_size_mb=128", "is not a setting"),
    ("expandable_segments", "has no value"), ("expandable_segments:yes", "True or False"),
    ("garbage_collection_threshold:80", "between 0 and 1"), ("per_process_memory_fraction:1.5", "from 0 to 1"),
    ("roundup_power2_divisions:[256:3]", "powers of two"), ("backend:cudaMallocAsync", "not simulated")])
def test_refusals_say_what_is_allowed(text, words):
    with pytest.raises(ValueError, match=words) as error:
        AllocatorSettings.parse(text, name="PYTORCH_CUDA_ALLOC_CONF")
    assert str(error.value).startswith("PYTORCH_CUDA_ALLOC_CONF: ") and "\n" not in str(error.value)


def test_the_older_variable_wins():
    """As in AcceleratorAllocatorConfig::instance(), whatever the comment in its header says."""
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
    assert AllocatorSettings.from_environment(both).max_split_size == 32 * MiB
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorSettings.from_environment(both).max_split_size == 64 * MiB
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


def test_a_second_string_keeps_what_pytorch_keeps():
    """parseArgs resets max_split_size, the roundup and the threshold, but not expandable segments."""
    first = AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5")
    second = AllocatorSettings.parse("roundup_power2_divisions:4", base=first)
    assert (second.expandable_segments, second.max_split_size, second.garbage_collection_threshold) == (True, None, 0)


def test_settings_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="settings=3: takes a string"):
        AllocatorSettings.of(3)
