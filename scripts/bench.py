"""How fast the instrument is, beside PyTorch's own, in one run: ``make bench``.

    python scripts/bench.py [--only simulate|tracker|track]

`simulate`: a training step as `simulate` runs it. `tracker`: one and the same step under
``torch.distributed._tools.mem_tracker.MemTracker`` and under `VirtualGPU`, with both peaks. `track`: what `track` adds
to the time of a real step. Times are this machine's; ratios are of one run, alternating.
"""
from __future__ import annotations

import argparse
import resource
import statistics
import time
import warnings
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lab import Recipe, VirtualGPU, models, simulate, track
from grpo_lab import simulation as simulation_module

MiB, GiB = 2**20, 2**30
STEP = {"max_prompt_length": 256, "max_completion_length": 512, "num_generations": 8, "per_device_train_batch_size": 8}
RECIPES = {
    "Qwen2.5-0.5B, bfloat16, 8 x 768 tokens": Recipe(model="Qwen2.5-0.5B", **STEP),
    "Qwen3-8B, NF4, LoRA, 8 x 768 tokens": Recipe(model="Qwen3-8B", quantization="nf4", lora_rank=16,
                                                  autocast="bfloat16", activation_checkpointing=True, **STEP),
}


def simulate_steps() -> None:
    """The first call in a process works out what each op returns; later ones look it up."""
    real_step = simulation_module.step
    for name, recipe in RECIPES.items():
        for call in ("first", "second", "third"):
            inside = []

            def timed(*args, **kwargs):
                start = time.perf_counter()
                out = real_step(*args, **kwargs)
                inside.append(time.perf_counter() - start)
                return out

            simulation_module.step = timed
            start = time.perf_counter()
            simulate(recipe)
            whole = time.perf_counter() - start
            simulation_module.step = real_step
            print(f"simulate {name}: {call} call {whole:.1f} s, of which the step (forward, backward, optimizer) "
                  f"{sum(inside):.1f} s")
    print(f"host memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GiB:.2f} GiB")


def plain_step(model, optimizer, ids, phase=None) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def under_mem_tracker() -> tuple[float, int]:
    """Seconds of a step, and the peak in bytes, as MemTracker counts it (over fake tensors).

    Fake tensors look like tracing to transformers, which then builds an attention mask and repeats keys and values: no
    card does that here, so it is told not to, as inside a `VirtualGPU`. It is 2 % of the peak.
    """
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import masking_utils
    with (FakeTensorMode(allow_non_fake_inputs=True),
          mock.patch.object(masking_utils, "is_tracing", lambda *a, **k: False),
          mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.zeros(8, 768, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            plain_step(model, optimizer, ids)
            tracker.reset_mod_stats()
            start = time.perf_counter()
            plain_step(model, optimizer, ids)
            seconds = time.perf_counter() - start
        peak = max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return seconds, peak


def under_virtual_gpu() -> tuple[float, int]:
    with VirtualGPU("H100 80GB", enforce=False, kernels="cpu") as gpu:
        model = gpu.load("Qwen2.5-0.5B", dtype="bfloat16")
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.zeros(8, 768, dtype=torch.long)
        plain_step(model, optimizer, ids)
        start = time.perf_counter()
        plain_step(model, optimizer, ids)
        seconds = time.perf_counter() - start
    return seconds, gpu.report().peak_allocated


def _model():
    from transformers import AutoModelForCausalLM
    config = models.config("Qwen2.5-0.5B")
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def beside_mem_tracker() -> None:
    """Both on the CPU's kernels, for MemTracker knows no others; the second of two steps of Qwen2.5-0.5B, 8 x 768.

    What the peaks differ by is what the allocator's blocks keep beyond their tensors, which MemTracker doesn't know.
    """
    ours, theirs = under_virtual_gpu(), under_mem_tracker()
    print(f"a step under MemTracker {theirs[0]:.1f} s, peak {theirs[1] / MiB:,.0f} MiB; under VirtualGPU {ours[0]:.1f} s, "
          f"peak {ours[1] / MiB:,.0f} MiB: {theirs[0] / ours[0]:.1f} times as fast, peak {ours[1] / theirs[1] - 1:+.2%}")


def track_overhead(rounds: int = 5) -> None:
    """A real step of a model of SmolLM2-135M's shape, 4 x 128 tokens, float32, with and without, by turns."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_config(models.config("SmolLM2-135M"), dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 49_000, (4, 128))

    def timed() -> float:
        start = time.perf_counter()
        plain_step(model, optimizer, ids)
        return time.perf_counter() - start

    timed()
    ratios = []
    for _ in range(rounds):
        plain = timed()
        with track(existing=False) as memory:
            memory.watch(model)
            ratios.append(timed() / plain)
    print(f"track makes a real step of SmolLM2-135M {statistics.median(ratios) - 1:+.1%} slower "
          f"(median of {rounds}, from {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})")


PARTS = {"simulate": simulate_steps, "tracker": beside_mem_tracker, "track": track_overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, part in PARTS.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
