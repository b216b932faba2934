"""Measures GRPO steps on this machine's card beside their prediction, and tries the prediction as a limit.

    python scripts/measure_card.py [--out data/cards_measured] [--quick]

Weights are random, for only memory is looked at; nothing is downloaded. Every run is a process of its own: its peaks are
those of ``torch.cuda``'s statistics, reset at the start of each phase. Then the same step runs under
``set_per_process_memory_fraction``: with the predicted reserved bytes plus 2 % it must not run out, with 5 % less it must.
The results are written as data, with the date, the card and the versions. Under ten minutes on one card.
"""
from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from grpo_lab import Recipe, gpus, simulate
from grpo_lab._trl import model_init_kwargs

SMALL = {"model": "Qwen2.5-0.5B", "max_prompt_length": 128, "max_completion_length": 128, "autocast": None}
RECIPES = {
    "full": {},
    "float32": {"dtype": "float32", "max_completion_length": 64},
    "chunked": {"logits": "chunked", "activation_checkpointing": True},
    "lora": {"lora_rank": 16, "activation_checkpointing": True, "autocast": "bfloat16"},
    "nf4": {"lora_rank": 16, "quantization": "nf4_double", "activation_checkpointing": True, "autocast": "bfloat16"},
    "reference": {"beta": 0.04, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "fused": {"optim": "adamw_torch_fused", "activation_checkpointing": True},
    "8-bit": {"optim": "adamw_8bit", "activation_checkpointing": True},
    "eager": {"attn_implementation": "eager"},
}
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes")


def this_card() -> gpus.Card:
    """The card as it is, with what this process has on it beside PyTorch's memory as its context."""
    torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    capability = torch.cuda.get_device_capability()
    return gpus.Card(torch.cuda.get_device_name(), total, capability, capability >= (8, 0), (context, context), "measured")


class Phases:
    """``phase(name)`` as the step takes it; the highest of torch.cuda's peaks of each name."""

    def __init__(self):
        self.peaks: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str):
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self.peaks[name] = tuple(map(max, now, self.peaks.get(name, (0, 0))))


def measure_here(recipe: Recipe, fraction: float | None = None) -> dict:
    """Two steps from the start in this process: peaks by phase, or {"oom": message}."""
    from transformers import AutoModelForCausalLM

    from grpo_lab import models
    from grpo_lab.simulation import _steps
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    phases = Phases()
    try:
        with phases.phase("load"):
            options = model_init_kwargs(recipe)
            quantization = options.pop("quantization_config", None)
            with torch.device("cuda" if quantization is None else "cpu"):
                model = AutoModelForCausalLM.from_config(models.config(recipe.model), **{
                    **options, "dtype": getattr(torch, options["dtype"])})
            if quantization is not None:
                model = _quantized(model, quantization, options)
        reference = None
        if recipe.needs_reference:
            import copy
            reference = copy.deepcopy(model).requires_grad_(False)
        _steps(recipe, model, reference, phases.phase, 2)
    except torch.OutOfMemoryError as error:
        return {"oom": str(error)}
    return {"phases": phases.peaks}


def _quantized(model, quantization, options):
    """Random weights, saved and loaded again as `from_pretrained` quantizes them."""
    from transformers import AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": 0}, **options)


def in_a_process(name: str, fraction: float | None = None) -> dict:
    """`measure_here` in a fresh process, so that no run finds another's segments."""
    command = [sys.executable, __file__, "--one", name] + ([] if fraction is None else ["--fraction", str(fraction)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def recipe(name: str) -> Recipe:
    return Recipe(**{**SMALL, **RECIPES[name], "gpu": "H200"})


def compare(name: str, card: gpus.Card) -> list[dict]:
    """One row a phase: measured and predicted bytes; and the rows of the cap test."""
    predicted = simulate(recipe(name), gpu=card, steps=2, every_micro_batch=False)
    measured = in_a_process(name)
    if "phases" not in measured:
        return [{"recipe": name, "phase": "failed", "note": json.dumps(measured)}]
    rows = []
    for phase, (allocated, reserved) in measured["phases"].items():
        if phase in predicted.phases.index:
            row = predicted.phases.loc[phase]
            rows.append({"recipe": name, "phase": phase, "measured_allocated": allocated,
                         "predicted_allocated": int(row.peak_allocated), "measured_reserved": reserved,
                         "predicted_reserved": int(row.peak_reserved)})
    for label, factor in (("cap +2 %", 1.02), ("cap -5 %", 0.95)):
        under = in_a_process(name, predicted.peak_reserved * factor / card.total_memory)
        rows.append({"recipe": name, "phase": label, "predicted_reserved": int(predicted.peak_reserved * factor),
                     "note": "ran out" if "oom" in under else "ran" if "phases" in under else json.dumps(under)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/cards_measured"), help="folder of the result")
    parser.add_argument("--quick", action="store_true", help="the first three recipes only")
    parser.add_argument("--one", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--fraction", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("measure_card: this machine has no CUDA card that PyTorch sees, so there is nothing to measure")
    if options.one:
        print(json.dumps(measure_here(recipe(options.one), options.fraction)))
        return
    card, rows = this_card(), []
    facts = {"date": datetime.date.today().isoformat(), "card": card.name, "total_memory": card.total_memory,
             "context": card.typical_context, **{name: version(name) for name in PACKAGES}}
    for name in list(RECIPES)[:3 if options.quick else None]:
        rows += compare(name, card)
        print(*rows[-3:], sep="\n", flush=True)
        _write(options.out / f"{card.name.replace(' ', '_')}.csv", [{**row, **facts} for row in rows])


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(aside, path)


if __name__ == "__main__":
    main()
