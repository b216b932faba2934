"""On a real card: the prediction beside the card's own statistics. Skipped, with a reason, where there is none."""
import pytest
import torch

from grpo_lab import Recipe, measure, simulate


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"logits": "chunked"}, {"lora_rank": 8}, {"activation_checkpointing": True}])
def test_predicted_and_measured(changes):
    recipe = Recipe(model="tiny", dtype="float32", max_prompt_length=8, max_completion_length=8, **changes)
    predicted, measured = simulate(recipe, every_micro_batch=True), measure(recipe)
    assert torch.cuda.is_available()
    assert predicted.peak_allocated == pytest.approx(measured.peak_allocated, rel=0.02)
