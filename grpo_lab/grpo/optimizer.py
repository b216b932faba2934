"""The optimizer of a recipe: which one, of which copy of the weights, and when it steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .offload import to_host

Make = Callable[[list], torch.optim.Optimizer]


def make_optimizer(
    policy, recipe, *, adam_beta1: float = 0.9, adam_beta2: float = 0.999, adam_epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer | InBackward:  # fmt: skip
    """The recipe's optimizer over what the policy trains; the defaults are TRL's.

    >>> optimizer = make_optimizer(policy, Recipe(optim="adamw_torch", learning_rate=1e-5))  # doctest: +SKIP

    ValueError for an unknown `optim`; ImportError where an 8-bit one lacks bitsandbytes.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    common = {"lr": recipe.learning_rate, "weight_decay": weight_decay}
    adam = {**common, "betas": (adam_beta1, adam_beta2), "eps": adam_epsilon}
    make = _maker(recipe.optim, common, adam)
    if recipe.optimizer_in_backward:
        return InBackward(parameters, make)
    if recipe.optimizer_offload or recipe.master_weights:
        return of_copies(parameters, make, host=recipe.optimizer_offload,
                         dtype=torch.float32 if recipe.master_weights else None)  # fmt: skip
    return make(parameters)


def _maker(optim: str, common: dict, adam: dict) -> Make:
    match optim:
        case "adamw_torch":
            return lambda parameters: torch.optim.AdamW(parameters, **adam)
        case "adamw_torch_fused":
            return lambda parameters: torch.optim.AdamW(parameters, **adam, fused=True)
        case "sgd":
            return lambda parameters: torch.optim.SGD(parameters, **common)
        case "adafactor":
            from transformers import Adafactor

            return lambda parameters: Adafactor(
                parameters, **common, scale_parameter=False, relative_step=False
            )
        case "adamw_8bit" | "paged_adamw_8bit":
            return lambda parameters: _bitsandbytes(optim)(parameters, **adam)
    raise ValueError(f"optim={optim!r} is not known: use adamw_torch, adamw_torch_fused, adamw_8bit, "
                     "paged_adamw_8bit, adafactor or sgd.")  # fmt: skip


def _bitsandbytes(optim: str) -> type[torch.optim.Optimizer]:
    """Works on a CPU too; the paged one then keeps its states in ordinary memory and says so."""
    try:
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
    except ImportError as error:
        raise ImportError(f"optim={optim!r} needs bitsandbytes: install it, or use 'adamw_torch'.") from error
    return AdamW8bit if optim == "adamw_8bit" else PagedAdamW8bit


@torch.no_grad()
def of_copies(
    parameters: list, make: Make, *, host: bool = False, dtype: torch.dtype | None = None
) -> torch.optim.Optimizer:
    """An optimizer of copies of the weights: in another `dtype` (None: theirs), or in `host` memory.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> optimizer = of_copies([weight], partial(torch.optim.SGD, lr=1e-3), dtype=torch.float32)
    >>> weight.sum().backward()
    >>> weight.grad is None, optimizer.step(), weight.data          # 0.999 is too near to 1 for bfloat16 ...
    (True, None, tensor([1., 1.], dtype=torch.bfloat16))
    >>> optimizer.param_groups[0]["params"][0].data                 # ... and yet it is not lost
    tensor([0.9990, 0.9990])

    A gradient moves to its copy as soon as it is complete, and adds up there, so that none stays with the weights.
    After each step the weights take over what their copies have become. Clip the gradients of
    `optimizer.param_groups`.
    """
    copies = []
    for weight in parameters:
        copy = to_host(weight) if host else weight.clone()
        copy = torch.nn.Parameter(copy.to(dtype or weight.dtype))
        weight.register_post_accumulate_grad_hook(partial(_hand_over, copy, host))
        copies.append(copy)
    optimizer = make(copies)
    optimizer.register_step_post_hook(partial(_take_back, parameters, copies))
    return optimizer


def _hand_over(copy, host: bool, weight) -> None:
    gradient, weight.grad = weight.grad, None
    if host:
        gradient = gradient.to("cpu")  # waits: the host must not add what has not yet come
    gradient = gradient.to(copy.dtype)
    copy.grad = gradient if copy.grad is None else copy.grad.add_(gradient)


@torch.no_grad()
def _take_back(weights, copies, *_) -> None:
    for weight, copy in zip(weights, copies, strict=True):
        weight.copy_(copy)


class InBackward:
    """An optimizer for each weight, which steps when the weight's gradient is complete, and then frees it.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = InBackward([weight], partial(torch.optim.SGD, lr=0.5))
    >>> weight.sum().backward()
    >>> weight.grad, weight.data
    (None, tensor([0.5000, 0.5000]))

    No two gradients need be there at once, so there is neither accumulation over micro-batches nor clipping by the norm
    of all of them.
    """

    def __init__(self, parameters: list, make: Make) -> None:
        self.each = [make([parameter]) for parameter in parameters]
        for parameter, optimizer in zip(parameters, self.each, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_step_and_free, optimizer))

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.each for group in optimizer.param_groups]

    @property
    def state(self) -> dict:
        return {key: value for optimizer in self.each for key, value in optimizer.state.items()}

    def step(self) -> None:
        """Nothing is left to do after the backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)


def _step_and_free(optimizer, parameter) -> None:
    optimizer.step()
    parameter.grad = None
