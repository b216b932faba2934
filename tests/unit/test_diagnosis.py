"""What `diagnose` reads out of messages that people pasted, each with its incident."""

import subprocess
import sys

import pytest
import torch

from grpo_lab import Recipe, VirtualGPU
from grpo_lab.diagnosis import diagnose
from grpo_lab.memory.cuda_words import size

MODERN = ("CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 15.73 GiB of which 0.31 GiB is free. "
          "Including non-PyTorch memory, this process has 15.41 GiB memory in use. Of the allocated memory {used} GiB is "
          "allocated by PyTorch, and {kept} GiB is reserved by PyTorch but unallocated.")  # fmt: skip
OLD = ("CUDA out of memory. Tried to allocate {asked} GiB (GPU 0; 15.73 GiB total capacity; {used} GiB already allocated; "
       "0.31 GiB free; {all} GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
       "max_split_size_mb to avoid fragmentation.")  # fmt: skip
LAPTOP = Recipe(model="Llama-3.2-1B", num_generations=4, per_device_train_batch_size=4, max_prompt_length=208,
                max_completion_length=786, gpu="RTX 3080 Laptop 16GB")  # fmt: skip


@pytest.mark.parametrize("words", [MODERN, OLD])
@pytest.mark.parametrize("asked, used, kept, kind", [
    (1.20, 9.90, 5.02, "fragmentation"), (2.00, 14.0, 0.92, "shortage"), (1.20, 13.0, 1.92, "shortage"),
])  # fmt: skip
def test_fragmentation_and_shortage_are_told_apart(words, asked, used, kept, kind):
    """PeterGriffinJin/Search-R1#112: a third of the reserved memory was unused, and a smaller batch was tried for days."""
    found = diagnose(words.format(asked=asked, used=used, kept=kept, all=used + kept))
    assert found.kind == kind
    if kind == "fragmentation":
        assert "expandable_segments:True" in found.advice[0] and "before torch is imported" in found.advice[0]


def test_the_logits_of_a_laptop_are_recognized():
    """Oxen.ai's run on an RTX 3080 Laptop: 1.90 GiB was one float32 copy of 4 x 994 x 128,256 logits."""
    message = MODERN.format(asked="1.90", used="11.82", kept="2.41")
    found = diagnose(message, LAPTOP)
    assert found.candidates[0].factors == (4, 994, 128_256, 4) and "logits" in found.candidates[0].what
    assert "4 x 994 x 128,256 x 4 B = 1.90 GiB" in found.text
    assert any("chunked" in words for words in found.advice)


@pytest.mark.parametrize("recipe, op, kind", [
    (LAPTOP, (4, 787, 128_256, 2), "logits"),
    (Recipe(model="Qwen3-8B", num_generations=8, attn_implementation="eager"), (8, 32, 512, 512, 4), "scores"),
    (Recipe(model="Qwen2.5-1.5B", dtype="float32"), (151_936, 1536, 4), "weights"),
    (Recipe(model="Qwen2.5-7B", max_completion_length=4096), (28, 2, 8, 4352, 512, 2), "cache"),
])  # fmt: skip
def test_other_tensors_too_by_their_size(recipe, op, kind):
    nbytes = torch.Size(op).numel()
    found = diagnose(f"CUDA out of memory. Tried to allocate {size(nbytes)}.", recipe)
    assert kind in [candidate.kind for candidate in found.candidates]
    assert f"{op[0]:,} x {op[1]:,}" in found.text


def test_a_size_of_no_tensor_is_not_explained_away():
    assert diagnose("CUDA out of memory. Tried to allocate 7.77 GiB.", LAPTOP).candidates == ()


def test_another_process_is_named():
    message = ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.73 GiB of which 1.00 GiB is "
               "free. Process 4711 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 5.73 GiB memory "
               "in use. Of the allocated memory 5.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but "
               "unallocated.")  # fmt: skip
    found = diagnose(message)
    assert found.kind == "another process" and found.others == 9 * 2**30
    assert "9.00 GiB" in found.text and "nvidia-smi" in found.advice[0]


@pytest.mark.parametrize("text, kind", [
    ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "library"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "library"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to "
     "allocate 9663676416 bytes. Error code 12 (Cannot allocate memory)", "host memory"),
    ("HIP out of memory. Tried to allocate 2.00 GiB.", "shortage"),
    ("loss is nan", "not an out-of-memory error"),
    ("KeyError: 'out of memory lane'", "not an out-of-memory error"),
])  # fmt: skip
def test_words_without_numbers_and_words_about_something_else(text, kind):
    found = diagnose(text)
    assert found.kind == kind and found.text
    if kind == "host memory":
        assert found.requested == 9_663_676_416


def test_a_whole_traceback_with_a_progress_bar_is_read_and_the_last_error_counts():
    first, last = (f"torch.OutOfMemoryError: {MODERN.format(asked=asked, used='9.90', kept='5.02')}" for asked in ("3.00", "1.20"))
    text = f"  3%|▎ | 3/100 [00:12<06:01]\nTraceback (most recent call last):\n  File \"train.py\"\n{first}\n\nDuring\n{last}"
    assert diagnose(text).requested == round(1.2 * 2**30)
    broken = last.replace("reserved by PyTorch but", "reserved by\nPyTorch but")    # as a terminal breaks it
    assert diagnose(broken).numbers["unallocated"] == round(5.02 * 2**30)


def test_the_exception_of_a_virtual_card_is_read():
    with pytest.raises(torch.OutOfMemoryError) as caught, VirtualGPU("T4"):
        torch.empty(20 * 2**30, dtype=torch.uint8)
    found = diagnose(caught.value)
    assert found.kind == "shortage" and found.requested == 20 * 2**30
    assert diagnose([ValueError("first"), caught.value]).requested == 20 * 2**30
    assert diagnose(MemoryError()).kind == "host memory"


def test_a_recipe_that_doesn_t_fit_gets_the_changes():
    found = diagnose("CUDA out of memory. Tried to allocate 4.64 GiB.", Recipe.preset("baseline"))
    assert any("to make the recipe fit: chunked logits" in words for words in found.advice)
    assert "shortage" in found._repr_html_() and "<li>" in found._repr_html_()


@pytest.mark.parametrize("given, error, words", [
    ("", ValueError, "the text is empty"), ("  \n ", ValueError, "the text is empty"), (3, TypeError, "not int"),
    (None, TypeError, "not NoneType"),
])  # fmt: skip
def test_bad_input(given, error, words):
    with pytest.raises(error, match=words):
        diagnose(given)
    with pytest.raises(TypeError, match="takes a Recipe"):
        diagnose("CUDA out of memory", recipe="baseline")


def test_it_needs_no_torch():
    code = ("import sys; from grpo_lab import diagnose, Recipe; diagnose('CUDA out of memory. Tried to allocate 2 GiB', "
            "Recipe.preset('baseline')); print('torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
