"""Prints what published runs measured, what the virtual card says, and the difference: ``make truth``.

``python tests/truth/table.py [--tier A] [--only TEXT] [--csv FILE]``
"""
from __future__ import annotations

import argparse
import sys
import time

import pandas as pd
from scenarios import SCENARIOS, run

from grpo_lab._data import data_path

MiB = 2**20
KEYS = ["scenario", "card", "torch", "trl", "model", "quantization", "lora_rank", "micro_batch", "prompt_tokens",
        "completion_tokens", "attention", "logits"]


def measurements() -> pd.DataFrame:
    """The rows that stock PyTorch, transformers, PEFT, bitsandbytes and TRL can rebuild."""
    rows = pd.read_csv(data_path("measurements.csv"), dtype=str, keep_default_na=False)
    stock = rows["scenario"].isin(list(SCENARIOS)) & ~rows["logits"].str.contains("liger")
    return rows[stock].assign(mib=rows["mib"].astype(float))


def predict(gpu, row) -> float:
    """MiB that the virtual card has for a row's metric and phase."""
    report = gpu.report()
    if row.phase == "load":
        return gpu.resident / MiB
    if row.metric == "reserved":
        return report.peak_reserved / MiB
    if row.phase == "whole":
        phases = report.phases["peak_allocated"]
        return phases.drop(index="load", errors="ignore").max() / MiB
    return report.phases.loc[row.phase, "peak_allocated"] / MiB


def table(rows: pd.DataFrame, progress=print) -> pd.DataFrame:
    """The rows with columns ``predicted`` (MiB) and ``error`` (a fraction)."""
    parts = []
    for key, group in rows.groupby(KEYS, sort=False):
        start = time.perf_counter()
        gpu = run(group.iloc[0].to_dict())
        predicted = [predict(gpu, row) for row in group.itertuples()]
        part = group.assign(predicted=predicted)
        part["error"] = part["predicted"] / part["mib"] - 1
        parts.append(part)
        progress(f"{time.perf_counter() - start:5.1f} s  {' '.join(str(k) for k in key[:11] if k)}")
        for row in part.itertuples():
            progress(f"         {row.phase:9} {row.metric:9} {row.tier} {row.mib:9.1f} {row.predicted:9.1f} {row.error:+.2%}")
    return pd.concat(parts)


def summary(result: pd.DataFrame) -> pd.DataFrame:
    """Median and worst error by scenario and metric."""
    result = result.assign(size=result["error"].abs())
    groups = result.groupby(["scenario", "tier", "metric", "phase"])["size"]
    return pd.DataFrame({"rows": groups.size(), "median": groups.median(), "worst": groups.max()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", help="only rows of this tier: A or B")
    parser.add_argument("--only", default="", help="only rows whose id holds this text")
    parser.add_argument("--csv", help="write the table to this file, too")
    options = parser.parse_args()
    rows = measurements()
    rows = rows[rows["id"].str.contains(options.only) & (rows["tier"].str.startswith(options.tier or ""))]
    result = table(rows)
    percent = {"median": "{:.2%}".format, "worst": "{:.2%}".format}
    print("\n" + summary(result).to_string(formatters=percent))
    if options.csv:
        result.to_csv(options.csv, index=False)
    sys.exit(verdict(result))


# Rows that no run can be held to, with the cause.
LISTED = {
    "fc-20260916-04-whole-r": (
        "transformers 5.0 made 16-bit weights in four threads ahead of the quantization, and how many was a race (pull "
        "request 44576 ended it). What they leave reserved decides where attention's 512 MiB tensors find room: from none "
        "to 64 ahead the card comes out between 0.0 % (12 ahead) and +19 %."),
    "fc-20260901-00-whole-r": (
        "two published runs of this very step differ by 7 % (the other, fc-20260915-36, is within the claim): by whether "
        "none, one or both gradients of the second step's logits, 126 MiB each, find the places of the first's."),
}
# (median, worst) that the virtual card claims: allocated of complete records, and reserved, which its own sources
# don't reproduce to better than several percent.
CLAIMS = {"allocated": (0.005, 0.02), "reserved": (0.03, 0.08)}


def verdict(result: pd.DataFrame) -> int:
    """Prints whether the claims hold, over tier A for allocated and tier B for reserved; 1 if one doesn't."""
    failed = 0
    for row in result[result["id"].isin(list(LISTED))].itertuples():
        print(f"listed: {row.id}, {row.metric}, off by {row.error:+.2%}: {LISTED[row.id]}")
    result = result[~result["id"].isin(list(LISTED))]
    for metric, (median, worst) in CLAIMS.items():
        tier = "A" if metric == "allocated" else "B"
        error = result[(result["metric"] == metric) & result["tier"].str.startswith(tier)]["error"].abs()
        if not len(error):
            continue
        holds = error.median() <= median and error.max() <= worst
        failed |= not holds
        print(f"{metric}: {len(error)} rows, median {error.median():.2%} (claimed {median:.1%}), worst "
              f"{error.max():.2%} (claimed {worst:.0%}): {'holds' if holds else 'does not hold'}")
    return int(failed)


if __name__ == "__main__":
    main()
