"""The rules of a `Recipe`: one function per rule, each with its own message."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import gpus, models
from ._names import FIELD_ALIASES, VALUE_ALIASES, did_you_mean

if TYPE_CHECKING:
    from .recipe import Recipe

DTYPES = ("float32", "bfloat16", "float16")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": DTYPES,
    "autocast": (None, "bfloat16", "float16"),
    "quantization": (None, "nf4", "nf4_double"),
    "lora_dtype": DTYPES,
    "logits": ("full", "chunked"),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"),
    "attn_implementation": ("sdpa", "eager"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "scale_rewards": ("group", "batch", "none"),
}
# Smallest allowed value of whole numbers; a name in OPTIONAL may also be None.
WHOLE = {
    "lora_rank": 1,
    "lora_alpha": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "max_prompt_length": 1,
    "max_completion_length": 1,
    "rollout_batch_size": 1,
    "logits_chunk_size": 1,
    "micro_batch_tokens": 1,
    "seed": 0,
}
OPTIONAL = {
    "lora_rank",
    "lora_alpha",
    "steps_per_generation",
    "rollout_batch_size",
    "epsilon_high",
    "micro_batch_tokens",
}
FLAGS = (
    "activation_checkpointing",
    "activation_offload",
    "optimizer_offload",
    "optimizer_in_backward",
    "master_weights",
    "reference_offload",
)
# (lowest, whether the lowest itself is allowed)
NUMBERS = {
    "beta": (0, True),
    "epsilon": (0, False),
    "epsilon_high": (0, False),
    "temperature": (0, False),
    "learning_rate": (0, True),
}
# Losses that TRL has and this package does not.
TRL_LOSSES = ("cispo", "sapo", "luspo", "vespo")
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check(recipe: Recipe) -> None:
    """Check every rule; the first broken one raises."""
    models.check_name(recipe.model)
    gpus.get(recipe.gpu)
    for rule in (
        _choices,
        _whole_numbers,
        _numbers,
        _flags,
        _targets,
        _divisible,
        _lora,
        _offload,
        _reference,
        _master_weights,
        _in_backward,
        _token_budget,
        _bfloat16,
        _float16,
        _two_halves,
        _task,
    ):
        rule(recipe)


def check_fields(given: Iterable[str], known: list[str]) -> None:
    """Refuse a keyword that is not a field, naming the nearest one."""
    for name in given:
        if name in known:
            continue
        if name in FIELD_ALIASES:
            raise TypeError(f"Recipe has no field {name!r}; did you mean {FIELD_ALIASES[name]}?")
        raise TypeError(f"Recipe has no field {name!r}; {did_you_mean(name, known)}")


def ordered_targets(targets: Iterable[Any]) -> tuple[Any, ...]:
    """Return module names in the order of a decoder layer, so that equal sets make equal recipes."""
    unique = list(dict.fromkeys(targets))
    return tuple(
        sorted(unique, key=lambda t: (_TARGETS.index(t) if t in _TARGETS else len(_TARGETS), str(t)))
    )


def _choices(recipe: Recipe) -> None:
    for name, allowed in CHOICES.items():
        value = getattr(recipe, name)
        if value in allowed and not isinstance(value, bool):
            continue
        if name == "loss_type" and value in TRL_LOSSES:
            raise ValueError(
                f"loss_type={value!r} is TRL's but not implemented here; use one of {', '.join(allowed)}"
            )
        listed = ", ".join(map(repr, allowed))
        meant = VALUE_ALIASES.get(str(value).lower())
        hint = (
            f"did you mean {meant!r}?" if meant in allowed else did_you_mean(value, [v for v in allowed if v])
        )
        hint = "" if hint.startswith("known") else " " + hint
        raise ValueError(f"{name}={value!r} is not one of {listed};{hint}".rstrip(";"))


def _whole_numbers(recipe: Recipe) -> None:
    for name, lowest in WHOLE.items():
        value = getattr(recipe, name)
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"{name}={value!r} must be a whole number" + (" or None" if name in OPTIONAL else "")
            )
        if name == "num_generations" and value < 2:
            raise ValueError(
                f"num_generations={value}: a group needs at least 2 answers, for the advantage is relative "
                "to the group"
            )
        if value < lowest:
            raise ValueError(
                f"{name}={value} must be at least {lowest}" + (", or None" if name in OPTIONAL else "")
            )
    if isinstance(recipe.max_steps, bool) or not isinstance(recipe.max_steps, int):
        raise TypeError(f"max_steps={recipe.max_steps!r} must be a whole number")
    if recipe.max_steps < 1 and recipe.max_steps != -1:
        raise ValueError(
            f"max_steps={recipe.max_steps} must be at least 1, or -1 to go through the prompts three times"
        )


def _numbers(recipe: Recipe) -> None:
    for name, (lowest, inclusive) in NUMBERS.items():
        value = getattr(recipe, name)
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r} must be a number" + (" or None" if name in OPTIONAL else ""))
        if not math.isfinite(value) or value < lowest or (value == lowest and not inclusive):
            raise ValueError(
                f"{name}={value!r} must be {'at least' if inclusive else 'above'} {lowest} and finite"
            )


def _flags(recipe: Recipe) -> None:
    for name in FLAGS:
        if not isinstance(getattr(recipe, name), bool):
            raise TypeError(f"{name}={getattr(recipe, name)!r} must be True or False")


def _targets(recipe: Recipe) -> None:
    targets = recipe.lora_targets
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        raise ValueError(
            f'lora_targets={targets!r} must be "all-linear" or a list of module names, such as [{targets!r}]'
        )
    if (
        not isinstance(targets, tuple)
        or not targets
        or not all(isinstance(name, str) and name for name in targets)
    ):
        raise TypeError(
            f'lora_targets={targets!r} must be "all-linear" or a list of module names, such as '
            '["q_proj", "v_proj"]'
        )


def _divisible(recipe: Recipe) -> None:
    """The generation batch holds whole groups."""
    group, micro = recipe.num_generations, recipe.per_device_train_batch_size
    steps = recipe.steps_per_generation or recipe.gradient_accumulation_steps
    batch = micro * steps
    if batch % group == 0:
        return
    steps_name = "steps_per_generation" if recipe.steps_per_generation else "gradient_accumulation_steps"
    ways = [
        f"{steps_name}={_listed(_multiples(steps, group // math.gcd(group, micro)))}",
        f"per_device_train_batch_size={_listed(_multiples(micro, group // math.gcd(group, steps)))}",
    ]
    divisors = [d for d in range(2, min(batch, 4 * group) + 1) if batch % d == 0]
    if divisors:
        nearest = sorted(divisors, key=lambda d: abs(d - group))[:2]
        ways.append(f"num_generations={_listed(sorted(nearest))}")
    raise ValueError(
        f"generation batch {batch} (per_device_train_batch_size {micro} x {steps_name} {steps}) is not "
        f"divisible by num_generations {group}; the nearest values that work: {'; '.join(ways)} (change one)"
    )


def _multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` just below and above `value`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _listed(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _lora(recipe: Recipe) -> None:
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


def _offload(recipe: Recipe) -> None:
    if recipe.activation_offload and not recipe.activation_checkpointing:
        raise ValueError(
            "activation_offload=True moves the checkpoints of activation_checkpointing to the host: set "
            "activation_checkpointing=True as well"
        )


def _reference(recipe: Recipe) -> None:
    if recipe.reference_offload and not recipe.needs_reference:
        why = "an adapter, switched off, is the reference" if recipe.lora_rank else "beta=0 needs no reference"
        raise ValueError(
            f"reference_offload=True has nothing to move, for {why}: set reference_offload=False"
            + ("" if recipe.lora_rank else ", or beta above 0")
        )


def _master_weights(recipe: Recipe) -> None:
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


def _in_backward(recipe: Recipe) -> None:
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


def _token_budget(recipe: Recipe) -> None:
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


def _bfloat16(recipe: Recipe) -> None:
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


def _float16(recipe: Recipe) -> None:
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


def _two_halves(recipe: Recipe) -> None:
    """PyTorch's autocast fails where it meets the other 16-bit type (`prioritize` in ATen/autocast_mode.h)."""
    if "float32" not in (recipe.dtype, recipe.autocast) and recipe.autocast not in (None, recipe.dtype):
        raise ValueError(
            f'autocast="{recipe.autocast}" cannot run over dtype="{recipe.dtype}", the other 16-bit type: set '
            f'autocast="{recipe.dtype}" or None, or dtype="float32"'
        )


def _task(recipe: Recipe) -> None:
    from . import tasks

    if not isinstance(recipe.task, str):
        raise TypeError(f"task={recipe.task!r} must be the name of a task: {', '.join(tasks.names())}")
    if recipe.task not in tasks.names():
        raise ValueError(f"task={recipe.task!r} does not exist; {did_you_mean(recipe.task, tasks.names())}")
