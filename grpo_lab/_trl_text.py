"""The lines that make TRL and PEFT do what a recipe says, as text: without importing either.

>>> from grpo_lab.recipe import Recipe
>>> print(trl_lines(Recipe(lora_rank=16)).splitlines()[-1])
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules='all-linear', task_type="CAUSAL_LM")
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from ._trl import NOT_IN_TRL, SAME
from .recipe import Recipe


def trl_lines(recipe: Recipe) -> str:
    """Python that builds the `GRPOConfig` and `LoraConfig` of ``recipe.to_trl()``, ready to copy."""
    kept, checkpointing = _kept_elsewhere(recipe), _checkpointing()
    head, init = ["from trl import GRPOConfig"], f'"dtype": "{recipe.dtype}", '
    init += f'"attn_implementation": "{recipe.attn_implementation}"'
    if recipe.lora_rank is not None:
        head.insert(0, "from peft import LoraConfig")
    before = []
    if recipe.quantization is not None:
        head = ["import torch", *head, "from transformers import BitsAndBytesConfig"]
        before = ["nf4 = BitsAndBytesConfig(", '    load_in_4bit=True, bnb_4bit_quant_type="nf4",',
                  f"    bnb_4bit_use_double_quant={recipe.quantization == 'nf4_double'},",
                  f"    bnb_4bit_compute_dtype=torch.{recipe.autocast or recipe.dtype},", ")"]  # fmt: skip
        init += ', "quantization_config": nf4'
    fields = {name: getattr(recipe, name) for name in SAME} | {
        "steps_per_generation": recipe.steps_per_generation, "bf16": recipe.autocast == "bfloat16",
        "fp16": recipe.autocast == "float16", checkpointing: recipe.activation_checkpointing,
    }  # fmt: skip
    body = [f"    {name}={value!r}," for name, value in fields.items() if value is not None]
    body += [f'    {checkpointing}_kwargs={{"use_reentrant": False}},', f"    model_init_kwargs={{{init}}},"]
    after = []
    if recipe.lora_rank is not None:
        targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else list(recipe.lora_targets)
        after = [f"peft_config = LoraConfig(r={recipe.lora_rank}, lora_alpha={recipe.lora_alpha}, "
                 f'target_modules={targets!r}, task_type="CAUSAL_LM")']  # fmt: skip
    body = ["args = GRPOConfig(", '    output_dir="grpo_lab_runs",', *body, ")"]
    return "\n".join([*head, "", *kept, *before, *body, *after])


def _kept_elsewhere(recipe: Recipe) -> list[str]:
    """Comments on what counts in the estimate and has no place in TRL's configuration."""
    lines = [f"# for {recipe.model!r}; TRL cuts no prompts: keep yours within {recipe.max_prompt_length:,} tokens"]
    if recipe.rollout_batch < recipe.generation_batch_size:
        lines.append(f"# TRL generates {recipe.generation_batch_size} sequences at once, not {recipe.rollout_batch}")
    ours = [name for name in NOT_IN_TRL if name.startswith(("optimizer_", "micro_", "master_", "reference_", "activation_"))]
    if names := [name for name in ours if getattr(recipe, name)]:
        lines.append(f"# of grpo_lab alone: {', '.join(names)}")
    if recipe.logits == "full":
        lines.append("# TRL computes the logits in chunks: it needs less than was estimated for full ones")
    return lines


@functools.cache
def _checkpointing() -> str:
    """The argument's name in the transformers that is installed, read from its text: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    source = Path(spec.origin).with_name("training_args.py") if spec and spec.origin else None
    text = source.read_text(encoding="utf-8") if source and source.is_file() else ""
    if not text or "\n    activation_checkpointing:" in text:
        return "activation_checkpointing"
    return "gradient_checkpointing"
