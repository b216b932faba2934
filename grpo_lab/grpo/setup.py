"""From a loaded model to something that trains: adapters, checkpointing.

Works on real weights and on the meta device alike, for nothing here reads a value. (Fake weights under a LoRA
adapter are made on the meta device first: PEFT moves its layers, and fake ones can't be moved.)
"""

from __future__ import annotations

import warnings

import torch

from .offload import offload_checkpoints


def prepare(model, recipe):
    """The policy to train: the model, or the model under a LoRA adapter; checkpointing as the recipe says.

    >>> policy = prepare(model, recipe)                                           # doctest: +SKIP
    """
    policy = model.requires_grad_(True) if recipe.lora_rank is None else add_lora(model, recipe)
    if recipe.activation_checkpointing:
        # transformers also makes the embeddings' output require gradients, which frozen weights under an
        # adapter need only with reentrant checkpoints
        model.activation_checkpointing_enable({"use_reentrant": False})
        if recipe.activation_offload:
            offload_checkpoints(model)
    elif getattr(model, "is_activation_checkpointing", False):  # from an earlier recipe
        model.activation_checkpointing_disable()
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
