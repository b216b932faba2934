"""A `Recipe` as TRL's and PEFT's configurations, and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl import GRPOConfig

    from .recipe import Recipe

# Same name, same meaning in GRPOConfig.
SAME = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "max_completion_length",
    "beta",
    "optim",
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "temperature",
    "learning_rate",
    "max_steps",
    "seed",
)
# Fields that neither configuration can say: TRL 1.16 has no prompt limit and always computes log-probs in
# chunks, PEFT takes the adapter's dtype elsewhere, and the rest is ours.
NOT_IN_TRL = (
    "gpu",
    "task",
    "max_prompt_length",
    "rollout_batch_size",
    "logits",
    "logits_chunk_size",
    "lora_dtype",
    "micro_batch_tokens",
    "activation_offload",  # transformers' `offload` fails in TRL 1.16, which hands it on to torch's checkpoint
    "optimizer_offload",
    "optimizer_in_backward",
    "master_weights",
    "reference_offload",
)


def _checkpointing() -> str:
    """The argument's name: later releases of transformers 5 renamed gradient_checkpointing."""
    from trl import GRPOConfig

    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def to_trl(recipe: Recipe, overrides: dict[str, Any]) -> tuple[GRPOConfig, LoraConfig | None]:
    import torch
    from trl import GRPOConfig

    arguments = {name: getattr(recipe, name) for name in SAME}
    arguments |= {
        "output_dir": "grpo_lab_runs",
        "steps_per_generation": recipe.steps_per_generation,
        "bf16": recipe.autocast == "bfloat16",
        "fp16": recipe.autocast == "float16",
        _checkpointing(): recipe.activation_checkpointing,
        f"{_checkpointing()}_kwargs": {"use_reentrant": False},
        "model_init_kwargs": model_init_kwargs(recipe),
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
    }
    config = GRPOConfig(**{**arguments, **overrides})
    if recipe.lora_rank is None:
        return config, None
    from peft import LoraConfig

    targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else list(recipe.lora_targets)
    return config, LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def model_init_kwargs(recipe: Recipe) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"dtype": recipe.dtype, "attn_implementation": recipe.attn_implementation}
    if recipe.quantization is not None:
        import torch
        from transformers import BitsAndBytesConfig

        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=recipe.quantization == "nf4_double",
            bnb_4bit_compute_dtype=getattr(torch, recipe.autocast or recipe.dtype),
        )
    return kwargs


def from_trl(config: GRPOConfig, peft_config: LoraConfig | None, model: str | None) -> dict[str, Any]:
    """Return the fields of a `Recipe` that the configurations determine."""
    init = dict(config.model_init_kwargs or {})
    fields = {name: _plain(getattr(config, name)) for name in SAME}
    fields |= {
        "steps_per_generation": config.steps_per_generation,
        "autocast": "bfloat16" if config.bf16 else "float16" if config.fp16 else None,
        "activation_checkpointing": bool(getattr(config, _checkpointing())),
        "logits": "chunked",  # what TRL 1.16 does
        "quantization": _quantization(init.get("quantization_config")),
        "attn_implementation": init.get("attn_implementation", "sdpa"),
    }
    if config.steps_per_generation == config.gradient_accumulation_steps:
        fields["steps_per_generation"] = None
    if model is not None:
        fields["model"] = model
    fields["dtype"] = _dtype(init.get("dtype", "float32"), model)
    if peft_config is not None:
        targets = peft_config.target_modules
        fields |= {
            "lora_rank": peft_config.r,
            "lora_alpha": peft_config.lora_alpha,
            "lora_targets": targets if isinstance(targets, str) else tuple(targets or ()),
            # PEFT keeps adapters in float32; TRL casts those of a quantized model to bfloat16.
            "lora_dtype": "bfloat16" if fields["quantization"] else "float32",
        }
    return fields


def _plain(value: Any) -> Any:
    """An enumeration of transformers (the optimizer's name) as its string."""
    return getattr(value, "value", value)


def _dtype(dtype: Any, model: str | None) -> str:
    """A dtype as a string; "auto" is the checkpoint's."""
    name = str(dtype).removeprefix("torch.")
    if name in ("auto", "None"):
        if model is None:
            raise ValueError(
                'model_init_kwargs["dtype"]="auto" is the checkpoint\'s: pass model=, or dtype="bfloat16"'
            )
        from . import models

        facts = models.architecture(model).config
        name = str(facts.get("dtype") or facts.get("torch_dtype") or "float32").removeprefix("torch.")
    return name


def _quantization(config: Any) -> str | None:
    if config is None:
        return None
    get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
    if not get("load_in_4bit") or get("bnb_4bit_quant_type") != "nf4":
        raise ValueError(
            "quantization_config: a Recipe knows 4-bit NF4 only; use BitsAndBytesConfig(load_in_4bit=True, "
            'bnb_4bit_quant_type="nf4")'
        )
    return "nf4_double" if get("bnb_4bit_use_double_quant") else "nf4"
