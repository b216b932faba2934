"""Published measurements of real cards against the virtual one. Nothing here is fitted.

A sample for every run; all rows: ``make truth``.
"""
from unittest import mock

import pandas as pd
import pytest
from scenarios import run
from table import LISTED, MiB, measurements, table

from grpo_lab._data import data_path
from grpo_lab.memory import nf4

# Model, quantization, tokens, attention of the steps rebuilt here (a few seconds each); the losses are all here.
SAMPLE = [("Qwen/Qwen2.5-1.5B-Instruct", "", "1024", "efficient"), ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "nf4", "512", "efficient"),
          ("HuggingFaceTB/SmolLM2-135M", "", "512", "eager"), ("Qwen/Qwen3-1.7B", "nf4_double", "96", "sdpa")]


def sample(index: int) -> pd.DataFrame:
    rows = measurements()
    columns = ["model", "quantization", "completion_tokens", "attention"]
    return rows[(rows[columns] == SAMPLE[index]).all(axis=1)].head(6)


def quiet(*_):
    """No progress."""


def test_losses_on_an_a100_and_a_b200_come_out_to_the_kibibyte():
    """linkedin/Liger-Kernel: cross entropy, a head with it, and the GRPO loss of its plain-PyTorch baseline."""
    rows = measurements()
    result = table(rows[rows["scenario"].str.startswith("lg-")], quiet)
    assert len(result) == 18
    assert (result["predicted"] - result["mib"]).abs().max() < 1 / 8


@pytest.mark.parametrize("index", range(len(SAMPLE)), ids=lambda i: " ".join(SAMPLE[i]))
def test_steps_phase_by_phase(index):
    """To 0.01 MiB, each phase, where the weights aren't quantized. With NF4 within 2 %: up to 5.2 `from_pretrained` read
    in threads while it quantized, and what blocks keep beyond their tensors varies with the order."""
    result = table(sample(index), quiet)
    allocated = result[result["metric"] == "allocated"]
    assert len(allocated)
    assert allocated["error"].abs().max() < 0.02
    if not SAMPLE[index][1]:
        assert (allocated["predicted"] - allocated["mib"]).abs().max() < 0.01
    assert result["error"].abs().max() < 0.08


def test_the_listed_rows_are_there_and_have_a_cause():
    rows = measurements().set_index("id")
    assert all(rows.loc[name, "metric"] == "reserved" and cause for name, cause in LISTED.items())
    runs = rows[(rows["metric"] == "reserved") & (rows["model"] == "TinyLlama/TinyLlama-1.1B-Chat-v1.0")
                & (rows["completion_tokens"] == "512") & (rows["attention"] == "eager")]["mib"]
    assert runs.max() / runs.min() - 1 > 0.07                   # what the cause of the second says


def test_the_listed_row_comes_out_as_measured_with_its_loader_twelve_weights_ahead():
    """15 % too much was reserved, and the cause unknown: transformers 5.0 loaded in threads, ahead of the quantization,
    and left larger free blocks than today's loader. Here they are twelve weights ahead: 4,822 MiB, as measured but for one segment of 2 MiB."""
    row = measurements().set_index("id").loc["fc-20260916-04-whole-r"]
    with mock.patch.object(nf4, "AHEAD", 12):
        predicted = run(row.to_dict()).report().peak_reserved / MiB
    assert predicted == pytest.approx(row["mib"], rel=0.001)


@pytest.mark.parametrize("record", [0, 1])
def test_what_ran_out_of_memory_runs_out_at_the_same_place(record):
    """Two LoRA steps on a T4 that died in their backward: the same request, with the same bytes allocated by then."""
    row = pd.read_csv(data_path("out_of_memory.csv"), dtype=str, keep_default_na=False).iloc[record]
    oom = run(row.to_dict()).report().oom
    assert oom is not None and row["phase"] in oom["phase"]
    assert f"{oom['requested'] / 1024 / MiB:.2f}" == row["requested_gib"]
    assert oom["allocated"] / 1024 / MiB == pytest.approx(float(row["allocated_gib"]), rel=0.002)
