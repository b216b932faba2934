"""Train the tiny model with GRPO in each precision, at two learning rates.

`python scripts/train_precisions.py` prints a line a run and writes data/precision_curves.csv: the mean reward of every
step, and in the rows of step 0 and of the last one the accuracy of one greedy answer to each of the 250 test problems.
The settings are `Recipe.preset("tiny")` and `TRAIN_KEYWORDS["tiny"]` with fewer steps and, for the second learning
rate, a tenth of it. Nothing was tuned for any precision. Runs of one seed start from the same weights and meet the same
problems in the same order. The ways that differ most run with a second seed, too.

Where the processor has no arithmetic for 16 bits, a 16-bit run takes several times as long as one in fp32. All eleven take
about half an hour on one such core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from grpo_lab import models, tasks  # noqa: E402
from grpo_lab.grpo.train import evaluate, train  # noqa: E402
from grpo_lab.recipe import TRAIN_KEYWORDS, Recipe  # noqa: E402

PRECISIONS = {
    "fp32": {},
    "autocast bf16": {"autocast": "bfloat16"},
    "autocast fp16 + scaler": {"autocast": "float16"},
    "bf16": {"dtype": "bfloat16"},
    "bf16 + fp32 master": {"dtype": "bfloat16", "master_weights": True},
}
AGAIN = ("fp32", "bf16", "bf16 + fp32 master")
RUNS = [  # learning rate, seed, precision
    *((1e-3, 42, name) for name in PRECISIONS),
    *((1e-4, 42, name) for name in AGAIN),
    *((1e-3, 0, name) for name in AGAIN),
]
FILE = ROOT / "data" / "precision_curves.csv"


def run(precision: str, learning_rate: float, seed: int, max_steps: int) -> pd.DataFrame:
    """One run: a row a step, and one of step 0 before them."""
    recipe = Recipe.preset(
        "tiny", learning_rate=learning_rate, max_steps=max_steps, seed=seed, **PRECISIONS[precision]
    )
    task = tasks.get(recipe.task)
    model, tokenizer = models.load("tiny", dtype=recipe.dtype)

    def accuracy() -> float:
        return evaluate(
            model,
            tokenizer,
            task.prompts("test"),
            task.reward_funcs,
            max_completion_length=recipe.max_completion_length,
            autocast=recipe.autocast,
        )

    before = accuracy()
    model, history = train(recipe, model=model, tokenizer=tokenizer, progress=False, **TRAIN_KEYWORDS["tiny"])
    table = pd.DataFrame({"step": range(max_steps + 1), "reward": [None, *history["reward"].round(4)]})
    table["accuracy"] = [before, *[None] * (max_steps - 1), accuracy()]
    for name, value in {"seed": seed, "learning_rate": learning_rate, "precision": precision}.items():
        table.insert(0, name, value)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--file", type=Path, default=FILE, help="where to write the curves")
    options = parser.parse_args()
    tables = []
    for learning_rate, seed, precision in RUNS:
        start = time.perf_counter()
        tables.append(run(precision, learning_rate, seed, options.max_steps))
        before, after = tables[-1]["accuracy"].iloc[[0, -1]]
        print(f"{precision}, learning rate {learning_rate:g}, seed {seed}: {before:.3f} -> {after:.3f} in "
              f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        pd.concat(tables).to_csv(options.file, index=False)


if __name__ == "__main__":
    main()
