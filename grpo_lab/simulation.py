"""Where training meets the instrument: one GRPO step of a recipe, on fake tensors (`simulate`) or real ones (`measure`).

>>> from grpo_lab import Recipe
>>> report = simulate(Recipe(model="SmolLM2-135M", gpu="RTX 3080 Laptop 8GB", max_completion_length=64))
>>> report.fits, list(report.phases.index)
(True, ['load', 'optimizer states', 'rollout', 'forward', 'backward', 'optimizer'])

Both run the code of :mod:`grpo_lab.grpo` that `train` runs, on a batch of the recipe's maximum lengths.
"""
from __future__ import annotations

import copy
import platform
import warnings
from types import SimpleNamespace

import torch

from .grpo import rollout, setup
from .grpo.offload import stream_layers
from .grpo.optimizer import make_optimizer
from .grpo.step import Samples, step
from .memory import MemoryReport, VirtualGPU, track
from .recipe import Recipe
from .trainer.generate import grow


def simulate(recipe: Recipe, *, gpu: str | int | None = None, steps: int | None = None, kernels: str = "cuda",
             every_micro_batch: bool = False, alloc_conf: str | None = None,
             prompt_length: int | None = None) -> MemoryReport:
    """What the recipe would do to its card, without the card and without weights.

    A `trl.GRPOTrainer` in the recipe's place runs its own step on the card ``gpu``
    (:func:`grpo_lab.trainer.twin.simulate_trainer`, which has ``prompt_length`` too).

    ``steps`` None looks at a step of the steady state: the optimizer's states are there, as the first step leaves them.
    A number runs that many steps from the start: 1 knows no states yet, 2 has both, at twice the time (and its reserved
    bytes know the holes that the first step left; they differ by a few percent). Of many micro-batches two are run,
    for the rest are like the second (``every_micro_batch=True`` runs them all, and every token of the rollout). The
    bytes go past the card's budget if need be: ask ``report.fits`` and ``report.oom``. ``alloc_conf`` is a value of
    PYTORCH_ALLOC_CONF, such as ``"expandable_segments:True"``.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r}: takes a whole number of steps from 1 on, or None for the steady state")
    options = {"steps": steps, "kernels": kernels, "every_micro_batch": every_micro_batch, "alloc_conf": alloc_conf}
    if hasattr(recipe, "accelerator"):
        from .trainer.twin import simulate_trainer
        return simulate_trainer(recipe, gpu=gpu, prompt_length=prompt_length, **options)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"simulate takes a Recipe or a trl.GRPOTrainer, not {type(recipe).__name__}")
    if prompt_length is not None:
        raise TypeError(f"prompt_length={prompt_length} is for trainers: a recipe has max_prompt_length")
    if isinstance(gpu, (str, int)):
        recipe = recipe.replace(gpu=gpu)                    # checks that they go together
    with VirtualGPU(gpu or recipe.gpu, enforce=False, kernels=kernels, alloc_conf=alloc_conf) as gpu:
        load = {"dtype": recipe.dtype, "attn_implementation": recipe.attn_implementation}
        model, reference = gpu.load(recipe.model, quantization=recipe.quantization,
                                    compute_dtype=recipe.autocast, **load), None
        if recipe.needs_reference:
            reference = gpu.load(recipe.model, category="reference model", **load).requires_grad_(False)
        recipe = _by_rows(recipe)
        _steps(recipe if every_micro_batch else _excerpt(recipe), model, reference, gpu.phase, steps,
               skip=not every_micro_batch)
        return gpu.report()


def measure(recipe: Recipe, model=None, *, steps: int | None = None) -> MemoryReport:
    """The same with real tensors, on CUDA where there is one, else on this CPU; all micro-batches, all tokens.

    ``model`` None loads the recipe's weights (``"tiny"``, ``"SmolLM2-135M"``, a folder, a hub id); only memory is
    looked at, so any weights of that architecture serve. On Windows a driver may spill into the host's memory instead
    of failing: a warning says so, for a run without an error is then no proof that it fits.
    """
    if model is None:
        from . import models
        from ._trl import model_init_kwargs
        model, _ = models.load(recipe.model, **model_init_kwargs(recipe))
    if torch.cuda.is_available() and spills(platform.system(), platform.release()):
        warnings.warn("on Windows and WSL a driver may spill into the computer's memory instead of failing: that this runs "
                      f"is no proof that it fits. The card leaves {recipe.card.budget:,} bytes to PyTorch; cap it with "
                      "torch.cuda.set_per_process_memory_fraction to be sure.", stacklevel=2)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    reference = copy.deepcopy(model).requires_grad_(False) if recipe.needs_reference else None
    with track(existing=False) as memory:
        memory.watch(model)
        if reference is not None:
            memory.watch(reference, "reference model")
        _steps(recipe, model, reference, memory.phase, steps)
    return memory.report()


def spills(system: str, release: str) -> bool:
    """Whether a driver there may use host memory for a card's ("sysmem fallback", NVIDIA driver 536.40 and later).

    >>> spills("Linux", "6.8.0-generic"), spills("Linux", "5.15.90.1-microsoft-standard-WSL2"), spills("Windows", "11")
    (False, True, True)
    """
    return system == "Windows" or "microsoft" in release.lower()


def _steps(recipe, model, reference, phase, steps: int | None, skip: bool = False) -> None:
    """GRPO steps on batches of the maximum lengths; ``skip`` jumps over all tokens but the first and the last."""
    if recipe.reference_offload:
        stream_layers(reference)
    policy = setup.prepare(model, recipe)
    optimizer = make_optimizer(policy, recipe)
    if steps is None:
        _make_states(optimizer, phase)
    for _ in range(steps or 1):
        with phase("rollout"):
            samples = _rollout(policy, recipe, skip)
        if skip:
            samples = samples[:recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps]
        step(policy, optimizer, samples, recipe, reference, phase)
        del samples


def _make_states(optimizer, phase) -> None:
    """What a first step leaves behind, without its forward and backward: optimizer states, cuBLAS's workspaces."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with phase("optimizer states"):
        one = torch.ones(1, 1, dtype=parameters[0].dtype, device=parameters[0].device, requires_grad=True)
        torch.mm(one, one).sum().backward()                 # each thread has a cuBLAS handle with a workspace
        for each in getattr(optimizer, "each", [optimizer]):    # one for each weight, if they step in the backward
            for parameter in (p for group in each.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            each.step()
            each.zero_grad(set_to_none=True)


def _rollout(policy, recipe, skip: bool) -> Samples:
    """A generation batch of the maximum lengths. One row a micro-batch is padded, as among unequal prompts."""
    device = next(policy.parameters()).device
    rows, prompt, completion = recipe.generation_batch_size, recipe.max_prompt_length, recipe.max_completion_length
    prompt_ids = torch.ones(rows, prompt, dtype=torch.long, device=device)
    prompt_mask = torch.ones_like(prompt_ids)
    if prompt > 1:
        prompt_mask[::recipe.per_device_train_batch_size, 0] = 0
    if skip:
        _first_and_last_token(policy, prompt_ids, prompt_mask, recipe)
        completion_ids = torch.ones(rows, completion, dtype=torch.long, device=device)
        completion_mask = torch.ones_like(completion_ids)
    else:
        first = slice(None, None, recipe.num_generations)      # each prompt runs once, then is fanned out to its group
        completion_ids, completion_mask = rollout.generate(
            policy, prompt_ids[first], prompt_mask[first], max_completion_length=completion,
            temperature=recipe.temperature, eos_token_id=None, pad_token_id=0, autocast=recipe.autocast,
            batch_size=recipe.rollout_batch, num_return_sequences=recipe.num_generations)
    return Samples(prompt_ids, prompt_mask, completion_ids, completion_mask, torch.zeros(rows, device=device))


def _first_and_last_token(policy, prompt_ids, prompt_mask, recipe) -> None:
    """`rollout.generate` for one chunk of sequences, without the tokens between the first and the last.

    The cache is at its largest at the last token, and so is what comes on top of it: each layer's keys and values of
    one more token, made while the old ones live.
    """
    fan_out = recipe.num_generations if recipe.rollout_batch % recipe.num_generations == 0 else 1
    chunk = slice(None, recipe.rollout_batch, fan_out)
    mask = prompt_mask[chunk]
    with rollout.generation_mode(policy, recipe.autocast):
        logits, cache = rollout.prefill(policy, prompt_ids[chunk], mask)
        if fan_out > 1:
            cache.batch_repeat_interleave(fan_out)
            logits, mask = logits.repeat_interleave(fan_out, 0), mask.repeat_interleave(fan_out, 0)
        token = rollout.sample(logits, recipe.temperature)
        if (new := recipe.max_completion_length) > 1:
            grow(cache, new - 2)
            mask = torch.cat([mask, mask.new_ones(len(mask), new - 1)], dim=1)
            rollout.sample(rollout.decode(policy, token[:, None], mask, cache), recipe.temperature)


def _by_rows(recipe: Recipe):
    """A budget of tokens as the rows of full length that fill it, for fake lengths can't be looked at."""
    if recipe.micro_batch_tokens is None:
        return recipe
    window = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    rows = min(recipe.micro_batch_rows, window)
    windows = (recipe.steps_per_generation or recipe.gradient_accumulation_steps) // recipe.gradient_accumulation_steps
    accumulation = -(-window // rows)
    return _changed(recipe, micro_batch_tokens=None, per_device_train_batch_size=rows,
                    gradient_accumulation_steps=accumulation, steps_per_generation=windows * accumulation)


def _excerpt(recipe: Recipe):
    """The recipe with two micro-batches at most, one optimizer step a generation batch: the others are like them."""
    accumulation = min(2, recipe.gradient_accumulation_steps)
    return _changed(recipe, gradient_accumulation_steps=accumulation, steps_per_generation=accumulation,
                    num_iterations=1)


def _changed(recipe, **changes) -> SimpleNamespace:
    """What a recipe says with some of it changed, unchecked: an excerpt needs no whole groups."""
    names = {name: getattr(recipe, name) for name in dir(recipe) if not name.startswith("_")}
    return SimpleNamespace(**names | changes)
