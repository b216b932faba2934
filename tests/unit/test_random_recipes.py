"""The law of the instrument: what is simulated is what a real run does, to the byte, whatever the recipe."""
import warnings

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_lab import Recipe, measure, simulate


@st.composite
def recipes(draw):
    """Recipes of the tiny model: over dtypes, adapters, quantization, recomputation, losses, optimizers, batches."""
    lora = draw(st.sampled_from([None, 2, 4]))
    generations = draw(st.sampled_from([2, 4]))
    accumulation = draw(st.sampled_from([1, 2]))
    return Recipe(
        model="tiny", dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        autocast=draw(st.sampled_from([None, "bfloat16"])),
        quantization=draw(st.sampled_from([None, "nf4", "nf4_double"])) if lora else None,
        lora_rank=lora, num_generations=generations,
        per_device_train_batch_size=generations * draw(st.sampled_from([1, 2])), gradient_accumulation_steps=accumulation,
        num_iterations=draw(st.sampled_from([1, 2])), max_prompt_length=draw(st.integers(2, 12)),
        max_completion_length=draw(st.integers(2, 9)), beta=draw(st.sampled_from([0.0, 0.04])),
        activation_checkpointing=draw(st.booleans()), logits=draw(st.sampled_from(["full", "chunked"])),
        logits_chunk_size=draw(st.sampled_from([8, 64])), attn_implementation=draw(st.sampled_from(["sdpa", "eager"])),
        optim=draw(st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "adafactor", "sgd"])),
        loss_type=draw(st.sampled_from(["grpo", "bnpo", "dr_grpo", "dapo"])))


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes())
def test_simulated_and_measured_agree_to_the_byte(recipe):
    """Every phase's peak, and the owners of the highest; the real step on real tensors, the simulated on none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = measure(recipe)
        simulated = simulate(recipe, kernels="cpu", every_micro_batch=True)
    shared = measured.phases.index
    assert simulated.phases.loc[shared, "peak_allocated"].to_dict() == measured.phases["peak_allocated"].to_dict()
    assert simulated.categories["bytes"].to_dict() == measured.categories["bytes"].to_dict()
