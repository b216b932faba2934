"""The virtual card: what code meets inside it, and what it says when something is wrong."""
import subprocess
import sys

import pytest
import torch

from grpo_lab import VirtualGPU

MiB = 2**20


def test_running_out_sounds_like_cuda():
    with VirtualGPU("RTX 3080 Laptop 16GB"), pytest.raises(torch.OutOfMemoryError) as caught:
        keep = [torch.empty(2**30) for _ in range(8)]       # 4 GiB each
        del keep
    message = str(caught.value)
    for words in ("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.73 GiB of which",
                  "Including non-PyTorch memory, this process has", "Of the allocated memory 12.00 GiB is allocated by",
                  "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):        # the words of libc10_cuda 2.13
        assert words in message


def test_past_the_budget_without_enforcing():
    with VirtualGPU(100 * MiB, enforce=False) as gpu:
        keep = [torch.empty(10 * MiB, dtype=torch.uint8) for _ in range(20)]
    report = gpu.report()
    assert len(keep) == 20
    assert not report.fits
    assert report.peak_allocated == 200 * MiB
    assert report.oom["requested"] == 10 * MiB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 10.00 MiB"):
        report.raise_if_oom()


def test_memory_comes_back_when_tensors_die():
    with VirtualGPU("T4") as gpu:
        for _ in range(100):
            x = torch.empty(2**30)
            del x
    assert gpu.report().peak_reserved == 4096 * MiB


def test_cuda_means_the_virtual_card():
    with VirtualGPU("T4") as gpu:
        x = torch.zeros(4, device="cuda")
        layer = torch.nn.Linear(4, 4).to("cuda").half()
        y = layer(x.half().cuda())
        with torch.autocast("cuda", dtype=torch.float16):
            z = torch.nn.Linear(4, 4).cuda()(x)
    assert (y.dtype, z.dtype) == (torch.float16, torch.float16)
    assert gpu.report().peak_allocated > 0


def test_who_asks_whether_autocast_is_on_hears_cuda_s_answer():
    """PEFT's 4-bit layers asked, heard no, and cast their inputs to float32: a step came out 10 % too large."""
    with VirtualGPU("RTX 3090"):
        assert not torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.float16
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is torch.bfloat16
        assert not torch.is_autocast_enabled()
    with VirtualGPU("RTX 3090", kernels="cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()                  # a CPU's own answer


def test_values_read_as_stated():
    with VirtualGPU("T4"):
        x = torch.rand(3)
        assert x.sum().item() == 1
        assert not (x > 0).all()


def test_optimizers_and_clipping_take_cards_kernels():
    """On a CPU, AdamW loops over parameters; on a card it holds temporaries of all of them at once (foreach)."""
    peaks = {}
    for kernels in ("cuda", "cpu"):
        with VirtualGPU("T4", kernels=kernels) as gpu:
            layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))
            optimizer = torch.optim.AdamW(layers.parameters())
            for p in layers.parameters():
                p.grad = torch.zeros_like(p)
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()
        peaks[kernels] = gpu.report().peak_allocated / (4 * MiB)
    assert peaks["cuda"] == pytest.approx(8 * 5, rel=0.01)      # weights, gradients, two states, square roots
    assert peaks["cpu"] < 8 * 4 + 4


def test_loading_counts_weights_once_even_if_tied():
    with VirtualGPU("T4") as gpu:
        model = gpu.load("SmolLM2-135M", dtype="bfloat16")
    weights = sum(p.numel() * 2 for p in model.parameters())
    report = gpu.report()
    assert report.phases.loc["load", "peak_allocated"] == pytest.approx(weights, rel=0.001)
    assert list(report.categories.index) == ["parameters"]


def test_workspaces_are_named():
    with VirtualGPU("T4") as gpu:
        w = torch.zeros(8, 8, requires_grad=True)
        (torch.zeros(8, 8) @ w).sum().backward()
    assert gpu.report().categories.loc["workspace", "bytes"] == 2 * 8_519_680


@pytest.mark.parametrize(("make", "words"), [
    (lambda: VirtualGPU("RTX 9999"), "RTX 9999"),
    (lambda: VirtualGPU(-1), "-1"),
    (lambda: VirtualGPU("T4", kernels="tpu"), "'tpu'"),
])
def test_bad_input_is_one_sentence(make, words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_one_card_at_a_time():
    with VirtualGPU("T4"), pytest.raises(RuntimeError, match="inside another"), VirtualGPU("T4"):
        pass


def test_nothing_stays_changed():
    before = torch.nn.Module._apply, torch.amp.autocast_mode.autocast.__init__
    with pytest.raises(ZeroDivisionError), VirtualGPU("T4"):
        1 / 0  # noqa: B018
    assert (torch.nn.Module._apply, torch.amp.autocast_mode.autocast.__init__) == before
    assert type(torch.zeros(1)) is torch.Tensor


def test_a_snapshot_opens_in_pytorchs_viewer(tmp_path):
    with VirtualGPU("T4") as gpu, gpu.phase("forward"):
        x = torch.zeros(2**20)
        x = x + 1
    file = gpu.report().save_snapshot(tmp_path / "step.pickle")
    page = tmp_path / "step.html"
    subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o",
                    str(page)], check=True)
    assert "<html" in page.read_text().lower() or "<!doctype" in page.read_text().lower()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        gpu.report().save_snapshot(tmp_path / "nowhere" / "step.pickle")
