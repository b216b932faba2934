"""From a loaded model to something that trains: adapters, checkpointing, the optimizer.

Works on real weights and on the meta device alike, for nothing here reads a value. (Fake weights under a LoRA
adapter are made on the meta device first: PEFT moves its layers, and fake ones can't be moved.)
"""

from __future__ import annotations

import warnings

import torch

NOT_YET = {  # field: (the value that is available, what to use instead)
    "activation_offload": (False, "activation_checkpointing alone, which recomputes"),
    "optimizer_offload": (False, "optim='adafactor' or 'adamw_8bit', whose states are smaller"),
}


def prepare(model, recipe):
    """The policy to train: the model, or the model under a LoRA adapter; checkpointing as the recipe says.

    >>> policy = prepare(model, recipe)                                           # doctest: +SKIP

    NotImplementedError for a field that this version can't carry out: the two offloads.
    """
    for name, (available, instead) in NOT_YET.items():
        if (value := getattr(recipe, name)) != available:
            raise NotImplementedError(f"{name}={value!r} is not available in this version: leave {name} at "
                                      f"{available!r} and use {instead}.")  # fmt: skip
    policy = model.requires_grad_(True) if recipe.lora_rank is None else add_lora(model, recipe)
    if recipe.activation_checkpointing:
        # transformers also makes the embeddings' output require gradients, which frozen weights under an
        # adapter need only with reentrant checkpoints
        model.activation_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def add_lora(model, recipe):
    """The model under a LoRA adapter of the recipe's rank, alpha, targets and dtype; the rest is frozen.

    >>> add_lora(model, Recipe(lora_rank=16)).print_trainable_parameters()        # doctest: +SKIP
    """
    from peft import LoraConfig, get_peft_model

    targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else list(recipe.lora_targets)
    config = LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
                        target_modules=targets, task_type="CAUSAL_LM")  # fmt: skip
    dtype = getattr(torch, recipe.lora_dtype)
    with warnings.catch_warnings():  # PEFT reads an attribute under a name that transformers has deprecated
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        policy = get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)
    # PEFT knows the weights' dtype and float32. For another one a new parameter takes the old one's place.
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad and parameter.dtype != dtype:
                module.register_parameter(name, torch.nn.Parameter(parameter.detach().to(dtype)))
    return policy


def make_optimizer(
    policy, recipe, *, adam_beta1: float = 0.9, adam_beta2: float = 0.999, adam_epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:  # fmt: skip
    """The recipe's optimizer over what the policy trains; the defaults are TRL's.

    >>> optimizer = make_optimizer(policy, Recipe(optim="adamw_torch", learning_rate=1e-5))  # doctest: +SKIP

    ValueError for an unknown `optim`; ImportError where an 8-bit one lacks bitsandbytes.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    common = {"lr": recipe.learning_rate, "weight_decay": weight_decay}
    adam = {**common, "betas": (adam_beta1, adam_beta2), "eps": adam_epsilon}
    match recipe.optim:
        case "adamw_torch":
            return torch.optim.AdamW(parameters, **adam)
        case "adamw_torch_fused":
            return torch.optim.AdamW(parameters, **adam, fused=True)
        case "sgd":
            return torch.optim.SGD(parameters, **common)
        case "adafactor":
            from transformers import Adafactor

            return Adafactor(parameters, **common, scale_parameter=False, relative_step=False)
        case "adamw_8bit" | "paged_adamw_8bit":
            return _bitsandbytes(recipe.optim)(parameters, **adam)
    raise ValueError(f"optim={recipe.optim!r} is not known: use adamw_torch, adamw_torch_fused, adamw_8bit, "
                     "paged_adamw_8bit, adafactor or sgd.")  # fmt: skip


def _bitsandbytes(optim: str) -> type[torch.optim.Optimizer]:
    """Works on a CPU too; the paged one then keeps its states in ordinary memory and says so."""
    try:
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
    except ImportError as error:
        raise ImportError(f"optim={optim!r} needs bitsandbytes: install it, or use 'adamw_torch'.") from error
    return AdamW8bit if optim == "adamw_8bit" else PagedAdamW8bit
