"""The GRPO loop: sample answers, reward them, compare them within their group, update (the step: step.py).

Beyond what step.py lists, this loop departs from TRL's in that a prompt runs through the model once for its
whole group (`share_prefill=False` repeats it, as TRL does), and in a keyword that is off by default:
`skip_flat_groups` leaves out the groups whose rewards are all equal. Their advantages are 0, so with beta=0
the gradient stays the same, and the batch gets smaller.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pandas as pd
import torch
from tqdm.auto import tqdm

from .loss import group_advantages, nanstd
from .offload import stream_layers
from .optimizer import make_optimizer
from .rollout import encode_prompts, generate, is_eos, reward_completions, special_tokens
from .setup import prepare
from .step import MAX_GRAD_NORM, Samples, micro_batch_loss, score, update, windows

COLUMNS = (
    "step", "reward", "reward_std", "loss", "grad_norm", "kl", "entropy", "clip_ratio", "completion_length",
    "clipped", "frac_reward_zero_std", "learning_rate", "seconds",
)  # fmt: skip
EPOCHS = 3  # where max_steps is not set; transformers' default
ALMOST_ALL = 0.95  # the share of completions at the limit that calls for a warning


def train(
    recipe, *, model=None, tokenizer=None, prompts: Sequence[dict] | None = None,
    reward_funcs: Sequence[Callable] | Callable | None = None, progress: bool = True,
    lr_scheduler_type: str = "linear", final_lr_fraction: float = 0.0, adam_beta1: float = 0.9,
    adam_beta2: float = 0.999, weight_decay: float = 0.0, max_grad_norm: float = MAX_GRAD_NORM,
    skip_flat_groups: bool = False, share_prefill: bool = True, warm_up: bool = False,
    callback: Callable[[dict], None] | None = None,
):  # fmt: skip
    """Train with GRPO; returns the trained model and the history, a DataFrame with a row per optimizer step.

    >>> model, history = train(Recipe(model="tiny", dtype="float32", max_steps=3))           # doctest: +SKIP
    >>> history[["step", "reward", "grad_norm"]]                                             # doctest: +SKIP

    A `model` that is passed is trained in place; without one it is loaded by the recipe's name. Without
    `prompts` (dicts with a "prompt" and the columns that the rewards want) or `reward_funcs` (with TRL's
    signature) they are those of the recipe's task. The learning rate is "constant" or falls ("linear",
    "cosine") to `final_lr_fraction` of its start. `warm_up` first runs a batch of the maximum lengths through forward
    and backward, so that memory that won't do shows in the first second; it changes no weight. `callback` gets each
    row of the history. Ctrl-C returns what there is.

    In the history, `loss` is 0 where each update takes fresh samples and beta is 0, for the ratios are 1 and
    a group's advantages add up to 0. Its gradient is not 0: look at `reward` and `grad_norm`. `kl` is there
    if beta is not 0. `clipped` is the share of completions that hit max_completion_length; `seconds` add up
    to the run's time.
    """
    model, tokenizer, prompts, reward_funcs = _inputs(recipe, model, tokenizer, prompts, reward_funcs)
    encode_prompts(tokenizer, prompts, max_prompt_length=recipe.max_prompt_length)  # refuse before any work
    lr_fraction(0, 1, lr_scheduler_type)
    reference = copy.deepcopy(model).requires_grad_(False).eval() if recipe.needs_reference else None
    if recipe.reference_offload:
        stream_layers(reference)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)  # for an adapter's first weights; the caller's random state stays
        policy = prepare(model, recipe)
    if warm_up:  # before an optimizer could step in the backward
        longest_batch(policy, recipe, device)
        policy.zero_grad(set_to_none=True)
    optimizer = make_optimizer(
        policy, recipe, adam_beta1=adam_beta1, adam_beta2=adam_beta2, weight_decay=weight_decay
    )
    scaler = torch.amp.GradScaler(device.type) if recipe.autocast == "float16" else None
    generator = torch.Generator(device).manual_seed(recipe.seed)
    total = total_steps(recipe, len(prompts))
    if progress:
        print(describe(recipe, policy, total))

    def rows() -> Iterator[dict]:
        watch, started = _Watch(recipe), time.perf_counter()
        prompts_a_batch = recipe.generation_batch_size // recipe.num_generations
        for batch in prompt_batches(prompts, prompts_a_batch, recipe.seed):
            samples, sampled = sample_batch(policy, tokenizer, batch, reward_funcs, recipe,
                                            generator=generator, share_prefill=share_prefill)  # fmt: skip
            watch(sampled)
            if skip_flat_groups:
                samples = samples[learning_rows(samples.advantages, recipe.num_generations)]
            if len(samples):  # shuffled as in TRL, so that an update doesn't see a few prompts only
                order = torch.randperm(len(samples), generator=generator, device=device)
                samples = score(policy, samples[order], recipe, reference)
            for window in windows(samples, recipe) if len(samples) else [None] * updates_a_batch(recipe):
                learning_rate = recipe.learning_rate * lr_fraction(len(history), total, lr_scheduler_type,
                                                                   final_lr_fraction)  # fmt: skip
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                row = {"step": len(history) + 1, **sampled, "learning_rate": learning_rate}
                if window is None:  # all groups were flat
                    row |= {"loss": 0.0, "grad_norm": 0.0}
                else:
                    row |= _numbers(update(policy, optimizer, window, recipe, max_grad_norm=max_grad_norm,
                                           scaler=scaler))  # fmt: skip
                now = time.perf_counter()
                row["seconds"], started = now - started, now
                yield row

    history: list[dict] = []
    bar = tqdm(total=total, disable=not progress, unit="step")
    try:
        for row in rows():
            history.append(row)
            bar.set_postfix(reward=f"{row['reward']:.3f}", refresh=False)
            bar.update()
            if callback is not None:
                callback(row)
            if len(history) == total:
                break
    except KeyboardInterrupt:
        print(f"Interrupted after {len(history)} of {total} steps: here are model and history so far.")
    finally:
        optimizer.zero_grad(set_to_none=True)  # an interrupted update would leave its gradients behind
        bar.close()
    columns = [name for name in COLUMNS if name != "kl" or recipe.beta != 0.0]
    return policy, pd.DataFrame(history, columns=columns)


def longest_batch(policy, recipe, device) -> None:
    """Forward and backward of one micro-batch of the maximum lengths; the gradients stay.

    >>> longest_batch(policy, recipe, device)                                     # doctest: +SKIP
    """
    prompt, completion = (
        torch.ones(recipe.micro_batch_rows, length, dtype=torch.long, device=device)
        for length in (recipe.max_prompt_length, recipe.max_completion_length)
    )
    advantages = torch.zeros(recipe.micro_batch_rows, device=device)
    samples = Samples(prompt, prompt, completion, completion, advantages, num_items=completion.sum())
    if recipe.needs_old_logps or recipe.beta != 0.0:
        zeros = torch.zeros(completion.shape, device=device)
        samples = replace(samples, old_logps=zeros, ref_logps=zeros)
    loss, _ = micro_batch_loss(policy, samples, recipe)
    loss.backward()


def sample_batch(
    policy, tokenizer, prompts: Sequence[dict], reward_funcs: Sequence[Callable], recipe, *,
    generator: torch.Generator | None = None, share_prefill: bool = True,
) -> tuple[Samples, dict[str, float]]:  # fmt: skip
    """`num_generations` completions for each prompt, rewarded: samples with their advantages, and metrics.

    >>> samples, metrics = sample_batch(policy, tokenizer, prompts, reward_funcs, recipe)    # doctest: +SKIP
    """
    device, group = next(policy.parameters()).device, recipe.num_generations
    special = special_tokens(tokenizer)
    ids, mask = encode_prompts(tokenizer, prompts, max_prompt_length=recipe.max_prompt_length, device=device)
    repeated = ids.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
    completion_ids, completion_mask = generate(
        policy, *((ids, mask) if share_prefill else repeated),
        num_return_sequences=group if share_prefill else 1, temperature=recipe.temperature,
        max_completion_length=recipe.max_completion_length,
        batch_size=recipe.rollout_batch_size, autocast=recipe.autocast, generator=generator, **special,
    )  # fmt: skip
    rows = [row for row in prompts for _ in range(group)]
    rewards = torch.tensor(
        reward_completions(reward_funcs, tokenizer, rows, completion_ids, completion_mask), device=device
    )
    ended = (is_eos(completion_ids, special["eos_token_id"]) & completion_mask.bool()).any(1)
    spread = nanstd(rewards.view(-1, group), dim=1)
    metrics = _numbers({
        "reward": rewards.nanmean(), "reward_std": nanstd(rewards, dim=0),
        "completion_length": completion_mask.sum(1).float().mean(), "clipped": (~ended).float().mean(),
        "frac_reward_zero_std": torch.isclose(spread, torch.zeros_like(spread)).float().mean(),
    })  # fmt: skip
    advantages = group_advantages(rewards, group, recipe.scale_rewards)
    num_items = completion_mask.sum()
    return Samples(*repeated, completion_ids, completion_mask, advantages, num_items=num_items), metrics


def evaluate(
    model, tokenizer, prompts: Sequence[dict], reward_funcs: Sequence[Callable] | Callable, *,
    max_completion_length: int = 256, batch_size: int = 256, temperature: float = 0.0,
    autocast: str | None = None, generator: torch.Generator | None = None,
) -> float:  # fmt: skip
    """Mean reward of one answer a prompt, greedy by default: the accuracy, where right is 1 and wrong is 0.

    >>> evaluate(model, tokenizer, task.prompts("test"), task.reward_funcs)       # doctest: +SKIP
    """
    prompts = sorted(prompts, key=lambda row: len(str(row["prompt"])))  # like lengths together: less padding
    device, rewards = next(model.parameters()).device, []
    for start in range(0, len(prompts), batch_size):
        rows = prompts[start : start + batch_size]
        completions = generate(
            model, *encode_prompts(tokenizer, rows, device=device), temperature=temperature,
            max_completion_length=max_completion_length, autocast=autocast, generator=generator,
            **special_tokens(tokenizer),
        )  # fmt: skip
        rewards += reward_completions(reward_funcs, tokenizer, rows, *completions)
    return sum(rewards) / len(rewards)


def learning_rows(advantages: torch.Tensor, num_generations: int) -> torch.Tensor:
    """True for the rows of groups in which some answer has an advantage: (B,) to (B,).

    >>> learning_rows(torch.tensor([0.0, 0.0, 1.0, -1.0]), num_generations=2)
    tensor([False, False,  True,  True])
    """
    return (advantages.view(-1, num_generations) != 0).any(1).repeat_interleave(num_generations)


def prompt_batches(prompts: Sequence[dict], size: int, seed: int) -> Iterator[list[dict]]:
    """Endless batches of `size` different prompts: each epoch in a new order, without an incomplete last.

    >>> batches = prompt_batches([{"prompt": "a"}, {"prompt": "b"}], size=2, seed=0)
    >>> sorted(row["prompt"] for row in next(batches))
    ['a', 'b']
    """
    if size > len(prompts):
        raise ValueError(f"A generation batch wants {size} different prompts and there are {len(prompts)}: "
                         "give more prompts, raise num_generations, or lower per_device_train_batch_size, "
                         "gradient_accumulation_steps or steps_per_generation.")  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(prompts), generator=generator).tolist()
        for start in range(0, len(prompts) - size + 1, size):
            yield [prompts[index] for index in order[start : start + size]]


def lr_fraction(step: int, total: int, lr_scheduler_type: str, final_lr_fraction: float = 0.0) -> float:
    """The share of the learning rate that step `step` (from 0) of `total` takes.

    >>> [lr_fraction(step, 4, "linear", 0.5) for step in range(4)]
    [1.0, 0.875, 0.75, 0.625]
    """
    done = step / total
    shares = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    if lr_scheduler_type not in shares:
        raise ValueError(f"lr_scheduler_type={lr_scheduler_type!r} is not known: use {', '.join(shares)}.")
    return final_lr_fraction + (1 - final_lr_fraction) * shares[lr_scheduler_type]


def describe(recipe, policy, total: int) -> str:
    """What a run will cost, in a line."""
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    batches, completions = -(-total // updates_a_batch(recipe)), recipe.generation_batch_size
    tokens = batches * completions * recipe.max_completion_length
    return (f"{total} steps on {batches} batches of {completions} completions "
            f"({completions // recipe.num_generations} prompts x {recipe.num_generations}): at most "
            f"{tokens:,} tokens to generate, {trained:,} parameters to train, on "
            f"{next(policy.parameters()).device}.")  # fmt: skip


def updates_a_batch(recipe) -> int:
    """Optimizer steps that a generation batch feeds."""
    windows_a_batch = (recipe.steps_per_generation or 1) // recipe.gradient_accumulation_steps
    return recipe.num_iterations * max(1, windows_a_batch)


def total_steps(recipe, num_prompts: int) -> int:
    """Optimizer steps of a run: `max_steps`, or three epochs."""
    batches = num_prompts // (recipe.generation_batch_size // recipe.num_generations)
    return recipe.max_steps if recipe.max_steps > 0 else max(1, EPOCHS * batches * updates_a_batch(recipe))


def _inputs(recipe, model, tokenizer, prompts, reward_funcs):
    from .. import models, tasks
    from .._trl import model_init_kwargs

    if model is None:
        model, loaded = models.load(recipe.model, **model_init_kwargs(recipe))
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = loaded if tokenizer is None else tokenizer
    if tokenizer is None:
        tokenizer = models.tokenizer(recipe.model)
    if prompts is None or reward_funcs is None:
        task = tasks.get(recipe.task)
        prompts = task.prompts("train") if prompts is None else prompts
        reward_funcs = task.reward_funcs if reward_funcs is None else reward_funcs
    return model, tokenizer, list(prompts), [reward_funcs] if callable(reward_funcs) else list(reward_funcs)


def _numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    values = torch.stack([value.float() for value in metrics.values()]).tolist()  # one wait for the device
    return dict(zip(metrics, values, strict=True))


class _Watch:
    """Warns, once each, of two ways in which a run looks busy and learns nothing."""

    def __init__(self, recipe) -> None:
        self.recipe, self.batches, self.in_a_row = recipe, 0, {"clipped": 0, "flat": 0}

    def __call__(self, metrics: dict[str, float]) -> None:
        self.batches += 1
        if self._is_time("clipped", metrics["clipped"] >= ALMOST_ALL):
            warnings.warn(f"{metrics['clipped']:.0%} of the completions hit max_completion_length="
                          f"{self.recipe.max_completion_length} without an end token, so most answers are "
                          "cut off: raise max_completion_length, or ask for shorter answers.",
                          stacklevel=4)  # fmt: skip
        if self._is_time("flat", metrics["frac_reward_zero_std"] == 1.0):
            warnings.warn(f"All rewards in every group are equal (mean {metrics['reward']:g}), so every "
                          "advantage is 0 and nothing is learned: use easier or harder prompts, rewards with "
                          "partial credit, a higher temperature or more num_generations.",
                          stacklevel=4)  # fmt: skip

    def _is_time(self, name: str, seen: bool) -> bool:
        """In the first batch, or after three in a row: a single late one may be chance."""
        self.in_a_row[name] = self.in_a_row[name] + 1 if seen else 0
        return seen and (self.batches == 1 or self.in_a_row[name] == 3 < self.batches)
