"""Llama-3.1-8B with 8 answers of 20,480 tokens of context: the leanest recipe, simulated, and what it costs in time.

    python scripts/long_context.py [--write]

The best public figure for that setting is 54.3 GB, against 510.8 GB for a plain trainer with flash attention (Unsloth,
"Long-context GRPO", February 2025). Each row is our own step on a virtual card, some tens of seconds on a CPU;
``--write`` puts the table into the README.
"""
from __future__ import annotations

import sys
from typing import Any

import pandas as pd
from make_pictures import put
from tqdm.auto import tqdm

from grpo_lab import Recipe, models, simulate

GB, GiB = 10**9, 2**30
LEAN = Recipe(
    model="Llama-3.1-8B", gpu="RTX 3090", num_generations=8, max_prompt_length=480, max_completion_length=20_000,
    per_device_train_batch_size=1, gradient_accumulation_steps=8, rollout_batch_size=2, logits="chunked",
    logits_chunk_size=256, activation_checkpointing=True, activation_offload=True, quantization="nf4_double",
    lora_rank=16, lora_dtype="bfloat16", optim="adamw_torch_fused")  # fmt: skip
EXPANDABLE = "expandable_segments:True"  # the value of PYTORCH_ALLOC_CONF; notebook 11
ROWS: dict[str, dict[str, Any]] = {
    "everything, with expandable segments": {},
    "everything, by PyTorch's defaults": {},
    "16-bit weights instead of NF4": {"quantization": None},
    "checkpoints on the card": {"activation_offload": False},
    "all 8 answers generated at once": {"rollout_batch_size": None},
    "full logits": {"logits": "full"},
}


def table() -> pd.DataFrame:
    rows = []
    for name, changes in tqdm(ROWS.items(), unit="recipe", leave=False):
        report = simulate(LEAN.replace(**changes), alloc_conf=EXPANDABLE if "expandable" in name else None)
        rows.append({"recipe": name, "allocated": report.peak_allocated / GB, "reserved": report.peak_reserved / GB,
                     "host": report.peak_host / GB, "peak in": report.phases["peak_allocated"].idxmax()})
    return pd.DataFrame(rows)


def cost() -> str:
    """In words, counted from shapes."""
    shape = models.architecture(LEAN.model)
    moved = shape.num_hidden_layers * LEAN.sequence_length * shape.hidden_size * 2
    return (f"What it costs: the recomputed forward, a third more work in training; {moved / GB:.1f} GB of checkpoints "
            f"out to the host and back in each micro-batch, beside the computation; and {8 // LEAN.rollout_batch} turns of "
            f"generation instead of one, each of which reads all weights for every token.")  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    lines = ["| recipe | allocated | reserved | host memory | peak in |", "|---|---|---|---|---|"]
    lines += [f"| {r.recipe} | {r.allocated:.1f} GB | {r.reserved:.1f} GB | {r.host:.1f} GB | {r[-1]} |"
              for r in frame.itertuples(index=False)]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    text = f"{markdown(table())}\n\n{cost()}\n"
    print(text)
    if "--write" in sys.argv:
        put("long context", text)
