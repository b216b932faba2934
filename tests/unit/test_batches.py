"""Micro-batches by tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import make_batch, make_model

from grpo_lab import Recipe, simulate
from grpo_lab.grpo.batches import padding_share, token_batches
from grpo_lab.grpo.setup import prepare
from grpo_lab.grpo.step import Samples, micro_batch_loss, micro_batches, score

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(50, 400))
def test_every_row_once_within_the_budget_longest_first(lengths, budget):
    batches = token_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[row] for row in rows) <= budget for rows in batches)
    order = [lengths[row] for rows in batches for row in rows]
    assert order == sorted(order, reverse=True)
    assert 0 <= padding_share(lengths, batches) < 1


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="micro_batch_tokens=10 is less than one sequence of 12"):
        token_batches([3, 12], 10)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_packing_changes_no_gradient(loss_type):
    """The sum over micro-batches of any cut is the window's gradient: the divisors don't know of micro-batches."""
    base = dict(model="tiny", gpu="A100 80GB", dtype="float32", num_generations=4, per_device_train_batch_size=4,
                gradient_accumulation_steps=2, max_prompt_length=8, max_completion_length=6, loss_type=loss_type)
    samples = Samples(*make_batch(8, 8, 6), torch.randn(8, generator=torch.Generator().manual_seed(0)))

    def gradients(fields):
        policy = prepare(make_model(), fields)
        parts = list(micro_batches(score(policy, samples, fields), fields))
        for micro in parts:
            micro_batch_loss(policy, micro, fields)[0].backward()
        return {name: p.grad for name, p in policy.named_parameters()}, [tuple(m.completion_ids.shape) for m in parts]

    expected, _ = gradients(Recipe(**base))
    got, shapes = gradients(Recipe(**base, micro_batch_tokens=35))
    assert len({shape[0] for shape in shapes}) > 1 and min(shape[1] for shape in shapes) < 6
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_full_length_sequences_fill_the_budget():
    fields = dict(model="SmolLM2-135M", gpu="RTX 3080 Laptop 8GB", max_prompt_length=32, max_completion_length=96,
                  gradient_accumulation_steps=2)
    by_tokens = simulate(Recipe(**fields, micro_batch_tokens=4 * 128))
    by_rows = simulate(Recipe(**fields | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}))
    assert by_tokens.peak_allocated == by_rows.peak_allocated
