"""GRPO in plain PyTorch, to be read and lifted out: nothing here knows of memory accounting.

>>> from grpo_lab.grpo.rollout import generate                                 # sampling, KV cache
>>> from grpo_lab.grpo.loss import group_advantages, token_logps, policy_loss  # the arithmetic
>>> from grpo_lab.grpo.step import Samples, score, update, step                # one generation batch
>>> from grpo_lab.grpo.setup import prepare                                    # adapters, checkpointing
>>> from grpo_lab.grpo.optimizer import make_optimizer                         # which, of what, when and where
>>> from grpo_lab.grpo.train import train, evaluate                            # the loop

`grpo.step` and `grpo.train` are these modules, not the functions of the same name in them.
"""

from . import loss, optimizer, rollout, setup, step, train
from .loss import group_advantages, policy_loss, token_logps
from .optimizer import make_optimizer
from .rollout import encode_prompts, generate, generation_mode
from .setup import prepare
from .step import Samples, score, update
from .train import evaluate

__all__ = [
    "Samples", "encode_prompts", "evaluate", "generate", "generation_mode", "group_advantages", "loss",
    "make_optimizer", "optimizer", "policy_loss", "prepare", "rollout", "score", "setup", "step", "token_logps", "train",
    "update",
]  # fmt: skip
