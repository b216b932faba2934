"""The changes that `advise` may propose, in the order in which it tries them: what each does, saves nothing of, and costs.

>>> from grpo_lab.recipe import Recipe
>>> next(iter(steps(Recipe(optim="adamw_torch")))).fields
{'logits': 'chunked', 'logits_chunk_size': 256}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import models
from .recipe import Recipe

# What each kind of change costs the run; kinds come in this order.
KINDS = ("free", "time", "precision", "optimizer", "adapters", "task")
SHORTEST = 64  # tokens: shorter completions are not proposed
SMALLER_HEAD = 256  # tokens a chunk of logits
# Where there is no bfloat16: frozen weights in float16 under float32 adapters, for these alone need a gradient scaler.
_FLOAT16: dict[str, Any] = {"dtype": "float16", "autocast": "float16", "lora_dtype": "float32"}
_FLOAT16_TRL = 'GRPOConfig(fp16=True, model_init_kwargs={"dtype": "float16"})'


@dataclass(frozen=True)
class Change:
    """Fields to replace, and what a person should know before doing so."""

    fields: dict[str, Any]
    kind: str
    what: str
    cost: str
    trl: str
    why: str
    keep: bool = False  # costs nothing: stays, even where it turns out not to be needed

    @property
    def changes_learning(self) -> bool:
        return "changes learning" in self.cost or self.changes_task

    @property
    def changes_task(self) -> bool:
        return self.kind == "task"


def steps(recipe: Recipe) -> Iterator[Change]:
    """Every change that still can be made to ``recipe``, one of each sort, in order."""
    for rung in RUNGS:
        if (change := rung(recipe)) is not None:
            yield change


# ---- free ---------------------------------------------------------------------------------------------------------


def forgotten_dtype(recipe: Recipe) -> Change | None:
    """4-bit weights multiply in `dtype`, and transformers' default for that is float32."""
    if recipe.quantization is None or recipe.dtype != "float32" or recipe.autocast is not None:
        return None
    half = "bfloat16" if recipe.card.bf16 else "float16"
    fields: dict[str, Any] = {"dtype": half}
    trl = f'GRPOConfig(model_init_kwargs={{"dtype": "{half}"}})'
    if half == "float16":
        fields, trl = _FLOAT16, _FLOAT16_TRL
    return Change(fields, "free", f"{half} around the 4-bit weights",
                  "less time on tensor cores; the 4-bit weights are rounded far more coarsely",
                  f'{trl}, BitsAndBytesConfig(bnb_4bit_compute_dtype="{half}")',
                  "where nothing is set, 4-bit weights are unpacked to float32 and activations are float32", keep=True)


def _chunked_logits(recipe: Recipe) -> Change | None:
    if recipe.logits == "chunked" and recipe.logits_chunk_size <= SMALLER_HEAD:
        return None
    arch = models.architecture(recipe.model)
    more = 1 + arch.vocab_size * arch.hidden_size / (3 * arch.parameters)
    return Change({"logits": "chunked", "logits_chunk_size": SMALLER_HEAD}, "free", "chunked logits",
                  f"time x {more:.2f} at most (the head's product is made again in the backward: counted in products)",
                  "nothing to set: TRL 1.16 chunks them always", "same log-probs, and nothing else changes", keep=True)


def _no_reference(recipe: Recipe) -> Change | None:
    if not recipe.needs_reference:
        return None
    return Change({"beta": 0.0}, "free", "no reference model (beta=0)",
                  "no time; changes learning: no pull towards the first model (TRL's default, as in DAPO and Dr. GRPO)",
                  "GRPOConfig(beta=0.0)", "a second model's weights go; an adapter would give the reference for free")  # fmt: skip


def _rollout_chunks(recipe: Recipe) -> Change | None:
    if recipe.rollout_batch == 1:
        return None
    rows = recipe.rollout_batch // 2
    return Change({"rollout_batch_size": rows}, "free", f"{rows} sequences generated at once",
                  f"rollout time x {-(-recipe.generation_batch_size // rows)} at most, against all at once (a decoding "
                  "step reads all weights, whatever the batch)",
                  "no such field: TRL generates the whole batch; lower steps_per_generation or use vLLM",
                  "the same samples, a smaller KV cache")  # fmt: skip


def _smaller_micro_batch(recipe: Recipe) -> Change | None:
    """Half the micro-batch (a third, if it is odd), as many times more: the same completions in each optimizer step."""
    size = recipe.per_device_train_batch_size
    if size == 1:
        return None
    parts = next((n for n in range(2, int(size**0.5) + 1) if size % n == 0), size)
    fields = {"per_device_train_batch_size": size // parts,
              "gradient_accumulation_steps": parts * recipe.gradient_accumulation_steps}  # fmt: skip
    if recipe.steps_per_generation is not None:
        fields["steps_per_generation"] = parts * recipe.steps_per_generation
    trl = ", ".join(f"{name}={value}" for name, value in fields.items())
    return Change(fields, "free",
                  f"micro-batches of {size // parts}, accumulated {fields['gradient_accumulation_steps']} times",
                  "no time where a micro-batch still fills the card", f"GRPOConfig({trl})",
                  "the same completions in each optimizer step, and the same gradient")  # fmt: skip


def _fused(recipe: Recipe) -> Change | None:
    if recipe.optim != "adamw_torch":
        return None
    return Change({"optim": "adamw_torch_fused"}, "free", "fused AdamW", "no time (one kernel instead of a dozen)",
                  'GRPOConfig(optim="adamw_torch_fused")', "the same update without temporaries of the weights' size",
                  keep=True)  # fmt: skip


# ---- time ---------------------------------------------------------------------------------------------------------


def _checkpointing(recipe: Recipe) -> Change | None:
    if recipe.activation_checkpointing:
        return None
    return Change({"activation_checkpointing": True}, "time", "activation checkpointing",
                  "training time x 1.33: a second forward beside one forward and a backward of two (Chen et al. 2016, "
                  "arXiv:1604.06174)",
                  "GRPOConfig(gradient_checkpointing=True)", "the same numbers, computed again instead of kept")  # fmt: skip


def _checkpoint_offload(recipe: Recipe) -> Change | None:
    if not recipe.activation_checkpointing or recipe.activation_offload:
        return None
    arch, tokens = models.architecture(recipe.model), recipe.micro_batch_rows * recipe.sequence_length
    bytes_ = arch.num_hidden_layers * tokens * arch.hidden_size * (4 if recipe.dtype == "float32" else 2)
    return Change({"activation_offload": True}, "time", "checkpoints in host memory",
                  f"time: {bytes_ / 2**30:.2f} GiB cross the bus and come back in each micro-batch, beside the computation",
                  "no field that works in TRL 1.16: grpo_lab.grpo.offload.offload_checkpoints(model) (notebook 06)",
                  "the same numbers; two layers' inputs stay on the card")  # fmt: skip


# ---- precision ----------------------------------------------------------------------------------------------------


def _sixteen_bits(recipe: Recipe) -> Change | None:
    if recipe.dtype != "float32":
        return None
    if recipe.card.bf16:
        fields: dict[str, Any] = {"dtype": "bfloat16", "autocast": None}
        return Change(fields, "precision", "bfloat16 weights and activations",
                      "less time on tensor cores; changes learning: updates below 1/256 of a weight are rounded away"
                      + ("" if recipe.lora_rank is None else " (of the frozen weights only: adapters stay as they are)"),
                      'GRPOConfig(model_init_kwargs={"dtype": "bfloat16"})',
                      "half of everything that training keeps")  # fmt: skip
    if recipe.lora_rank is not None:
        fields, what, trl = _FLOAT16, "float16 weights under float32 adapters", _FLOAT16_TRL
    elif recipe.autocast is None:
        fields, what, trl = {"autocast": "float16"}, "float16 autocast over float32 weights", "GRPOConfig(fp16=True)"
    else:
        return None
    return Change(fields, "precision", what, "less time on tensor cores; changes learning little: a gradient scaler guards "
                  "against underflow", trl, f"{recipe.card.name} has no bfloat16")  # fmt: skip


# ---- optimizer ----------------------------------------------------------------------------------------------------


def _small_states(recipe: Recipe) -> Change | None:
    if recipe.optim in ("adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor"):
        return None
    return Change({"optim": "adamw_8bit"}, "optimizer", "8-bit optimizer states",
                  "about the same time; changes learning little: states in blocks of 256 with a scale each (Dettmers et "
                  "al. 2022, arXiv:2110.02861)",
                  'GRPOConfig(optim="adamw_8bit")', "a quarter of AdamW's states in float32, half of those in 16 bits")  # fmt: skip


def _paged_states(recipe: Recipe) -> Change | None:
    if recipe.optim != "adamw_8bit":
        return None
    return Change({"optim": "paged_adamw_8bit"}, "optimizer", "paged 8-bit optimizer states",
                  "time: the states cross the bus at each optimizer step; changes learning little, as above",
                  'GRPOConfig(optim="paged_adamw_8bit")',
                  "the states lie in managed memory, outside PyTorch's")  # fmt: skip


def _host_optimizer(recipe: Recipe) -> Change | None:
    if recipe.optimizer_offload or recipe.optimizer_in_backward or recipe.lora_rank is not None:
        return None
    weights, number = models.architecture(recipe.model).parameters, 4 if recipe.dtype == "float32" else 2
    states = {"adamw_torch": 2, "adamw_torch_fused": 2, "adamw_8bit": 2 / number, "paged_adamw_8bit": 2 / number}
    host = weights * number * (2 + states.get(recipe.optim, 0))
    return Change({"optimizer_offload": True}, "optimizer", "the optimizer in host memory",
                  f"time: {weights * number / 2**30:.1f} GiB of gradients cross the bus in each micro-batch, the weights come "
                  f"back at each step, and the host's cores do the step; about {host / 2**30:.0f} GiB of host memory",
                  "no such field: DeepSpeed's ZeRO-Offload (GRPOConfig(deepspeed=...)) does the same",
                  "the same update; neither gradients nor states stay on the card")  # fmt: skip


# ---- adapters -----------------------------------------------------------------------------------------------------


def _lora(recipe: Recipe) -> Change | None:
    if recipe.lora_rank is not None:
        return None
    fields: dict[str, Any] = {"lora_rank": 16}
    what, trl = "LoRA of rank 16 on all linear layers", 'LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")'
    if recipe.dtype == "float32" and not recipe.card.bf16:  # nothing trains in them any more: 16 bits will do
        fields |= _FLOAT16
        what, trl = what + ", over float16 weights", f"{trl}, {_FLOAT16_TRL}"
    return Change(fields, "adapters", what,
                  "about the same time; changes learning: updates of low rank, with a learning rate some ten times as "
                  "high (Hu et al. 2021, arXiv:2106.09685; Schulman et al. 2025, LoRA Without Regret)", trl,
                  "gradients and optimizer states of 1 % of the weights; the reference model is free")  # fmt: skip


def _nf4(recipe: Recipe) -> Change | None:
    if recipe.lora_rank is None or recipe.quantization is not None:
        return None
    return Change({"quantization": "nf4"}, "adapters", "frozen weights in 4 bits (NF4)",
                  "time: each weight is unpacked for each product; changes learning: weights are rounded (Dettmers et al. "
                  "2023, arXiv:2305.14314)",
                  'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
                  "a quarter of the frozen weights' bytes")  # fmt: skip


# ---- the task -----------------------------------------------------------------------------------------------------


def _shorter(recipe: Recipe) -> Change | None:
    length = recipe.max_completion_length // 2
    if length < SHORTEST:
        return None
    return Change({"max_completion_length": length}, "task", f"completions of {length:,} tokens",
                  "changes the task: longer answers are cut off and usually earn nothing",
                  f"GRPOConfig(max_completion_length={length})", "another problem than the one you asked about")  # fmt: skip


def _fewer(recipe: Recipe) -> Change | None:
    group = recipe.num_generations // 2
    if group < 4 or recipe.generation_batch_size % group:
        return None
    return Change({"num_generations": group}, "task", f"{group} answers a prompt",
                  "changes the task: a noisier advantage in each group", f"GRPOConfig(num_generations={group})",
                  "another problem than the one you asked about")  # fmt: skip


def _smaller_model(recipe: Recipe) -> Change | None:
    here = models.architecture(recipe.model)
    known = {name: models.architecture(name) for name in models.names() if name != "tiny"}
    smaller = [name for name, arch in known.items()
               if arch.model_type == here.model_type and arch.parameters < 0.9 * here.parameters]  # fmt: skip
    if not smaller:
        return None
    name = max(smaller, key=lambda name: known[name].parameters)
    return Change({"model": name}, "task", f"the model {name}", "changes the task: another model",
                  f'GRPOTrainer(model="{known[name].hub_id or name}")', "another problem than the one you asked about")  # fmt: skip


FREE = (forgotten_dtype, _chunked_logits, _fused, _smaller_micro_batch)  # change neither learning nor, much, the time
Rung = Callable[[Recipe], "Change | None"]
RUNGS: tuple[Rung, ...] = (
    *FREE, _no_reference, _rollout_chunks, _checkpointing, _checkpoint_offload, _sixteen_bits,
    _small_states, _paged_states, _host_optimizer, _lora, _nf4, _shorter, _fewer, _smaller_model,
)  # fmt: skip


def joined(first: Change, second: Change) -> Change:
    """Two steps of one rung, one after the other, as one change: the second's words, from where the first began."""
    return replace(second, fields=first.fields | second.fields)
