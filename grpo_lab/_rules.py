"""The rules of a `Recipe`: one function per rule, each with its own message. What goes together: `_combinations`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import gpus, models
from ._combinations import TOGETHER
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
    for rule in (_choices, _whole_numbers, _numbers, _flags, _targets, _divisible, *TOGETHER, _task):
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


def _task(recipe: Recipe) -> None:
    from . import tasks

    if not isinstance(recipe.task, str):
        raise TypeError(f"task={recipe.task!r} must be the name of a task: {', '.join(tasks.names())}")
    if recipe.task not in tasks.names():
        raise ValueError(f"task={recipe.task!r} does not exist; {did_you_mean(recipe.task, tasks.names())}")
