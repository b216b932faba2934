"""One GRPO step on a generation batch: score it, then update the policy once or several times.

Where this departs from GRPO as published (Shao et al. 2024, arXiv:2402.03300, algorithm 1), TRL does too:
- one round: the reference stays the initial model, and no reward model is trained along;
- rewards are for whole answers; their group's standard deviation gets 1e-4 added, or isn't divided by at all;
- a `loss_type` other than "grpo" drops the paper's mean over each answer's own tokens (its 1/|o|);
- beta is 0 by default, and then there is neither a reference nor a KL term; where there is one, it is
  multiplied by the ratio, which makes its gradient that of the reverse KL;
- the upper clip may be wider (`epsilon_high`);
- where a generation batch feeds a single update, the old log-probs are the current ones and aren't computed.

Where it departs from TRL 1.16's `GRPOTrainer`:
- `logits="full"` makes the logits, as TRL did until 1.15; 1.16 fuses the output layer: "chunked" is near it;
- one process, text only, a ratio for each token; no vLLM, tools, entropy bonus or masking of cut-off answers;
- `steps_per_generation` is a multiple of `gradient_accumulation_steps`, so that no update spans two
  generation batches;
- a prompt longer than `max_prompt_length` is refused, where TRL 1.x has no limit.

Loss and gradients are TRL's own on the same batch: tests/unit/test_equals_trl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .batches import token_batches
from .loss import loss_metrics, policy_loss, token_logps

Phase = Callable[[str], AbstractContextManager]
MAX_GRAD_NORM = 1.0  # TRL's default


@dataclass(frozen=True)
class Samples:
    """A batch of sampled completions, sliceable by rows.

    >>> ids = torch.ones(4, 2, dtype=torch.long)
    >>> samples = Samples(ids, ids, ids, ids, advantages=torch.zeros(4))
    >>> len(samples[:3])
    3

    prompt_ids, prompt_mask (B, P), padded on the left; completion_ids, completion_mask (B, C), on the right;
    advantages (B,); old_logps, ref_logps (B, C) or None; num_items, the tokens of the whole generation
    batch's completions: a slice keeps it.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    num_items: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Samples:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if value is not None and name != "num_items"}
        return replace(self, **{name: value[rows] for name, value in tensors.items()})

    def micro_batches(self, size: int) -> Iterator[Samples]:
        """Slices of `size` rows, the last one possibly shorter."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def trim(self) -> Samples:
        """Without the columns that are padding in every row, on the left of prompts and the right of completions."""
        left = self.prompt_mask.shape[1] - int(self.prompt_mask.sum(1).max())
        right = int(self.completion_mask.sum(1).max())
        columns = {name: slice(left, None) for name in ("prompt_ids", "prompt_mask")}
        columns |= {name: slice(right) for name in ("completion_ids", "completion_mask", "old_logps", "ref_logps")}
        cut = {name: value[:, which] for name, which in columns.items() if (value := getattr(self, name)) is not None}
        return replace(self, **cut)


def score(policy, samples: Samples, recipe, reference=None, phase: Phase = nullcontext) -> Samples:
    """The samples with old and reference log-probs where the recipe needs them, micro-batch by micro-batch.

    >>> samples = score(policy, samples, recipe)                                  # doctest: +SKIP

    The reference is a model of its own where every weight is trained, and the policy without its adapter in
    LoRA.
    """
    num_items = samples.completion_mask.sum() if samples.num_items is None else samples.num_items
    samples = replace(samples, num_items=num_items)
    if recipe.needs_old_logps:
        with phase("old log-probs"):
            samples = replace(samples, old_logps=_score_with(policy, samples, recipe))
    if recipe.beta != 0.0:
        if reference is None and not hasattr(policy, "disable_adapter"):
            raise ValueError(f"beta={recipe.beta} needs a reference model if every weight is trained: pass "
                             "reference=copy.deepcopy(model) from before training, or beta=0.")  # fmt: skip
        adapter_off = policy.disable_adapter() if reference is None else nullcontext()
        with phase("reference log-probs"), adapter_off:
            ref_logps = _score_with(policy if reference is None else reference, samples, recipe)
            samples = replace(samples, ref_logps=ref_logps)
    return samples


@torch.no_grad()
def _score_with(model, samples: Samples, recipe) -> Tensor:
    micro_batches = samples.micro_batches(recipe.micro_batch_rows)
    return torch.cat([_token_logps(model, micro, recipe) for micro in micro_batches])


def micro_batches(samples: Samples, recipe) -> Iterator[Samples]:
    """What goes through the model at once: `per_device_train_batch_size` rows, or `micro_batch_tokens` tokens.

    >>> [len(micro) for micro in micro_batches(samples, recipe)]                  # doctest: +SKIP
    """
    if recipe.micro_batch_tokens is None:
        return samples.micro_batches(recipe.per_device_train_batch_size)
    # a batch holds its longest prompt beside its longest completion: count every prompt as the longest
    lengths = samples.prompt_mask.sum(1).max() + samples.completion_mask.sum(1)
    batches = token_batches(lengths.tolist(), recipe.micro_batch_tokens)
    return (samples[torch.tensor(rows, device=lengths.device)].trim() for rows in batches)


def _token_logps(model, samples: Samples, recipe, **keywords):
    return token_logps(
        model, torch.cat([samples.prompt_ids, samples.completion_ids], dim=1),
        torch.cat([samples.prompt_mask, samples.completion_mask], dim=1), samples.completion_ids.shape[1],
        temperature=recipe.temperature, logits=recipe.logits, chunk_size=recipe.logits_chunk_size,
        autocast=recipe.autocast, **keywords,
    )  # fmt: skip


def micro_batch_loss(policy, samples: Samples, recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch, a scalar that carries the graph, and its metrics, which don't."""
    logps, entropy = _token_logps(policy, samples, recipe, return_entropy=True)
    batch = samples.old_logps, samples.ref_logps, samples.advantages, samples.completion_mask
    clipping = {"epsilon": recipe.epsilon, "epsilon_high": recipe.epsilon_high}
    # num_items counts the generation batch's tokens; the loss wants one accumulation window's share of them
    window = recipe.gradient_accumulation_steps / _steps_per_generation(recipe)
    loss = policy_loss(
        logps, *batch, **clipping, loss_type=recipe.loss_type, beta=recipe.beta,
        accumulation_steps=recipe.gradient_accumulation_steps, num_items=samples.num_items * window,
        max_completion_length=recipe.max_completion_length, batch_size=recipe.per_device_train_batch_size,
    )  # fmt: skip
    return loss, loss_metrics(logps, *batch, entropy, **clipping)


def update(
    policy, optimizer, samples: Samples, recipe, phase: Phase = nullcontext, *,
    max_grad_norm: float = MAX_GRAD_NORM, scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """One optimizer step over an accumulation window of micro-batches; metrics as scalar tensors.

    >>> metrics = update(policy, optimizer, samples, recipe)                      # doctest: +SKIP
    >>> metrics["loss"], metrics["grad_norm"]                                     # doctest: +SKIP

    loss (the window's sum), grad_norm (before clipping), entropy, clip_ratio, and kl where there is a
    reference. `scaler` is for float16 autocast, whose small gradients would vanish without it.
    """
    if samples.num_items is None:  # not scored: the window stands for all windows of its generation batch
        windows_a_batch = _steps_per_generation(recipe) / recipe.gradient_accumulation_steps
        samples = replace(samples, num_items=samples.completion_mask.sum() * windows_a_batch)
    losses, metrics = [], []
    for micro in micro_batches(samples, recipe):
        with phase("forward"):
            loss, micro_metrics = micro_batch_loss(policy, micro, recipe)
        with phase("backward"):
            (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
        metrics.append(micro_metrics)
    with phase("optimizer"):
        if scaler is not None:
            scaler.unscale_(optimizer)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad_norm = torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
        if all(parameter.grad is None for parameter in trained):  # the backward has freed them
            grad_norm = torch.full_like(losses[0], torch.nan)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": torch.stack(losses).sum(), "grad_norm": grad_norm, **_means(metrics)}


def windows(samples: Samples, recipe) -> Iterator[Samples]:
    """What each update takes of a scored generation batch: `num_iterations` passes over it, in equal shares.

    >>> ids = torch.ones(8, 2, dtype=torch.long)
    >>> from grpo_lab.recipe import Recipe
    >>> recipe = Recipe(per_device_train_batch_size=2, steps_per_generation=4, num_iterations=2)
    >>> [len(window) for window in windows(Samples(ids, ids, ids, ids, ids[:, 0]), recipe)]
    [2, 2, 2, 2, 2, 2, 2, 2]
    """
    steps, accumulation = _steps_per_generation(recipe), recipe.gradient_accumulation_steps
    if steps % accumulation:
        multiple = accumulation * max(1, round(steps / accumulation))
        raise ValueError(f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps="
                         f"{accumulation}, so an update would span two generation batches: use {multiple} or "
                         "None.")  # fmt: skip
    share = -(-len(samples) // (steps // accumulation))
    for _ in range(recipe.num_iterations):
        yield from samples.micro_batches(share)


def step(
    policy, optimizer, samples: Samples, recipe, reference=None, phase: Phase = nullcontext, **keywords
) -> dict[str, Tensor]:
    """Score a generation batch, then run all its updates; the means of their metrics, as scalar tensors.

    >>> metrics = step(policy, optimizer, samples, recipe, reference)             # doctest: +SKIP
    """
    samples = score(policy, samples, recipe, reference, phase)
    return _means([update(policy, optimizer, window, recipe, phase, **keywords)
                   for window in windows(samples, recipe)])  # fmt: skip


def _means(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]).mean() for name in rows[0]}


def _steps_per_generation(recipe) -> int:
    return recipe.steps_per_generation or recipe.gradient_accumulation_steps
