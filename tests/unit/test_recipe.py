"""Every rule of `Recipe`, and its way to TRL and back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab._trl import NOT_IN_TRL
from grpo_lab.recipe import PRESETS, Recipe


def refused(match: str, error: type[Exception] = ValueError, **fields):
    with pytest.raises(error, match=match) as caught:
        Recipe(**fields)
    message = str(caught.value)
    assert "\n" not in message, "one sentence"
    return message


# --- the group and the generation batch ---------------------------------------------------------------------


def test_one_by_eight_is_a_generation_batch_of_eight():
    """huggingface/trl#2858: older versions refused 1 x 8 because they counted one micro-batch only."""
    recipe = Recipe(num_generations=8, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert recipe.generation_batch_size == 8


def test_generation_batch_must_hold_whole_groups():
    """huggingface/open-r1#249: 1 x 7 with 8 generations failed deep inside the trainer."""
    message = refused(
        "generation batch 7 .*is not divisible by num_generations 8",
        num_generations=8,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=7,
    )
    assert "gradient_accumulation_steps=8" in message and "num_generations=7" in message


@given(st.integers(2, 40), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_every_value_that_the_message_lists_works(group, micro, steps, as_generation_steps):
    """The way out must be one: each listed value, alone, makes the recipe valid."""
    steps_name = "steps_per_generation" if as_generation_steps else "gradient_accumulation_steps"
    fields = {"num_generations": group, "per_device_train_batch_size": micro, steps_name: steps}
    if micro * steps % group == 0:
        Recipe(**fields)
        return
    message = refused("is not divisible", **fields)
    ways = message.split("the nearest values that work: ")[1]
    listed = re.findall(r"(\w+)=([\d or]+)", ways)
    assert {name for name, _ in listed} >= {steps_name, "per_device_train_batch_size"}
    for name, values in listed:
        for value in values.split(" or "):
            assert Recipe(**{**fields, name: int(value)}).generation_batch_size


def test_a_group_needs_two_answers():
    """huggingface/trl PR 3199: with one answer the advantage is 0/0."""
    refused(
        "a group needs at least 2 answers, for the advantage is relative to the group",
        num_generations=1,
    )


# --- dtypes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["dtype", "autocast"])
def test_no_bfloat16_on_a_t4(field):
    """unslothai/unsloth#2783: bfloat16 on compute capability 7.5 failed after the model was loaded."""
    message = refused(
        r'bfloat16" needs compute capability 8.0 and T4 has 7.5',
        gpu="T4",
        **{"dtype": "float32", field: "bfloat16"},
    )
    assert 'autocast="float16"' in message
    assert Recipe(gpu="RTX 3080 Laptop 16GB", dtype="bfloat16").card.compute_capability == (8, 6)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 8}])
def test_the_way_out_of_the_bfloat16_message_is_a_valid_recipe(lora):
    message = refused("use float16 autocast there", gpu="T4", **lora)
    way_out = dict(re.findall(r'(\w+)="(\w+)"', message.split("there,")[1]))
    assert Recipe(gpu="T4", **lora, **way_out).autocast == "float16"


@pytest.mark.parametrize("dtype, autocast", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_two_16_bit_types_are_refused_together(dtype, autocast):
    """`cat` in the rotary embedding ended in "Unexpected floating ScalarType in at::autocast::prioritize"."""
    with pytest.raises(ValueError, match="16-bit type|float32"):
        Recipe(dtype=dtype, autocast=autocast, lora_rank=8, lora_dtype="float32")
    assert Recipe(dtype=dtype, autocast=dtype, lora_rank=8, lora_dtype="float32").autocast == dtype


def test_adapters_in_bfloat16_are_refused_on_a_t4_only_where_there_are_adapters():
    refused("lora_dtype=", gpu="T4", dtype="float16", lora_rank=8, lora_dtype="bfloat16")
    Recipe(gpu="T4", dtype="float32", lora_dtype="bfloat16")


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16"},
        {"autocast": "float16"},
        {"dtype": "float16", "lora_rank": 8, "lora_dtype": "float16"},
        {"dtype": "float16", "lora_rank": 8, "lora_dtype": "bfloat16"},
        {"dtype": "float32", "autocast": "float16", "lora_rank": 8, "lora_dtype": "bfloat16"},
    ],
)
def test_float16_trains_only_float32_weights(fields):
    refused("float16 trains only float32 weights", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32", "autocast": "float16"},
        {"dtype": "float16", "lora_rank": 8},
        {"dtype": "float16", "lora_rank": 8, "autocast": "float16"},
    ],
)
def test_float16_with_float32_trainable_weights_is_fine(fields):
    Recipe(**fields)


# --- combinations -------------------------------------------------------------------------------------------


def test_quantized_weights_need_an_adapter():
    refused("quantization='nf4' freezes the weights.*lora_rank", quantization="nf4")
    Recipe(quantization="nf4_double", lora_rank=8)


def test_alpha_without_a_rank_is_refused():
    refused("lora_alpha=16 has no effect without lora_rank", lora_alpha=16)


def test_offloading_checkpoints_needs_checkpoints():
    refused("activation_offload=True moves the checkpoints", activation_offload=True)
    Recipe(activation_offload=True, activation_checkpointing=True)


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("dtype", "bf16", "'bfloat16'"),
        ("dtype", "fp32", "'float32'"),
        ("autocast", "fp16", "'float16'"),
        ("quantization", "nf4double", "'nf4_double'"),
        ("optim", "adamw", "'adamw_torch'"),
        ("optim", "adamw_bnb_8bit", "'adamw_8bit'"),
        ("logits", "chunk", "'chunked'"),
        ("attn_implementation", "flash_attention_2", "'sdpa'"),
        ("loss_type", "drgrpo", "'dr_grpo'"),
        ("scale_rewards", "std", "'group'"),
        ("task", "adition", "'addition'"),
        ("gpu", "RTX 3080 Lapt 16GB", "'RTX 3080 Laptop 16GB'"),
        ("model", "Qwen2.5-1.5", "'Qwen2.5-1.5B'"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(field, value, expected):
    message = refused(re.escape(f"{field}={value!r}"), **{field: value})
    assert f"did you mean {expected}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int8"), ("optim", "zzz"), ("logits", None), ("dtype", None), ("autocast", "no")],
)
def test_a_name_like_none_lists_what_is_allowed(field, value):
    assert "is not one of" in refused(field, **{field: value})


def test_a_torch_dtype_is_told_by_its_name():
    import torch

    assert "did you mean 'bfloat16'?" in refused("dtype=torch.bfloat16", dtype=torch.bfloat16)


@pytest.mark.parametrize("loss", ["cispo", "sapo", "luspo", "vespo"])
def test_losses_of_trl_that_are_not_here_say_so(loss):
    refused(
        f"loss_type='{loss}' is TRL's but not implemented here; use one of grpo, bnpo, dr_grpo, dapo",
        loss_type=loss,
    )


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("modle", "model"),
        ("num_generation", "num_generations"),
        ("gradient_checkpointing", "activation_checkpointing"),
        ("target_modules", "lora_targets"),
        ("load_in_4bit", "quantization='nf4'"),
        ("batch_size", "per_device_train_batch_size"),
        ("bf16", "autocast='bfloat16'"),
    ],
)
def test_an_unknown_field_suggests_the_nearest(field, expected):
    message = refused(f"Recipe has no field '{field}'", TypeError, **{field: 1})
    assert expected in message
    with pytest.raises(TypeError, match=f"Recipe has no field '{field}'"):
        Recipe().replace(**{field: 1})


def test_fields_are_keywords():
    with pytest.raises(TypeError, match=r"Recipe\(model='Qwen3-8B', ...\)"):
        Recipe("Qwen3-8B")


# --- types and ranges ---------------------------------------------------------------------------------------

WHOLE = [f.name for f in dataclasses.fields(Recipe) if f.type in ("int", "int | None")]
NUMBERS = [f.name for f in dataclasses.fields(Recipe) if f.type in ("float", "float | None")]
FLAGS = [f.name for f in dataclasses.fields(Recipe) if f.type == "bool"]


def test_no_field_is_left_unchecked():
    """A field that is added must be added to the rules as well."""
    strings = {f.name for f in dataclasses.fields(Recipe)} - set(WHOLE) - set(NUMBERS) - set(FLAGS)
    for name in strings:
        with pytest.raises((TypeError, ValueError), match=name):
            Recipe(**{name: 3.5})


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", [1.5, "8", True, [8]])
def test_whole_numbers_are_whole_numbers(field, value):
    refused(f"{field}=.*must be a whole number", TypeError, **{field: value})


@pytest.mark.parametrize("field", WHOLE)
def test_whole_numbers_have_a_lowest_value(field):
    refused(f"{field}=-2", **{field: -2})


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["1e-6", True, [1.0]])
def test_numbers_are_numbers(field, value):
    refused(f"{field}=.*must be a number", TypeError, **{field: value})


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_numbers_have_a_lowest_value_and_are_finite(field, value):
    refused(f"{field}=.*must be (at least|above) 0 and finite", **{field: value})


@pytest.mark.parametrize("field", FLAGS)
def test_flags_are_true_or_false(field):
    refused(f"{field}=1 must be True or False", TypeError, **{field: 1})


def test_numbers_out_of_a_table_are_taken():
    """A loop over a pandas column gives numpy numbers; they become Python's, for the repr and for TRL."""
    import numpy as np

    recipe = Recipe(max_completion_length=np.int64(512), gpu=np.int64(8 * 2**30))
    assert type(recipe.max_completion_length) is int and recipe.card.budget == 8 * 2**30


@pytest.mark.parametrize("value", ["q_proj", [], [1], ["q_proj", ""]])
def test_lora_targets_are_module_names(value):
    with pytest.raises((TypeError, ValueError), match="lora_targets=.*all-linear"):
        Recipe(lora_rank=8, lora_targets=value)


def test_max_steps():
    refused("max_steps=0 must be at least 1, or -1", max_steps=0)
    assert Recipe(max_steps=-1) == Recipe()


@pytest.mark.parametrize("value", [16, -1, 0])
def test_a_budget_is_in_bytes(value):
    refused("a budget is counted in bytes", gpu=value)


def test_a_folder_that_is_not_there(tmp_path):
    refused("there is no such folder", FileNotFoundError, model=str(tmp_path / "none"))
    assert Recipe(model=str(tmp_path)).model == str(tmp_path)


# --- what a recipe derives ----------------------------------------------------------------------------------


def test_derived_numbers():
    recipe = Recipe(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        rollout_batch_size=5,
        max_prompt_length=100,
        max_completion_length=50,
    )
    assert (recipe.generation_batch_size, recipe.rollout_batch, recipe.sequence_length) == (16, 5, 150)
    assert Recipe().rollout_batch == Recipe().generation_batch_size == 8
    assert Recipe(rollout_batch_size=100).rollout_batch == 8, "no more than there are"


def test_the_reference_is_resident_only_in_full_training_with_a_kl_term():
    assert Recipe(beta=0.04).needs_reference
    assert not Recipe().needs_reference
    assert not Recipe(beta=0.04, lora_rank=8).needs_reference


@pytest.mark.parametrize(
    ("accumulation", "generation_steps", "iterations", "expected"),
    [(4, None, 1, False), (4, 4, 1, False), (4, 8, 1, True), (4, 2, 1, False), (4, 3, 1, True),
     (1, None, 2, True),
     (4, 2, 2, False)],
)  # fmt: skip
def test_old_log_probs_are_needed_as_in_trl(accumulation, generation_steps, iterations, expected):
    """TRL 1.16, `_generate_and_score_completions`: unless generations end with an optimizer step."""
    recipe = Recipe(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=generation_steps,
        num_iterations=iterations,
    )
    assert recipe.needs_old_logps is expected


def test_the_card_of_a_budget():
    assert Recipe(gpu=16 * 2**30).card.budget == 16 * 2**30


def test_alpha_follows_the_rank_unless_it_was_set():
    recipe = Recipe(lora_rank=8)
    assert recipe.lora_alpha == 16
    assert recipe.replace(lora_rank=32).lora_alpha == 64
    assert recipe.replace(lora_rank=None).lora_alpha is None
    assert Recipe(lora_rank=8, lora_alpha=8).replace(lora_rank=32).lora_alpha == 8


def test_targets_compare_as_sets():
    first, second = (
        Recipe(lora_rank=8, lora_targets=t) for t in (["v_proj", "q_proj"], {"q_proj", "v_proj"})
    )
    assert first == second and hash(first) == hash(second)
    assert first.lora_targets == ("q_proj", "v_proj")


def test_recipes_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().beta = 1.0


# --- presets, printing, copying -----------------------------------------------------------------------------


def test_the_baseline_is_what_the_course_starts_from():
    baseline = Recipe.preset("baseline")
    assert (baseline.model, baseline.gpu, baseline.dtype) == (
        "Qwen2.5-1.5B",
        "RTX 3080 Laptop 16GB",
        "float32",
    )
    assert (baseline.num_generations, baseline.per_device_train_batch_size) == (8, 8)
    assert (baseline.max_prompt_length, baseline.max_completion_length, baseline.beta) == (256, 1024, 0.04)
    assert (baseline.logits, baseline.optim, baseline.activation_checkpointing) == (
        "full",
        "adamw_torch_fused",
        False,
    )
    assert baseline.needs_reference


def test_presets_take_overrides_and_have_names():
    assert Recipe.preset("baseline", logits="chunked") == Recipe.preset("baseline").replace(logits="chunked")
    with pytest.raises(ValueError, match="no preset 'baselin'; did you mean 'baseline'"):
        Recipe.preset("baselin")
    laptop = Recipe.preset("laptop_16gb")
    assert laptop.lora_rank is None and laptop.dtype == "bfloat16", "every weight still trains"
    assert Recipe.preset("laptop_8gb").lora_rank


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_prints_only_what_differs_and_reads_back(name):
    recipe = Recipe.preset(name)
    assert eval(repr(recipe)) == recipe
    assert "seed" not in repr(recipe)
    assert repr(Recipe()) == "Recipe()"
    assert repr(Recipe(lora_rank=8)) == "Recipe(lora_rank=8)"
    assert repr(Recipe(lora_rank=8, lora_alpha=8)) == "Recipe(lora_rank=8, lora_alpha=8)"


def test_copies_and_pickles():
    recipe = Recipe.preset("laptop_8gb")
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))


def test_recipe_gpus_and_architectures_import_no_torch():
    """Sliders and searches make thousands of recipes; a command line must not wait for torch."""
    code = (
        "import sys; from grpo_lab.recipe import Recipe; Recipe.preset('baseline').card; "
        "from grpo_lab import models; models.architecture('Qwen3-8B').parameters; "
        "print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# --- TRL ----------------------------------------------------------------------------------------------------


def test_learning_defaults_are_trls():
    from trl import GRPOConfig

    config, recipe = GRPOConfig("out", use_cpu=True), Recipe()
    for name in ("num_generations", "num_iterations", "beta", "loss_type", "scale_rewards",
                 "epsilon", "epsilon_high", "temperature", "learning_rate", "max_steps", "seed",
                 "gradient_accumulation_steps",
                 "per_device_train_batch_size"):  # fmt: skip
        assert getattr(recipe, name) == getattr(config, name), name


def test_to_trl_makes_real_objects():
    from peft import LoraConfig
    from trl import GRPOConfig

    args, peft_config = Recipe(lora_rank=16, lora_targets=["q_proj"], autocast="bfloat16").to_trl(
        output_dir="x"
    )
    assert isinstance(args, GRPOConfig) and isinstance(peft_config, LoraConfig)
    assert (args.output_dir, args.bf16, args.fp16) == ("x", True, False)
    assert args.model_init_kwargs == {"dtype": "bfloat16", "attn_implementation": "sdpa"}
    assert (peft_config.r, peft_config.lora_alpha, peft_config.target_modules) == (16, 32, {"q_proj"})
    assert Recipe().to_trl()[1] is None
    assert Recipe().to_trl()[0].bf16 is False, "TRL's own default would switch autocast on"


def test_to_trl_switches_checkpointing_off_where_the_recipe_does():
    """TRL's default is on: leaving the argument out would silently checkpoint."""
    assert Recipe().to_trl()[0].gradient_checkpointing is False
    on = Recipe(activation_checkpointing=True).to_trl()[0]
    assert on.gradient_checkpointing is True and on.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_to_trl_quantizes():
    import torch

    args, _ = Recipe(lora_rank=8, quantization="nf4_double", autocast="bfloat16").to_trl()
    quantization = args.model_init_kwargs["quantization_config"]
    assert quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant
    assert quantization.bnb_4bit_compute_dtype == torch.bfloat16


@st.composite
def recipes(draw):
    group = draw(st.sampled_from([2, 4, 8]))
    micro, accumulation = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    generation_steps = draw(st.sampled_from([None, group, 2 * group]))
    if generation_steps is None and micro * accumulation % group:
        micro = group
    lora = draw(st.booleans())
    number = st.floats(0.001, 1.0)
    fields = {
        "model": draw(st.sampled_from(["Qwen2.5-0.5B", "Qwen/Qwen3-8B", "tiny"])),
        "gpu": draw(st.sampled_from(["RTX 4090", 8 * 2**30])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "autocast": draw(st.sampled_from([None, "bfloat16"])),
        "num_generations": group,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": generation_steps,
        "num_iterations": draw(st.integers(1, 3)),
        "max_prompt_length": draw(st.integers(1, 999)),
        "max_completion_length": draw(st.integers(1, 999)),
        "rollout_batch_size": draw(st.sampled_from([None, 3])),
        "beta": draw(st.sampled_from([0.0, 0.04])),
        "activation_checkpointing": draw(st.booleans()),
        "logits": draw(st.sampled_from(["full", "chunked"])),
        "optim": draw(st.sampled_from(["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])),
        "attn_implementation": draw(st.sampled_from(["sdpa", "eager"])),
        "loss_type": draw(st.sampled_from(["grpo", "bnpo", "dr_grpo", "dapo"])),
        "scale_rewards": draw(st.sampled_from(["group", "batch", "none", True, False])),
        "epsilon": draw(number),
        "epsilon_high": draw(st.none() | number),
        "temperature": draw(number),
        "learning_rate": draw(number),
        "max_steps": draw(st.sampled_from([-1, 10])),
        "seed": draw(st.integers(0, 99)),
    }
    if lora:
        fields |= {
            "lora_rank": draw(st.integers(1, 64)),
            "lora_alpha": draw(st.none() | st.integers(1, 64)),
            "lora_targets": draw(
                st.sampled_from(["all-linear", ("q_proj", "v_proj"), ("up_proj", "k_proj", "extra")])
            ),
            "lora_dtype": draw(st.sampled_from(["float32", "bfloat16"])),
            "quantization": draw(st.sampled_from([None, "nf4", "nf4_double"])),
        }
    return Recipe(**fields)


@given(recipes())
@settings(max_examples=40, deadline=None)
def test_to_trl_and_back(recipe):
    """What TRL and PEFT can say comes back as it was; the rest is handed over by name."""
    rest = {name: getattr(recipe, name) for name in NOT_IN_TRL}
    again = Recipe.from_trl(*recipe.to_trl(), model=recipe.model, **rest)
    # TRL fills steps_per_generation in where it is None: the same recipe, said in full.
    if recipe.steps_per_generation == recipe.gradient_accumulation_steps:
        recipe = recipe.replace(steps_per_generation=None)
    assert again == recipe


def test_fields_that_trl_lacks_are_listed_completely():
    """Changing any other field must change what TRL gets."""
    from grpo_lab._trl import SAME

    elsewhere = {"model", "dtype", "autocast", "quantization", "lora_rank", "lora_alpha", "lora_targets",
                 "steps_per_generation", "activation_checkpointing", "attn_implementation"}  # fmt: skip
    assert {f.name for f in dataclasses.fields(Recipe)} == elsewhere | set(SAME) | set(NOT_IN_TRL)


def test_from_trl_reads_a_config_made_by_hand():
    import torch
    from peft import LoraConfig
    from trl import GRPOConfig

    config = GRPOConfig(
        "out",
        use_cpu=True,
        num_generations=4,
        per_device_train_batch_size=2,
        generation_batch_size=8,
        model_init_kwargs={"dtype": torch.bfloat16},
    )
    recipe = Recipe.from_trl(
        config, LoraConfig(r=4, target_modules="all-linear"), model="Qwen3-0.6B", gpu="RTX 3090"
    )
    assert (recipe.steps_per_generation, recipe.dtype, recipe.autocast) == (4, "bfloat16", "bfloat16")
    assert (recipe.lora_rank, recipe.lora_alpha, recipe.gpu, recipe.logits) == (4, 8, "RTX 3090", "chunked")
    assert recipe.activation_checkpointing is True, "TRL's default"


def test_from_trl_knows_that_trl_loads_in_float32_unless_told():
    from trl import GRPOConfig

    config = GRPOConfig("out", use_cpu=True)
    assert Recipe.from_trl(config, model="Qwen3-0.6B").dtype == "float32"
    config = GRPOConfig("out", use_cpu=True, model_init_kwargs={"dtype": "auto"})
    assert Recipe.from_trl(config, model="Qwen3-0.6B").dtype == "bfloat16", "as its config.json says"
    with pytest.raises(ValueError, match="is the checkpoint's: pass model="):
        Recipe.from_trl(config)


def test_from_trl_refuses_what_a_recipe_cannot_say():
    from transformers import BitsAndBytesConfig
    from trl import GRPOConfig

    with pytest.raises(ValueError, match="loss_type='cispo'"):
        Recipe.from_trl(GRPOConfig("out", use_cpu=True, loss_type="cispo"))
    eight = GRPOConfig(
        "out", use_cpu=True, model_init_kwargs={"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    )
    with pytest.raises(ValueError, match="4-bit NF4 only"):
        Recipe.from_trl(eight)
