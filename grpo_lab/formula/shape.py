"""A recipe's numbers under short names, and what stays on the card from step to step.

>>> from grpo_lab.recipe import Recipe
>>> s = Shape(Recipe(model="Qwen2.5-0.5B"))
>>> s.B, s.T, s.V, s.w
(8, 512, 151936, 2)
"""

from __future__ import annotations

from functools import cached_property

from .. import models
from .tape import Term

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
MiB = 2**20


class Shape:
    """B completions a micro-batch, T tokens each, C of them completion; bytes of a number: w of a weight, a of a
    product's result, x of a product's input, t of what is trained, u of what the optimizer updates."""

    def __init__(self, recipe) -> None:
        arch = self.arch = models.architecture(recipe.model)
        self.recipe, self.lora, self.nf4 = recipe, recipe.lora_rank is not None, recipe.quantization is not None
        window = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
        self.B, self.T = min(recipe.micro_batch_rows, window), recipe.sequence_length
        self.P, self.C = recipe.max_prompt_length, recipe.max_completion_length
        self.L, self.V, self.h = arch.num_hidden_layers, arch.vocab_size, arch.hidden_size
        self.I, self.heads, self.D = arch.intermediate_size, arch.num_attention_heads, arch.head_dim
        self.q, self.kv = self.heads * self.D, arch.num_key_value_heads * self.D
        self.w = SIZES[recipe.dtype]
        self.a = SIZES[recipe.autocast or recipe.dtype]
        self.cast = self.a != self.w  # autocast makes 16-bit copies of float32 weights and inputs
        self.r = self.rank = recipe.lora_rank or 0
        self.t = SIZES[recipe.lora_dtype] if self.lora else self.w
        self.accumulates = window > self.B
        self.host = recipe.optimizer_offload
        self.master = recipe.master_weights and not self.host  # float32 copies on the card
        self.u = 4 if self.master else self.t
        self.leaving = self.host or recipe.optimizer_in_backward  # gradients don't stay
        self.masked = recipe.max_prompt_length > 1  # one row a micro-batch is padded
        self.eager = recipe.attn_implementation == "eager"
        self.capability = recipe.card.compute_capability
        h, i = self.h, self.I
        self.linears = {"q_proj": (h, self.q), "k_proj": (h, self.kv), "v_proj": (h, self.kv), "o_proj": (self.q, h),
                        "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}  # fmt: skip
        chosen = recipe.lora_targets
        adapted = {name for name in self.linears if chosen == "all-linear" or name in chosen}
        self.targets = adapted if self.lora else set()

    @cached_property
    def trained(self) -> int:
        """Numbers that the optimizer updates."""
        if not self.lora:
            return self.arch.parameters
        return self.L * self.rank * sum(sum(self.linears[name]) for name in self.targets)

    @property
    def largest(self) -> int:
        """Numbers of the largest trained tensor."""
        return self.rank * max(max(self.linears[name]) for name in self.targets) if self.lora else self.V * self.h

    @property
    def cached(self) -> tuple[int, int]:
        """Bytes of a cached key, which the rotary embedding brings to the weights' dtype, and of a cached value."""
        return self.w, self.w if self.nf4 else self.a

    @property
    def added_apart(self) -> bool:
        """Whether the embedding's and the tied head's gradients are added into a third tensor."""
        return self.arch.tie_word_embeddings and self.recipe.logits == "full" and not self.lora

    @property
    def head_gradient(self) -> tuple[int, int, int]:
        return self.V, self.h, self.w


def tensors(s: Shape) -> list[tuple[str, tuple[int, ...], int]]:
    """The model's: what, shape, how many. Small ones are taken together, number by number."""
    arch = s.arch
    found = [(f"{name}'s weights", shape, s.L) for name, shape in s.linears.items()]
    found.append(("embedding", (s.V, s.h), 1))
    if not arch.tie_word_embeddings:
        found.append(("head", (s.V, s.h), 1))
    return [*found, ("norms and biases", (), arch.norm_parameters + arch.bias_parameters)]


def of_each(category: str, what: str, s: Shape, size: int, times: int = 1) -> list[Term]:
    """Terms of the trained tensors' shapes: their gradients, or ``times`` optimizer states of each."""
    if s.lora:
        return [Term(category, what.format("adapters"), (size,), times * s.trained)]
    return [Term(category, what.format(name), (*shape, size), times * count) for name, shape, count in tensors(s)]


def weights(s: Shape, category: str = "parameters") -> list[Term]:
    """The model, as `from_pretrained` brings it."""
    if not s.nf4:
        return [Term(category, name, (*shape, s.w), count) for name, shape, count in tensors(s)]
    # bitsandbytes' quantize_4bit: two weights a byte, a scale for each 64 of them; all are cut from one large block
    linear, rest = s.arch.linear_parameters, s.arch.parameters - s.arch.linear_parameters
    terms = [Term(category, "4-bit weights", (1,), linear // 2), Term(category, "other weights", (s.w,), rest)]
    if s.recipe.quantization == "nf4":
        return [*terms, Term(category, "scales of 64 weights", (4,), linear // 64)]
    # the scales in 8 bits, and a scale for each 256 of them
    return [*terms, Term(category, "scales of 64 weights", (1,), linear // 64),
            Term(category, "scales of 256 scales", (4,), linear // 64 // 256)]  # fmt: skip


def reference(s: Shape) -> list[Term]:
    return weights(s, "reference model") if s.recipe.needs_reference else []


def copies(s: Shape) -> list[Term]:
    """Of the weights, in float32, for the optimizer (grpo/optimizer.py)."""
    return of_each("parameters", "float32 copy of {}", s, 4) if s.master else []


def adapters(s: Shape) -> list[Term]:
    return [Term("parameters", "adapters", (s.t,), s.trained)] if s.lora else []


def workspaces(s: Shape) -> list[Term]:
    """cuBLAS's, one for each of two threads (memory/cuda_kernels.py), and that of the epilogue which adds a bias."""
    terms = [Term("workspace", "cuBLAS", (32 * MiB if s.capability[0] in (9, 10, 12) else 8_519_680,), 2)]
    return [*terms, Term("workspace", "cuBLASLt", (MiB,), 2)] if s.arch.attention_bias and not s.nf4 else terms


def states(s: Shape) -> list[Term]:
    """What `optimizer.state` holds after a first step."""
    optim, n, category = s.recipe.optim, s.trained, "optimizer state"
    if s.host:
        return []
    if optim in ("adamw_torch", "adamw_torch_fused"):
        return of_each(category, "exp_avg and exp_avg_sq of {}", s, s.u, 2)
    if optim == "adamw_8bit":  # a byte each and a scale for 256 (bitsandbytes/optim/optimizer.py)
        scales = Term(category, "their scales", (4,), 2 * (n // 256))
        return [*of_each(category, "8-bit states of {}", s, 1, 2), scales]
    if optim == "adafactor":  # a row and a column of each matrix, in float32
        rows = s.L * sum(sum(s.linears[name]) for name in s.targets or s.linears)
        return [Term(category, "rows and columns", (4,), rows + (0 if s.lora else s.V + s.h))]
    return []  # sgd without momentum has none; paged states lie outside the allocator


def gradients(s: Shape) -> list[Term]:
    """What waits for the optimizer."""
    return [] if s.leaving else of_each("gradients", "of {}", s, s.u)


def stepping(s: Shape) -> list[Term]:
    """The optimizer's temporaries; where it steps in the backward, with the largest weight's gradient."""
    if s.host:
        return []
    alone = s.recipe.optimizer_in_backward
    waiting = [Term("gradients", "of the largest weight", (s.largest, s.t))] if alone else []
    if s.recipe.optim == "adamw_torch":  # _multi_tensor_adam: exp_avg_sq_sqrt of all its tensors at once
        roots = "roots of exp_avg_sq of {}"
        of_largest = [Term("temporaries", roots.format("the largest weight"), (s.largest, s.t))]
        return waiting + of_largest if alone else of_each("temporaries", roots, s, s.u)
    if s.recipe.optim == "adafactor":  # transformers' step: the gradient squared and the update; 16 bits become 32
        times = 2 if s.u == 4 else 4
        return [*waiting, Term("temporaries", "the update of the largest weight", (s.largest, 4), times)]
    return waiting
