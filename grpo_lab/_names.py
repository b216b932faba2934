"""Nearest known names, for error messages that say what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Names that other libraries use for a field or a value.
FIELD_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "bf16": "autocast='bfloat16'",
    "fp16": "autocast='float16'",
    "r": "lora_rank",
    "target_modules": "lora_targets",
    "load_in_4bit": "quantization='nf4'",
    "G": "num_generations",
    "group_size": "num_generations",
    "batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "micro_batch_size": "per_device_train_batch_size",
    "torch_dtype": "dtype",
    "lr": "learning_rate",
    "mu": "num_iterations",
    "kl_coef": "beta",
    "max_seq_length": "max_completion_length",
    "card": "gpu",
    "max_new_tokens": "max_completion_length",
    "generation_batch_size": "steps_per_generation",
    "model_name": "model",
    "model_name_or_path": "model",
    "device": "gpu",
    "lora_r": "lora_rank",
}
VALUE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "4bit": "nf4",
    "nf4double": "nf4_double",
    "adamw_bnb_8bit": "adamw_8bit",
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "flash_attention_2": "sdpa",
    "fa2": "sdpa",
    "flash": "sdpa",
    "std": "group",
}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest(name: object, known: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` known names that look like `name`, best first.

    >>> nearest("qwen2.5 1.5b", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "TinyLlama-1.1B"], n=1)
    ['Qwen2.5-1.5B']
    >>> nearest("zzz", ["beta", "gpu"])
    []

    Case and punctuation do not count.
    """
    by_key: dict[str, str] = {}
    for candidate in known:
        by_key.setdefault(_key(candidate), candidate)
    found = difflib.get_close_matches(_key(str(name)), by_key, n=n, cutoff=0.55)
    return [by_key[key] for key in found]


def did_you_mean(name: object, known: Iterable[str], n: int = 3) -> str:
    """Return `" (did you mean 'a' or 'b'?)"`, or the whole list where nothing is near.

    >>> did_you_mean("bfloat", ["float32", "bfloat16"], n=1)
    "did you mean 'bfloat16'?"
    >>> did_you_mean("zzz", ["beta", "gpu"])
    'known: beta, gpu'
    """
    known = list(known)
    found = nearest(name, known, n)
    if not found:
        return "known: " + ", ".join(known)
    return "did you mean " + " or ".join(repr(candidate) for candidate in found) + "?"
