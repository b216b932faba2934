"""How well `estimate` agrees with the instrument on random recipes, and how long it takes.

    python scripts/bench_estimate.py [-n 300] [--seed 0] [--jobs 2] [--models Qwen2.5-0.5B Qwen3-0.6B]

Prints each recipe with its error, then medians and worst cases by phase and by choice, the share of equal verdicts,
and what the instrument reserves over what it allocates. Some 5 to 15 seconds a recipe and core: 300 take about half an
hour.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor

from tqdm.auto import tqdm

from grpo_lab import Recipe, estimate, gpus, models

FIELDS = ("model", "dtype", "autocast", "quantization", "logits", "optim", "attn_implementation",
          "activation_checkpointing")  # fmt: skip


def draw(rng: random.Random, names: list[str]) -> Recipe:
    """A valid recipe; combinations that a Recipe refuses are drawn again."""
    while True:
        lora = rng.random() < 0.5
        micro, group, accumulation = rng.choice([1, 2, 4, 8]), rng.choice([2, 4, 8]), rng.choice([1, 2, 4, 8])
        fields = {
            "model": rng.choice(names), "gpu": rng.choice(gpus.names()),
            "dtype": rng.choice(["bfloat16", "bfloat16", "float32", "float16"]),
            "autocast": rng.choice([None, None, "bfloat16", "float16"]),
            "quantization": rng.choice([None, None, "nf4", "nf4_double"]) if lora else None,
            "lora_rank": rng.choice([4, 8, 16, 32, 64]) if lora else None,
            "lora_targets": rng.choice(["all-linear", ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")]),
            "lora_dtype": rng.choice(["float32", "bfloat16"]), "num_generations": group,
            "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation,
            "steps_per_generation": rng.choice([None, 2 * accumulation]), "num_iterations": rng.choice([1, 1, 2]),
            "max_prompt_length": rng.choice([64, 128, 256, 512]),
            "max_completion_length": rng.choice([64, 128, 256, 512, 1024]),
            "rollout_batch_size": rng.choice([None, None, 4, 8]), "beta": rng.choice([0.0, 0.0, 0.04]),
            "activation_checkpointing": rng.random() < 0.5, "logits": rng.choice(["full", "chunked"]),
            "logits_chunk_size": rng.choice([128, 256, 1024]),
            "optim": rng.choice(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit",
                                 "adafactor", "sgd"]),
            "attn_implementation": rng.choice(["sdpa", "sdpa", "sdpa", "eager"]),
        }  # fmt: skip
        try:
            return Recipe(**fields)
        except ValueError:
            continue


def both(recipe: Recipe) -> dict:
    """The formula and the instrument on one recipe."""
    from grpo_lab import simulate

    warnings.simplefilter("ignore")
    simulated, estimated = simulate(recipe), estimate(recipe)
    phases = {name: estimated.moments[name].bytes / simulated.phases.loc[name, "peak_allocated"] - 1
              for name in simulated.phases.index}  # fmt: skip
    return {"recipe": recipe, "error": estimated.peak_allocated / simulated.peak_allocated - 1, "phases": phases,
            "same": estimated.fits == simulated.fits,
            "kept": simulated.peak_reserved / simulated.peak_allocated}  # fmt: skip


def milliseconds(recipes: list[Recipe]) -> float:
    for recipe in recipes:  # files are read once
        estimate(recipe)
    start = time.perf_counter()
    for recipe in recipes:
        estimate(recipe)
    return (time.perf_counter() - start) / len(recipes) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="recipe i is drawn with seed + i")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", nargs="*", help="default: all that are bundled, up to 16 billion parameters")
    arguments = parser.parse_args()
    names = arguments.models or [n for n in models.names()
                                 if n != "tiny" and models.architecture(n).parameters < 16e9]  # fmt: skip
    recipes = [draw(random.Random(arguments.seed + i), names) for i in range(arguments.n)]
    print(f"estimate: {milliseconds(recipes):.2f} ms a recipe", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = list(tqdm(pool.map(both, recipes), total=len(recipes)))
    table = defaultdict(list)
    for row in rows:
        print(f"{row['error']:+7.2%} {'' if row['same'] else 'OTHER VERDICT '}{row['recipe']!r}")
        table["all", ""].append(row["error"])
        table["LoRA", str(row["recipe"].lora_rank is not None)].append(row["error"])
        for name, error in row["phases"].items():
            table["phase", name].append(error)
        for field in FIELDS:
            table[field, str(getattr(row["recipe"], field))].append(row["error"])
    for (field, value), errors in table.items():
        sizes = [abs(error) for error in errors]
        print(f"{field:26} {value:30} n={len(sizes):4}  median {statistics.median(sizes):6.2%}  "
              f"worst {max(sizes):6.2%}")  # fmt: skip
    kept = [row["kept"] for row in rows]
    equal = statistics.mean(row["same"] for row in rows)
    print(f"equal verdicts: {equal:.1%}; the instrument reserves {statistics.median(kept):.3f} times what it "
          f"allocates (from {min(kept):.3f} to {max(kept):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
