"""Problems that people had, by where they reported them: what the recipe, the instrument or the advice says today.

Those whose answer is an error message's are in test_diagnosis.py, a recipe's refusal in test_recipe.py, training's
warnings in test_train.py, sampling under checkpointing in test_rollout.py.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

from grpo_lab import Recipe, VirtualGPU, advise, estimate, simulate, track
from grpo_lab._ladder import FREE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-0.5B", "SmolLM2-360M"])
def test_logits_are_seen_to_dominate_and_are_the_first_thing_to_change(model):
    """huggingface/trl#3678: a 0.6B model went from 8 to 20 GB in a step; a small model's vocabulary isn't small."""
    recipe = Recipe(model=model, gpu="A100 80GB", activation_checkpointing=True, max_prompt_length=256,
                    max_completion_length=512, lora_rank=16)
    assert simulate(recipe).categories.index[0] == "logits"
    tight = recipe.replace(gpu=int(estimate(recipe).peak_reserved * 0.8))
    assert advise(tight, verify=False).changes["change"].iloc[0] == "chunked logits"


@pytest.mark.parametrize("micro", [2, 8])
def test_one_copy_of_the_logits_is_the_largest_tensor_of_the_peak(micro):
    """huggingface/trl#3678, with its lengths: 2 x 256 x 151,936 in float32 are 311 MB, and one position more is computed.
    Where activations are kept, they are more in all, but no single one of them comes near."""
    recipe = Recipe(model="Qwen3-0.6B", gpu=20 * 2**30, max_prompt_length=256, max_completion_length=256, lora_rank=16,
                    autocast="bfloat16", per_device_train_batch_size=micro, gradient_accumulation_steps=8 // micro)
    terms = [term for term in estimate(recipe).moments["forward"].terms if term.category != "parameters"]
    largest = max(terms, key=lambda term: term.bytes // term.count)
    assert largest.category == "logits" and largest.bytes // largest.count == micro * 257 * 151_936 * 4
    assert advise(recipe, verify=False).free[0].change.what == "chunked logits"


@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "Qwen3-0.6B"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_group_that_fits_in_one_loss_is_told_what_micro_batches_would_save(model, size):
    """huggingface/trl#2709, with its lengths: the peak was the optimizer's, two micro-batches of 2 took more than one of
    4 (the first one's gradients stay), and nothing was said of micro-batches of 1."""
    recipe = Recipe(model=model, num_generations=size, per_device_train_batch_size=size, max_prompt_length=200,
                    max_completion_length=200, gpu="RTX 3080 Laptop 16GB" if size == 4 else "RTX 3090")
    found = advise(recipe, verify=False)
    assert found.taken == ()
    (micro,) = [taken for taken in found.free if "micro-batches" in taken.change.what]
    assert micro.change.fields["per_device_train_batch_size"] == 1
    assert micro.change.fields["gradient_accumulation_steps"] == size
    assert micro.before > micro.after and "saves" in micro.effect and micro.change.what in found.text


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_whole_group_in_one_loss_becomes_micro_batches_of_the_same_update(size):
    """huggingface/trl#2709: the group of 4 was one micro-batch, and sharding and checkpointing were tried instead."""
    recipe = Recipe(model="Qwen2.5-1.5B", dtype="float32", num_generations=size, per_device_train_batch_size=size,
                    max_prompt_length=200, max_completion_length=1024, gpu="A100 80GB", logits="chunked",
                    logits_chunk_size=256, optim="adamw_torch_fused")
    one = recipe.replace(per_device_train_batch_size=1, gradient_accumulation_steps=size)
    assert one.generation_batch_size == recipe.generation_batch_size
    budget = int((estimate(one).peak_reserved + estimate(recipe).peak_reserved) / 2)
    found = advise(recipe.replace(gpu=budget), verify=False)
    (taken,) = [taken for taken in found.taken if "micro-batches" in taken.change.what]
    assert taken.before > taken.after and "the same gradient" in taken.change.why
    assert "GRPOConfig(per_device_train_batch_size=" in taken.change.trl
    assert found.recipe.per_device_train_batch_size * found.recipe.gradient_accumulation_steps == size


def test_what_nvidia_smi_shows_is_kept_apart_from_what_tensors_take():
    """huggingface/trl#3163: "the same memory for any length", read off nvidia-smi, which shows what was once reserved."""
    short, long = (simulate(Recipe(model="SmolLM2-135M", gpu="A100 80GB", max_completion_length=n)) for n in (64, 512))
    assert short.peak_allocated < long.peak_allocated
    for report in (short, long):
        assert report.nvidia_smi == report.peak_reserved + report.context > report.peak_reserved > report.peak_allocated
    with VirtualGPU("T4") as gpu:                               # the longer input first: nothing falls
        for length in (512, 64):
            torch.zeros(length, 2**20)
            shown = gpu.ledger.allocator.reserved
    assert shown == gpu.report().peak_reserved and gpu.ledger.allocated == 0


@pytest.mark.parametrize("size, group", [(8, 4), (6, 3), (12, 4), (32, 32)])
def test_no_proposal_breaks_a_group(size, group):
    """huggingface/trl#3842: an automatic batch finder halved to a size that the group doesn't divide."""
    recipe = Recipe(model="Qwen3-8B", gpu="RTX 3080 Laptop 16GB", num_generations=group, per_device_train_batch_size=size)
    found = advise(recipe, verify=False)
    assert found.recipe.generation_batch_size % found.recipe.num_generations == 0
    for rung in FREE:
        if (change := rung(recipe)) is not None:
            recipe.replace(**change.fields)                     # raises where it breaks one


def test_a_batch_of_one_stays_one_and_all_four_batches_are_named():
    """unslothai/unsloth#3572: a batch of 1 silently became 32."""
    recipe = Recipe(model="Qwen3-4B", num_generations=32, per_device_train_batch_size=1, gradient_accumulation_steps=32,
                    quantization="nf4", lora_rank=16)
    text = advise(recipe, verify=False).text
    assert "micro-batch 1, accumulation 32, generation batch 32, rollout batch 32" in text
    assert recipe.per_device_train_batch_size == 1


def test_one_by_eight_and_eight_by_one_differ_in_training_and_not_in_rollout():
    """unslothai/unsloth#1796: what is the difference? Both update on 8 completions."""
    whole = Recipe(model="Qwen2.5-3B", per_device_train_batch_size=8)
    parts = Recipe(model="Qwen2.5-3B", per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert whole.generation_batch_size == parts.generation_batch_size == 8
    assert estimate(whole).moments["rollout"].bytes == estimate(parts).moments["rollout"].bytes
    assert estimate(whole).moments["forward"].bytes > estimate(parts).moments["forward"].bytes


@pytest.mark.parametrize("leaks", [False, True])
def test_a_leak_is_told_from_longer_rollouts(leaks):
    """rasbt/reasoning-from-scratch PR 122: 70 GB after 5000 steps. A leak raises what is left after each step; longer
    rollouts raise the peaks alone."""
    kept, left, peaks = [], [], []
    with track(existing=False) as memory:
        for step in range(6):
            with memory.phase(f"step {step}"):
                rollout = torch.zeros(1000 * (step + 1), 64)
                loss = (rollout * 2).sum()
                kept += [loss] if not leaks else [loss, rollout]
                del rollout, loss
            left.append(memory.ledger.allocated)
    peaks = memory.report().phases["peak_allocated"]
    assert peaks.is_monotonic_increasing and peaks.iloc[-1] > 3 * peaks.iloc[0]
    assert (left[-1] > 50 * 1000 * 64) == leaks


def test_what_preparing_for_k_bit_training_costs_is_shown_by_name():
    """huggingface/peft#3265: about 1 GB more; norms, embeddings and head become float32."""
    with VirtualGPU("RTX 3080 Laptop 8GB", enforce=False) as gpu:
        model = gpu.load("Mistral-7B", dtype="bfloat16", quantization="nf4")
        before = gpu.ledger.allocated
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        more = gpu.ledger.allocated - before
        get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
    assert more == pytest.approx(2 * vocabulary * hidden * 2, rel=0.02)         # embedding and head: 2 bytes more each
    top = gpu.report().top(6, by=["module", "op"])
    assert {"embed_tokens", "lm_head"} & {str(name).rsplit(".", 1)[-1] for name in top["module"]}


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-7B"])
@pytest.mark.parametrize("gpu, half", [("4060 Ti 16GB", "bfloat16"), ("T4", "float16")])
def test_float32_around_4_bit_weights_is_the_first_thing_to_change(model, gpu, half):
    """unslothai/unsloth#944: out of memory on 16 GB with 4-bit weights; nothing was set, and nothing set is float32."""
    recipe = Recipe(model=model, gpu=gpu, quantization="nf4", lora_rank=16, dtype="float32")
    found = advise(recipe, verify=False)
    first = found.taken[0].change
    assert first.fields["dtype"] == half and "nothing is set" in first.why
    assert (found.recipe.autocast or found.recipe.dtype) == half and found.recipe.lora_dtype == "float32"


def test_the_simulated_batch_is_the_longest_that_can_come():
    """unslothai/unsloth#1624: out of memory at step 120, when the first completion reached the limit."""
    recipe = Recipe(model="SmolLM2-135M", gpu="A100 80GB", max_completion_length=384, max_prompt_length=128)
    found = estimate(recipe)
    (inputs, *_) = [t.factors for t in found.moments["forward"].terms if t.what == "norm's float32 input"]
    assert inputs[0] == recipe.per_device_train_batch_size * (384 + 128)
    assert simulate(recipe).peak_allocated == pytest.approx(found.peak_allocated, rel=0.02)
