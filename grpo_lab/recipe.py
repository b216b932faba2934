"""Every choice that decides memory or learning, in one validated, immutable object."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _rules, gpus
from ._names import did_you_mean

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl import GRPOConfig

# What the presets have in common: the same prompts, answers and groups, so that their bytes compare.
_COURSE = {
    "model": "Qwen2.5-1.5B",
    "num_generations": 8,
    "max_prompt_length": 256,
    "max_completion_length": 1024,
}
_FITTED = {
    "dtype": "bfloat16",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "logits": "chunked",
    "logits_chunk_size": 256,
    "activation_checkpointing": True,
    "rollout_batch_size": 4,
}
PRESETS: dict[str, dict[str, Any]] = {
    # What one writes first: everything in float32, the whole group in one batch, a reference model.
    "baseline": {
        **_COURSE,
        "gpu": "RTX 3080 Laptop 16GB",
        "dtype": "float32",
        "per_device_train_batch_size": 8,
        "beta": 0.04,
        "logits": "full",
        "optim": "adamw_torch_fused",  # transformers' default
    },
    # Every weight still trains.
    "laptop_16gb": {**_COURSE, **_FITTED, "gpu": "RTX 3080 Laptop 16GB", "optim": "adamw_torch_fused"},
    # Half the card: adapters instead, whose gradients and states are small.
    "laptop_8gb": {
        **_COURSE,
        **_FITTED,
        "gpu": "RTX 3080 Laptop 8GB",
        "optim": "adamw_torch_fused",
        "lora_rank": 16,
    },
    # The tiny model learns additions in about a minute on two cores: 450 batches of 64 problems x 8 answers,
    # two updates a batch. Train it with TRAIN_KEYWORDS["tiny"] as well.
    "tiny": {
        "model": "tiny",
        "task": "addition",
        "dtype": "float32",
        "num_generations": 8,
        "per_device_train_batch_size": 256,
        "steps_per_generation": 2,
        "max_prompt_length": 8,
        "max_completion_length": 3,  # two digits and the end token
        "loss_type": "dr_grpo",  # a constant denominator
        "learning_rate": 1e-3,
        "max_steps": 900,
    },
}
# What belongs to a preset and is no field: `train(Recipe.preset("tiny"), **TRAIN_KEYWORDS["tiny"])`.
TRAIN_KEYWORDS: dict[str, dict[str, Any]] = {
    "tiny": {
        "adam_beta2": 0.99,
        "final_lr_fraction": 0.05,  # the learning rate falls linearly to this share
        "skip_flat_groups": True,
        "share_prefill": True,
    },
}


@dataclass(frozen=True, repr=False, kw_only=True)
class Recipe:
    """A GRPO run on one card, as a set of choices.

    >>> recipe = Recipe(model="Qwen2.5-0.5B", num_generations=4)
    >>> recipe
    Recipe(model='Qwen2.5-0.5B', num_generations=4)
    >>> recipe.replace(per_device_train_batch_size=2, gradient_accumulation_steps=4).generation_batch_size
    8

    Names are those of TRL's `GRPOConfig`, PEFT's `LoraConfig` and transformers where these have one. Lengths
    are tokens, sizes are bytes. The values are checked together when a Recipe is made: a wrong one raises
    ValueError (TypeError for a wrong type or an unknown field) that says what is allowed.
    """

    model: str = "Qwen2.5-1.5B"
    """A bundled architecture, "tiny", "SmolLM2-135M", a local folder, or a hub id (`models.names()`)."""
    gpu: str | int = "RTX 3080 Laptop 16GB"
    """A card (`gpus.names()`), or a budget in bytes."""
    dtype: str = "bfloat16"
    """Of the weights: float32, bfloat16 or float16."""
    autocast: str | None = None
    """Mixed precision: None, bfloat16 or float16 (with a gradient scaler)."""
    quantization: str | None = None
    """Frozen 4-bit weights of the linear layers: None, "nf4" or "nf4_double". Needs LoRA."""
    lora_rank: int | None = None
    """None trains every weight."""
    lora_alpha: int | None = None
    """Scale of the adapters; None takes 2 x lora_rank."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """"all-linear", or names of modules."""
    lora_dtype: str = "float32"
    """Of the adapters."""
    num_generations: int = 8
    """Answers per prompt (G), at least 2."""
    per_device_train_batch_size: int = 8
    """Completions in one forward and backward: the micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    steps_per_generation: int | None = None
    """Micro-batches that one generation fills; None takes gradient_accumulation_steps."""
    num_iterations: int = 1
    """Optimizer passes over one generation batch (mu in the paper)."""
    max_prompt_length: int = 256
    max_completion_length: int = 256
    rollout_batch_size: int | None = None
    """Sequences generated at once; None generates the whole generation batch, as TRL does."""
    beta: float = 0.0
    """KL coefficient. Above 0, full training keeps a reference model."""
    reference_offload: bool = False
    """Keep the reference model's layers in host memory but for the one that runs."""
    activation_checkpointing: bool = False
    activation_offload: bool = False
    """Keep the checkpoints in host memory; needs activation_checkpointing."""
    micro_batch_tokens: int | None = None
    """Pack micro-batches to this many tokens with padding, longest first, instead of counting rows."""
    logits: str = "full"
    """"full" materializes them; "chunked" recomputes them `logits_chunk_size` tokens at a time."""
    logits_chunk_size: int = 1024
    optim: str = "adamw_torch"
    """By transformers' names."""
    optimizer_offload: bool = False
    """Keep the optimizer's states, and the weights that it updates, in host memory; gradients go there, too."""
    optimizer_in_backward: bool = False
    """Step each weight when its gradient is complete, then free it: no accumulation, no clipping."""
    master_weights: bool = False
    """Update a float32 copy of 16-bit weights."""
    attn_implementation: str = "sdpa"
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """Upper clipping bound; None takes epsilon."""
    temperature: float = 1.0
    learning_rate: float = 1e-6
    max_steps: int = -1
    """Optimizer steps; -1 goes through the prompts three times, as TRL does."""
    seed: int = 42
    task: str = "addition"

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        for name in _rules.WHOLE:  # numpy's whole numbers, as a table gives them, become Python's
            value = getattr(self, name)
            if hasattr(value, "__index__") and not isinstance(value, (bool, int)):
                put(name, operator.index(value))
        if isinstance(self.scale_rewards, bool):  # TRL's older spelling
            put("scale_rewards", "group" if self.scale_rewards else "none")
        if isinstance(self.lora_targets, (list, set, frozenset, tuple)):
            put("lora_targets", _rules.ordered_targets(self.lora_targets))
        if self.lora_alpha is None and isinstance(self.lora_rank, int):
            put("lora_alpha", 2 * self.lora_rank)
        _rules.check(self)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changes().items())})"

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from their default.

        >>> Recipe(beta=0.04).changes()
        {'beta': 0.04}
        """
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        if self.lora_rank is not None and self.lora_alpha == 2 * self.lora_rank:
            changed.pop("lora_alpha", None)
        return changed

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some fields changed, checked again as a whole.

        >>> Recipe(lora_rank=8).replace(lora_rank=16).lora_alpha         # follows the rank unless it was set
        32
        """
        if "lora_rank" in changes and "lora_alpha" not in changes:
            if changes["lora_rank"] is None or self.lora_alpha == 2 * (self.lora_rank or 0):
                changes["lora_alpha"] = None
        current = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Recipe(**{**current, **changes})

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Recipe:
        """Return a named recipe of the course: "baseline", "laptop_16gb", "laptop_8gb" or "tiny".

        >>> Recipe.preset("baseline", logits="chunked").max_completion_length
        1024
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; {did_you_mean(name, PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def card(self) -> gpus.Card:
        """The card, or a stand-in with this budget.

        >>> Recipe(gpu=8 * 2**30).card.budget
        8589934592
        """
        return gpus.get(self.gpu)

    @property
    def generation_batch_size(self) -> int:
        """Completions of one generation: per_device_train_batch_size x steps_per_generation."""
        return self.per_device_train_batch_size * (
            self.steps_per_generation or self.gradient_accumulation_steps
        )

    @property
    def rollout_batch(self) -> int:
        """Sequences that are generated at once."""
        return min(self.rollout_batch_size or self.generation_batch_size, self.generation_batch_size)

    @property
    def micro_batch_rows(self) -> int:
        """Full-length sequences in one forward and backward.

        >>> Recipe(micro_batch_tokens=2048).micro_batch_rows       # of 256 + 256 tokens
        4
        """
        if self.micro_batch_tokens is None:
            return self.per_device_train_batch_size
        return max(1, self.micro_batch_tokens // self.sequence_length)

    @property
    def sequence_length(self) -> int:
        """Tokens of a full prompt and a full completion."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def needs_reference(self) -> bool:
        """Whether a second, frozen model is resident. An adapter, switched off, leaves the reference."""
        return self.beta > 0 and self.lora_rank is None

    @property
    def needs_old_logps(self) -> bool:
        """Whether log-probs are computed once before the updates, because some update will not see the model
        that generated.

        >>> Recipe(num_iterations=2).needs_old_logps, Recipe().needs_old_logps
        (True, False)

        TRL's rule: so unless every generation lies within one optimizer step.
        """
        generate_every = (self.steps_per_generation or self.gradient_accumulation_steps) * self.num_iterations
        return self.gradient_accumulation_steps % generate_every != 0

    def to_trl(self, **overrides: Any) -> tuple[GRPOConfig, LoraConfig | None]:
        """Return the `trl.GRPOConfig` and `peft.LoraConfig` (None without LoRA) of this recipe.

        >>> args, peft_config = Recipe(lora_rank=16).to_trl()            # doctest: +SKIP
        >>> args.num_generations, peft_config.r                          # doctest: +SKIP
        (8, 16)

        overrides: further arguments of `GRPOConfig`, such as `output_dir`. On a machine without CUDA the
        configuration asks for the CPU. TRL has no names for `gpu`, `task`, `max_prompt_length`,
        `rollout_batch_size`, `logits` (TRL 1.16 always chunks them) and the offloads, and PEFT has none for
        `lora_dtype`.
        """
        from . import _trl

        return _trl.to_trl(self, overrides)

    @classmethod
    def from_trl(
        cls,
        config: GRPOConfig,
        peft_config: LoraConfig | None = None,
        model: str | None = None,
        **fields: Any,
    ) -> Recipe:
        """Return the recipe that a `trl.GRPOConfig` and a `peft.LoraConfig` describe.

        >>> Recipe.from_trl(GRPOConfig("out", num_generations=4), model="Qwen3-0.6B")      # doctest: +SKIP

        fields: what TRL has no name for, such as `gpu` and `max_prompt_length`; they take precedence.
        """
        from . import _trl

        return cls(**{**_trl.from_trl(config, peft_config, model), **fields})


def _keywords_only(init: Any) -> Any:
    """Name the nearest field where a keyword is unknown: Python's own message names none."""

    @functools.wraps(init)
    def __init__(self: Recipe, *args: Any, **fields: Any) -> None:
        if args:
            raise TypeError(f"Recipe takes keywords only: Recipe(model={args[0]!r}, ...)")
        _rules.check_fields(fields, [f.name for f in dataclasses.fields(Recipe)])
        init(self, **fields)

    return __init__


Recipe.__init__ = _keywords_only(Recipe.__init__)  # type: ignore[method-assign]
