"""Our step against `trl.GRPOTrainer` at the same setting on this CPU, in one run: peak bytes and seconds a step.

    python scripts/bench_trl.py [--model tiny|SmolLM2-135M] [--rounds 3] [--out data/bench_trl.csv]

"defaults" is what `GRPOConfig()` says (all weights in float32, fused AdamW, activation checkpointing, micro-batches of
8); "everything on" trains a LoRA adapter over bfloat16 weights in micro-batches of one. Completions never end early, so
that both make the same number of tokens. Both sides run by turns, and the first step of each run is left out of the
times. Bytes are the tensors that `track` counts, weights included, on a run of its own, for counting takes time.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
import warnings

import datasets
import pandas as pd
import torch
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

from grpo_lab import Recipe, models, tasks, track
from grpo_lab.grpo.train import train

MiB = 2**20
STEPS = 4
COMMON = dict(num_generations=8, max_prompt_length=16, logits="chunked", activation_checkpointing=True,
              optim="adamw_torch_fused", max_steps=STEPS, learning_rate=1e-6)
SETTINGS = {
    "defaults": dict(dtype="float32", per_device_train_batch_size=8),
    "everything on": dict(dtype="bfloat16", lora_rank=16, per_device_train_batch_size=1, gradient_accumulation_steps=8,
                          rollout_batch_size=8, logits_chunk_size=64),
}
COMPLETION = {"tiny": 64, "SmolLM2-135M": 48}


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def right(completions, answer, **_):
    return [float(text.strip() == str(a)) for text, a in zip(completions, answer)]


def trl_run(recipe, model, tokenizer, rows, memory=None) -> list[float]:
    args, peft_config = recipe.to_trl(
        output_dir=tempfile.mkdtemp(), save_strategy="no", logging_strategy="no", disable_tqdm=True,
        generation_kwargs={"min_new_tokens": recipe.max_completion_length}, shuffle_dataset=False)
    clock = Clock()
    trainer = GRPOTrainer(model, right, args=args, train_dataset=datasets.Dataset.from_list(rows),
                          processing_class=tokenizer, peft_config=peft_config, callbacks=[clock])
    if memory is not None:
        memory.watch(trainer.model)
    with contextlib.redirect_stdout(None):
        trainer.train()
    return clock.ends


def our_run(recipe, model, tokenizer, rows, memory=None) -> list[float]:
    ends = []
    if memory is not None:
        memory.watch(model)
    train(recipe, model=model, tokenizer=Endless(tokenizer), prompts=rows, reward_funcs=right, progress=False,
          share_prefill=True, callback=lambda row: ends.append(time.perf_counter()))
    return ends


class Endless:
    """A tokenizer whose end token nobody samples."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    eos_token_id = -1

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.tokenizer(*args, **kwargs)


def fresh(recipe):
    return models.load(recipe.model, dtype=recipe.dtype)


def compare(recipe, rounds: int) -> dict:
    rows = [row for row in tasks.get("addition").prompts("train")][:64]
    runs, seconds, peaks = {"TRL": trl_run, "ours": our_run}, {"TRL": [], "ours": []}, {}
    for _ in range(rounds):
        for name, run in runs.items():
            ends = run(recipe, *fresh(recipe), rows)
            seconds[name] += [after - before for before, after in zip(ends, ends[1:])]
    for name, run in runs.items():
        gc.collect()
        model, tokenizer = fresh(recipe)
        with track(existing=False) as memory:
            run(recipe.replace(max_steps=2), model, tokenizer, rows, memory)
        peaks[name] = memory.report().peak_allocated
    return {"peak MiB, TRL": round(peaks["TRL"] / MiB, 1), "peak MiB, ours": round(peaks["ours"] / MiB, 1),
            "bytes": round(peaks["ours"] / peaks["TRL"], 3),
            "s a step, TRL": round(statistics.median(seconds["TRL"]), 3),
            "s a step, ours": round(statistics.median(seconds["ours"]), 3),
            "time": round(statistics.median(seconds["ours"]) / statistics.median(seconds["TRL"]), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=COMPLETION, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table = []
    for model in options.model or COMPLETION:
        for name, fields in SETTINGS.items():
            recipe = Recipe(model=model, gpu="A100 80GB", max_completion_length=COMPLETION[model], **COMMON | fields)
            table.append({"model": model, "setting": name, **compare(recipe, options.rounds)})
            print(*(f"{key} {value}" for key, value in table[-1].items()), sep=" | ", flush=True)
    frame = pd.DataFrame(table)
    print(f"\nours over TRL's, on this CPU ({torch.get_num_threads()} threads):\n{frame.to_string(index=False)}")
    if options.out:
        frame.to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
