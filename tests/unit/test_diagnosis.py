"""What `diagnose` reads out of messages that people pasted, each with its incident."""

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab import Recipe, VirtualGPU, estimate, oom_guard
from grpo_lab._suspects import suspects
from grpo_lab.diagnosis import diagnose
from grpo_lab.formula.shape import Shape
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
    (Recipe(model="Qwen2.5-1.5B", lora_rank=16, max_prompt_length=128, max_completion_length=512), (8, 640, 8960, 2),
     "activations"),
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


@pytest.mark.parametrize("processes, asked, used, kept, kind, others", [
    ("Process 860120 has 22.29 GiB memory in use. ", "14.00 MiB", "21.92 GiB", "16.47 MiB", "shortage", 0),
    ("Process 2109 has 344.00 MiB memory in use. Process 1448259 has 21.07 GiB memory in use. ", "270.00 MiB", "20.08 GiB",
     "56.49 MiB", "shortage", 344 * 2**20),
    ("Process 1448259 has 12.07 GiB memory in use. Process 2109 has 9.00 GiB memory in use. ", "270.00 MiB", "11.08 GiB",
     "56.49 MiB", "another process", 9 * 2**30),
    # huggingface/trl's own tests, several of them on one card (pull request 5197)
    ("Process 21197 has 366.00 MiB memory in use. Process 21194 has 8.07 GiB memory in use. Process 21200 has 3.40 GiB memory "
     "in use. ", "2.60 GiB", "7.85 GiB", "86.90 MiB", "another process", 366 * 2**20 + round(3.4 * 2**30)),
])  # fmt: skip
def test_in_a_container_the_process_itself_is_among_those_listed(processes, asked, used, kept, kind, others):
    """NVML counts processes as the host does: PyTorch in a container (Colab, Kaggle, Docker) doesn't find itself in the
    list and names itself "Process N". Its own 22 GiB were blamed on somebody else, and nvidia-smi advised."""
    capacity = "14.74" if "21197" in processes else "22.30"
    found = diagnose(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {capacity} GiB of which "
                     f"{'2.44 GiB' if '21197' in processes else '4.69 MiB'} is free. {processes}Of the allocated memory "
                     f"{used} is allocated by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
                     f"{kept} is reserved by PyTorch but unallocated.")  # fmt: skip
    assert (found.kind, found.others) == (kind, others)
    assert "22.00 MiB of what is in use belong to CUDA graphs" in found.text
    assert ("nvidia-smi" in found.text) is (kind == "another process")


def test_another_process_shows_in_what_the_numbers_leave_over():
    """pytorch/pytorch#40863: 530 MiB reserved and 12.5 MiB free of 11.17 GiB, "and nothing else runs"; PyTorch 2.0 lists no
    processes, nor does a later one see those of other containers."""
    old = ("CUDA out of memory. Tried to allocate 60.00 MiB (GPU 0; 11.17 GiB total capacity; 505.96 MiB already allocated; "
           "12.50 MiB free; 530.00 MiB reserved in total by PyTorch)")  # fmt: skip
    found = diagnose(old)
    assert found.kind == "another process" and 9 * 2**30 < found.others < 11.17 * 2**30 - 530 * 2**20
    alone = diagnose(old.replace("505.96 MiB", "10.40 GiB").replace("530.00 MiB", "10.62 GiB"))
    assert alone.kind == "shortage" and alone.others == 0         # what is left over is the CUDA context's


@pytest.mark.parametrize("text", [
    "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB "
    "free; 1.24 GiB reserved in total by PyTorch)",
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of 31.89 GiB of "
    "which 13.22 GiB is free.",
])  # fmt: skip
def test_a_request_refused_with_enough_free_is_no_full_card(text):
    """pytorch/pytorch#59778: 3 GiB free, 2.26 refused: "If memory is available, why does PyTorch not allocate it?" """
    found = diagnose(text)
    assert found.kind == "refused" and "not a full card" in found.text and found.free > found.requested


@pytest.mark.parametrize("text, requested", [
    ("HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.65 GiB is free. "
     "1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, and 54.99 MiB is reserved by PyTorch "
     "but unallocated.", 2 * 2**20),
    ("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. "
     "Requested size: 2.00 GiB", 2 * 2**30),
    ("MPS backend out of memory (MPS allocated: 17.65 GB, other allocations: 1.31 GB, max allowed: 18.13 GB). Tried to "
     "allocate 501.00 MB on private pool.", 501 * 2**20),
])  # fmt: skip
def test_a_limit_below_the_card_s_size_is_told_from_a_full_card(text, requested):
    """ROCm/TheRock#2118: 244 GiB were free, and a memory fraction allowed 1."""
    found = diagnose(text)
    assert found.kind == "limit" and found.requested == requested and "memory_fraction" in found.advice[0]


def test_the_asynchronous_allocator_s_table_is_read():
    """PyTorch's other backend (cudaMallocAsync) never says "CUDA out of memory", and writes no limit as 2**64 - 1 bytes."""
    found = diagnose("Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 14.60 GiB\n"
                     "Requested               : 567.00 MiB\nDevice limit            : 15.57 GiB\n"
                     "Free (according to CUDA): 8.38 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
                     "                        : 17179869184.00 GiB")  # fmt: skip
    assert found.kind == "shortage" and found.requested == 567 * 2**20 and found.numbers["allowed"] is None
    assert (found.allocated, found.total) == (round(14.6 * 2**30), round(15.57 * 2**30))


def test_windows_lends_memory_and_doesn_t_say_who_has_what():
    """microsoft/WSL#11050: tensors of 30 GiB on a card of 16. The driver spills; of processes NVML says -1 there."""
    spilled = diagnose("CUDA out of memory. Tried to allocate 1.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB already "
                       "allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)")  # fmt: skip
    assert spilled.kind == "shortage" and "no error doesn't mean that it fits" in spilled.text
    unknown = diagnose(MODERN.format(asked="1.20", used="14.0", kept="0.92").replace("15.41 GiB", "17179869184.00 GiB"))
    assert unknown.kind == "shortage" and unknown.numbers["in_use"] is None and unknown.others == 0


@pytest.mark.parametrize("asked, tensors", [("2.00 MiB", "up to 1 MiB"), ("20.00 MiB", "from 1 to 10 MiB")])
def test_the_size_of_a_small_segment_names_no_tensor(asked, tensors):
    """"Tried to allocate 20.00 MiB" is in a great many reports, and tensors of 20 MiB were looked for."""
    found = diagnose(f"CUDA out of memory. Tried to allocate {asked}.", Recipe.preset("baseline"))
    assert found.candidates == () and tensors in found.text and "last straw" in found.text
    owners = estimate(Recipe.preset("baseline")).by_category()
    assert f"{next(iter(owners))} (" in found.text


@given(st.sampled_from(["Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen3-8B"]), st.integers(2, 8), st.integers(16, 4096),
       st.sampled_from([2, 4]))  # fmt: skip
def test_logits_are_recognized_at_every_shape_of_every_version(model, rows, tokens, width):
    """The law behind the single case: whatever is a tensor of the recipe is recognized as one, in both units."""
    recipe = Recipe(model=model, num_generations=rows, per_device_train_batch_size=rows, max_completion_length=tokens,
                    gpu="A100 80GB")  # fmt: skip
    nbytes = rows * tokens * Shape(recipe).V * width
    for words in {size(nbytes), f"{nbytes / 2**30:.2f} GiB"}:
        if words.startswith(("2.00 MiB", "20.00 MiB", "0.0")):
            continue
        found = suspects(words, recipe)
        assert any(candidate.bytes == nbytes and candidate.kind == "logits" for candidate in found), (words, found)
        number, unit = words.split()
        unit = {"GiB": 2**30, "MiB": 2**20}[unit]
        assert all(abs(candidate.bytes - float(number) * unit) <= 0.0051 * unit + 2**21 for candidate in found)


def test_the_card_of_the_message_counts_and_a_recipe_that_fits_is_called_so():
    message = MODERN.format(asked="4.64", used="22.0", kept="0.92").replace("15.73", "23.70").replace("15.41", "23.39")
    assert "from a card with 23.70 GiB" in diagnose(message, Recipe.preset("baseline")).text
    fitting = diagnose(MODERN.format(asked="3.33", used="14.0", kept="0.92"), Recipe.preset("laptop_16gb"))
    assert any("the recipe itself should fit" in words for words in fitting.advice)


@pytest.mark.parametrize("text, requested", [
    ("/bin/bash: line 1: 12345 Killed                  python train.py", None),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=123.batch.", None),
    ("torch.distributed.elastic...ChildFailedError: exitcode  : -9 (pid: 123)", None),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 18.6 GiB for an array", round(18.6 * 2**30)),
    ("DefaultCPUAllocator: not enough memory: you tried to allocate 671088640 bytes.", 671_088_640),
])  # fmt: skip
def test_the_computer_s_own_memory_is_told_from_a_card_s(text, requested):
    found = diagnose(text)
    assert found.kind == "host memory" and found.requested == requested and found.text
    assert ("dmesg" in found.text) is (requested is None)


@pytest.mark.parametrize("text", [
    "Traceback (most recent call last):\n  File \"a.py\", line 1\n    raise torch.OutOfMemoryError(message)\nValueError: boom",
    "    except torch.OutOfMemoryError:\n        skip()", "we never ran out of memory today", "it was killed by its owner",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
])  # fmt: skip
def test_code_and_chatter_about_memory_are_no_error(text):
    assert diagnose(text).kind == "not an out-of-memory error"


def test_an_engine_without_room_for_its_cache_gets_the_engine_s_setting():
    found = diagnose("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
    assert found.kind == "library" and "vllm_gpu_memory_utilization" in found.advice[0]


@pytest.mark.parametrize("before, after", [("> ", ""), ("│ ", " │"), ("\x1b[31m", "\x1b[0m"), ("[rank0]: ", "")])
def test_quoted_boxed_and_coloured_text_is_read(before, after):
    lines = ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "allocate 1.20 GiB. GPU 0 has a total capacity of 15.73",
             "GiB of which 0.31 GiB is free.")  # fmt: skip
    if before.startswith("["):
        lines = (" ".join(lines),)
    found = diagnose("\n".join(before + line + after for line in lines))
    assert found.requested == round(1.2 * 2**30) and found.total == round(15.73 * 2**30)


def test_the_message_with_numbers_counts_and_the_cause_of_an_error_is_looked_at():
    """After the first failure others follow, without numbers; a launcher wraps all of them in an error of its own."""
    try:
        try:
            raise RuntimeError(f"{MODERN.format(asked='1.20', used='9.90', kept='5.02')}\nCUDA error: out of memory")
        except RuntimeError as cause:
            raise ValueError("No executable batch size found, reached zero.") from cause
    except ValueError as error:
        found = diagnose(error)
        assert found.kind == "fragmentation" and found.requested == round(1.2 * 2**30)
        assert diagnose(ExceptionGroup("workers", [KeyError("a"), error])).requested == found.requested
    with oom_guard() as oom:
        raise torch.OutOfMemoryError(MODERN.format(asked="1.20", used="9.90", kept="5.02"))
    assert diagnose(oom).kind == "fragmentation"


def test_a_long_log_takes_a_moment():
    """Time grew with the square of a line's blanks: a progress bar's log took minutes."""
    lines = ("step |████      | 30% " + " " * 200 + "|\n") * 20_000 + " " * 100_000 + "x" + "a.b" * 100_000
    started = time.perf_counter()
    assert diagnose(lines + "\nCUDA out of memory. Tried to allocate 1.20 GiB").requested == round(1.2 * 2**30)
    assert time.perf_counter() - started < 20


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
    html = found._repr_html_()
    assert "shortage" in html and all(f"<li>{candidate}</li>" in html for candidate in found.candidates)


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
