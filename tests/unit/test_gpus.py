"""Cards: what a program sees of their memory, and how people write their names."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab import gpus
from grpo_lab._data import data_path

GiB, MiB = 2**30, 2**20
NOMINAL = {
    "RTX 3080 Laptop 8GB": 8, "RTX 3080 Laptop 16GB": 16, "RTX 3080 10GB": 10, "RTX 3080 12GB": 12,
    "RTX 3070 Laptop 8GB": 8, "RTX 3060 12GB": 12, "RTX 3090": 24, "RTX 4060 Ti 16GB": 16, "RTX 4090": 24,
    "RTX 5090": 32, "T4": 16, "L4": 24, "A10G": 24, "A100 40GB": 40, "A100 80GB": 80, "H100 80GB": 80,
    "H200": 141,
}  # fmt: skip


def test_every_card_of_the_course_is_there():
    assert set(gpus.names()) == set(NOMINAL)


@pytest.mark.parametrize("name", NOMINAL)
def test_a_program_sees_a_little_less_than_the_box_says(name):
    """The driver and error correction keep a part; a figure above the nominal size is a unit mixed up."""
    card = gpus.get(name)
    assert 0.88 * NOMINAL[name] * GiB < card.total_memory < NOMINAL[name] * GiB
    assert isinstance(card.total_memory, int)


@pytest.mark.parametrize("name", NOMINAL)
def test_the_context_is_a_range_and_the_budget_what_is_left(name):
    low, high = gpus.get(name).context
    assert 100 * MiB < low < high < 1024 * MiB
    card = gpus.get(name)
    assert card.total_memory - high < card.budget < card.total_memory - low


def test_every_figure_has_a_source_that_agrees_with_it():
    """The figure in bytes must be the one that its source gives, so that neither is edited alone."""
    with open(data_path("cards.csv"), newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            number, unit = re.match(r"([\d.]+) (GiB|MiB): ", row["source"]).groups()
            assert int(row["total_memory_bytes"]) == int(float(number) * {"GiB": GiB, "MiB": MiB}[unit]), row[
                "name"
            ]
            mentioned = [float(n) for n in re.findall(r"([\d.]+)(?:-[\d.]+)? MiB", row["context_source"])]
            for end in ("context_low_bytes", "context_high_bytes"):
                mib = int(row[end]) / MiB
                ends = mentioned + [float(n) for n in re.findall(r"-([\d.]+) MiB", row["context_source"])]
                assert any(abs(mib - n) < 1 for n in ends), (row["name"], mib, ends)


def test_bfloat16_comes_with_compute_capability_8():
    assert [name for name in gpus.names() if not gpus.get(name).bf16] == ["T4"]
    assert gpus.get("RTX 3080 Laptop 16GB").compute_capability == (8, 6)
    assert gpus.get("H100 80GB").compute_capability == gpus.get("H200").compute_capability == (9, 0)
    assert gpus.get("RTX 5090").compute_capability == (12, 0)


def test_the_figures_of_the_two_cards_that_the_course_leans_on():
    """15.73 GiB is in the out-of-memory message of a GRPO run on this laptop; a T4 reports 14,912 MiB."""
    assert f"{gpus.get('RTX 3080 Laptop 16GB').total_memory / GiB:.2f}" == "15.73"
    assert gpus.get("T4").total_memory == 14_912 * MiB
    assert gpus.get("T4").context[1] == int(140.875 * MiB)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx3090 24 GB", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU 16GB", "RTX 3080 Laptop 16GB"),
        ("rtx 3080 laptop 8 gb", "RTX 3080 Laptop 8GB"),
        ("RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("h100", "H100 80GB"),
        ("H200 141GB", "H200"),
    ],
)
def test_names_are_forgiving(written, name):
    assert gpus.get(written).name == name


@given(
    st.sampled_from(sorted(NOMINAL)), st.sampled_from([str.lower, str.upper, lambda s: s.replace(" ", "-")])
)
def test_every_name_is_found_however_it_is_written(name, change):
    assert gpus.get(change(name)).name == gpus.get("NVIDIA " + change(name)).name == name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("RTX 3080", "'RTX 3080 10GB' or 'RTX 3080 12GB'"),
        ("A100", "'A100 40GB' or 'A100 80GB'"),
        ("rtx 3080 laptop", "'RTX 3080 Laptop 8GB' or 'RTX 3080 Laptop 16GB'"),
    ],
)
def test_a_name_without_its_size_lists_the_sizes(name, sizes):
    with pytest.raises(ValueError, match=f"comes in several sizes: {sizes}"):
        gpus.get(name)


@pytest.mark.parametrize("name", ["RTX 3080 Lapto 16GB", "RTX 3090 12GB", "RTX 9999", "T5", "", "   ", "GTX"])
def test_an_unknown_name_is_one_sentence_with_a_way_out(name):
    with pytest.raises(ValueError, match=re.escape(f"gpu={name!r}")) as caught:
        gpus.get(name)
    message = str(caught.value)
    assert ("did you mean" in message or "known:" in message) and "16 * 2**30" in message


@pytest.mark.parametrize("budget", [8 * GiB, np.int64(8 * GiB), "8GB", "8 GiB", "8gib"])
def test_a_budget_is_what_may_be_used(budget):
    card = gpus.get(budget)
    assert card.budget == card.total_memory == 8 * GiB and card.context == (0, 0) and card.bf16


@pytest.mark.parametrize("budget", [16, 0, -1])
def test_a_budget_that_cannot_be_bytes(budget):
    with pytest.raises(ValueError, match="counted in bytes"):
        gpus.get(budget)


@pytest.mark.parametrize("value", [None, 16.5, True, ["T4"]])
def test_neither_a_name_nor_a_budget(value):
    with pytest.raises(TypeError, match="a budget is a whole number of bytes"):
        gpus.get(value)


def test_a_card_is_taken_as_it_is():
    card = gpus.get("T4")
    assert gpus.get(card) is card
    assert str(card) == "T4 (14.56 GiB seen by a program)"
