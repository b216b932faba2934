"""Which values of a `Recipe` go together: one function per rule, each with its own message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import gpus

if TYPE_CHECKING:
    from .recipe import Recipe


def lora(recipe: Recipe) -> None:
    if recipe.lora_rank is not None:
        return
    if recipe.quantization is not None:
        raise ValueError(
            f"quantization={recipe.quantization!r} freezes the weights, so there is nothing to train: set "
            "lora_rank (16, say), or quantization=None"
        )
    if recipe.lora_alpha is not None:
        raise ValueError(
            f"lora_alpha={recipe.lora_alpha} has no effect without lora_rank: set lora_rank, or "
            "lora_alpha=None"
        )


def offload(recipe: Recipe) -> None:
    if recipe.activation_offload and not recipe.activation_checkpointing:
        raise ValueError(
            "activation_offload=True moves the checkpoints of activation_checkpointing to the host: set "
            "activation_checkpointing=True as well"
        )


def reference(recipe: Recipe) -> None:
    if recipe.reference_offload and not recipe.needs_reference:
        why = "an adapter, switched off, is the reference" if recipe.lora_rank else "beta=0 needs no reference"
        raise ValueError(
            f"reference_offload=True has nothing to move, for {why}: set reference_offload=False"
            + ("" if recipe.lora_rank else ", or beta above 0")
        )


def master_weights(recipe: Recipe) -> None:
    if not recipe.master_weights:
        return
    if recipe.lora_rank is not None:
        raise ValueError(
            "master_weights=True copies weights that train in 16 bits, and with lora_rank only adapters "
            f'train, in lora_dtype="{recipe.lora_dtype}": set master_weights=False'
        )
    if recipe.dtype == "float32":
        raise ValueError(
            'master_weights=True adds nothing to dtype="float32": set dtype="bfloat16", or '
            "master_weights=False"
        )


def in_backward(recipe: Recipe) -> None:
    if not recipe.optimizer_in_backward:
        return
    if recipe.gradient_accumulation_steps > 1:
        raise ValueError(
            "optimizer_in_backward=True frees each gradient at once, so nothing can add up over "
            f"gradient_accumulation_steps={recipe.gradient_accumulation_steps}: set that to 1, or use "
            "optimizer_offload=True, which adds up on the host"
        )
    for name in ("optimizer_offload", "master_weights"):
        if getattr(recipe, name):
            raise ValueError(
                f"optimizer_in_backward=True and {name}=True exclude each other: one steps in the backward, "
                "the other hands the gradients over there"
            )
    if "float16" in (recipe.dtype, recipe.autocast):
        raise ValueError(
            "optimizer_in_backward=True steps before a float16 gradient scaler could look for overflows: use "
            "bfloat16"
        )


def token_budget(recipe: Recipe) -> None:
    tokens = recipe.micro_batch_tokens
    if tokens is None:
        return
    if tokens < recipe.sequence_length:
        raise ValueError(
            f"micro_batch_tokens={tokens} must hold one sequence of max_prompt_length + "
            f"max_completion_length = {recipe.sequence_length} tokens"
        )
    if recipe.loss_type == "bnpo":
        raise ValueError(
            'micro_batch_tokens changes what loss_type="bnpo" divides by, the tokens of a micro-batch: use '
            '"dapo", "grpo" or "dr_grpo"'
        )


def bfloat16(recipe: Recipe) -> None:
    card = gpus.get(recipe.gpu)
    if card.bf16:
        return
    for name in ("dtype", "autocast", *(["lora_dtype"] if recipe.lora_rank else [])):
        if getattr(recipe, name) == "bfloat16":
            major, minor = card.compute_capability
            weights = 'dtype="float16", lora_dtype="float32"' if recipe.lora_rank else 'dtype="float32"'
            raise ValueError(
                f'{name}="bfloat16" needs compute capability 8.0 and {card.name} has {major}.{minor}: use '
                f'float16 autocast there, {weights}, autocast="float16"'
            )


def float16(recipe: Recipe) -> None:
    """Gradients in float16 under- and overflow; the scaler against it needs float32 trainable weights."""
    field = "dtype" if recipe.lora_rank is None else "lora_dtype"
    trainable = getattr(recipe, field)
    used = [f'{name}="float16"' for name in ("dtype", "autocast") if getattr(recipe, name) == "float16"]
    if trainable == "float16" or (used and trainable != "float32"):
        raise ValueError(
            f"{field}={trainable!r}{' with ' + used[0] if used and trainable != 'float16' else ''}: float16 "
            f'trains only float32 weights (a gradient scaler cannot work otherwise); set {field}="float32", '
            'autocast="float16", or use bfloat16'
        )


def two_halves(recipe: Recipe) -> None:
    """PyTorch's autocast fails where it meets the other 16-bit type (`prioritize` in ATen/autocast_mode.h)."""
    if "float32" not in (recipe.dtype, recipe.autocast) and recipe.autocast not in (None, recipe.dtype):
        raise ValueError(
            f'autocast="{recipe.autocast}" cannot run over dtype="{recipe.dtype}", the other 16-bit type: set '
            f'autocast="{recipe.dtype}" or None, or dtype="float32"'
        )


TOGETHER = (
    lora,
    offload,
    reference,
    master_weights,
    in_backward,
    token_budget,
    bfloat16,
    float16,
    two_halves,
)
