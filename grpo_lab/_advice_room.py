"""What a recipe that fits has room for: what could be turned back off, and how much longer its completions may get."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ._advice_search import Chosen, Taken, chain, fits, together, told
from ._ladder import FREE
from .estimation import estimate
from .recipe import Recipe

LONGEST = 131_072  # tokens: longer completions are not looked for
LARGEST_GROUP = 64  # answers a prompt: larger groups are not looked for
LITTLE = 0.01  # of the peak: what lowers no phase by as much is not worth a line


def free(recipe: Recipe) -> tuple[Taken, ...]:
    """What costs nothing and takes less, one after the other, as far as it lowers the peak or a phase below it."""
    now: Recipe = recipe
    chosen: Chosen = []
    for index, rung in enumerate(FREE):
        links = chain(now, rung)
        leanest = min(links, key=lambda link: _size(link[1]), default=None)  # the first of those alike
        if leanest is None or not _leaner(now, leanest[1]):
            continue
        chosen += [(index, change) for change, _ in links[: links.index(leanest) + 1]]
        now = leanest[1]
    return told(recipe, together(chosen))[1]


def _size(recipe: Recipe) -> tuple[int, int]:
    """The peak, then all phases together: below a peak that something else owns, less is still less."""
    report = estimate(recipe)
    return report.peak_allocated, sum(moment.bytes for moment in report.moments.values())


def _leaner(before: Recipe, after: Recipe) -> bool:
    old, new = estimate(before), estimate(after)
    if new.peak_allocated > old.peak_allocated:
        return False
    return any(moment.bytes - new.moments[name].bytes > LITTLE * old.peak_allocated
               for name, moment in old.moments.items() if name in new.moments)  # fmt: skip


def room(recipe: Recipe) -> tuple[tuple[str, Recipe], ...]:
    """What the recipe could give back, each alone, and how much longer or larger it may get."""
    found = []
    for what, fields in _looser(recipe):
        try:
            looser = recipe.replace(**fields)
        except ValueError:
            continue
        if fits(looser, recipe.card.budget):
            found.append((what, looser))
    found += [*_larger_micro_batch(recipe), *_larger_group(recipe)]
    longest = longest_completion(recipe)
    if longest is not None and longest > recipe.max_completion_length:
        found.append((f"completions of up to {longest:,} tokens", recipe.replace(max_completion_length=longest)))
    return tuple(found)


def _looser(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the ladder turns on, off again: the dearest first."""
    if recipe.quantization is not None:
        yield "weights in 16 bits instead of 4", {"quantization": None}
    elif recipe.lora_rank is not None:
        yield "every weight trained, without an adapter", {"lora_rank": None}
    if recipe.optim in ("adamw_8bit", "paged_adamw_8bit"):
        yield "AdamW's states whole and on the card", {"optim": "adamw_torch_fused"}
    if recipe.dtype == "bfloat16" and recipe.lora_rank is None:
        yield "weights in float32: no update is rounded away", {"dtype": "float32"}
    if recipe.activation_checkpointing:
        yield "no activation checkpointing: no second forward", {"activation_checkpointing": False}
    if recipe.rollout_batch < recipe.generation_batch_size:
        yield "all sequences generated at once", {"rollout_batch_size": None}


def _larger_micro_batch(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The largest by doubling, with the same completions in each optimizer step."""
    largest = recipe
    while largest.gradient_accumulation_steps % 2 == 0 and (largest.steps_per_generation or 0) % 2 == 0:
        fields = {"per_device_train_batch_size": 2 * largest.per_device_train_batch_size,
                  "gradient_accumulation_steps": largest.gradient_accumulation_steps // 2}  # fmt: skip
        if largest.steps_per_generation is not None:
            fields["steps_per_generation"] = largest.steps_per_generation // 2
        if not fits(larger := largest.replace(**fields), recipe.card.budget):
            break
        largest = larger
    if largest is not recipe:
        count = largest.gradient_accumulation_steps
        yield (f"micro-batches of {largest.per_device_train_batch_size}, "
               + (f"accumulated {count} times" if count > 1 else "without accumulation"), largest)  # fmt: skip


def _larger_group(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The largest by doubling, with as many prompts: more micro-batches of the same size in each optimizer step."""
    largest = recipe
    while 2 * largest.num_generations <= LARGEST_GROUP:
        fields = {"num_generations": 2 * largest.num_generations,
                  "gradient_accumulation_steps": 2 * largest.gradient_accumulation_steps}  # fmt: skip
        if largest.steps_per_generation is not None:
            fields["steps_per_generation"] = 2 * largest.steps_per_generation
        if not fits(larger := largest.replace(**fields), recipe.card.budget):
            break
        largest = larger
    if largest is not recipe:
        times = largest.num_generations // recipe.num_generations
        yield f"{largest.num_generations} answers a prompt: {times} times the completions in each update", largest


def longest_completion(recipe: Recipe, budget: int | None = None) -> int | None:
    """The most tokens a completion may have so that the recipe fits; None if not even one does.

    >>> longest_completion(Recipe(model="SmolLM2-135M", gpu="RTX 3090")) > 1000
    True
    """
    budget = recipe.card.budget if budget is None else budget

    def beyond(length: int) -> int:
        return estimate(recipe.replace(max_completion_length=length)).peak_reserved - budget

    return last_below(beyond, recipe.max_completion_length, LONGEST)


def last_below(excess: Callable[[int], int], start: int, highest: int) -> int | None:
    """The largest n of 1..highest with ``excess(n) <= 0``, for a function that grows; None if there is none.

    >>> last_below(lambda n: 3 * n - 100, 8, 1000), last_below(lambda n: n, 8, 1000), last_below(lambda n: -1, 8, 1000)
    (33, None, 1000)

    Bytes grow with the tokens in nearly straight pieces, so the line through two known points mostly lands beside the
    last one. The end that stays is pulled towards the guess (the "Illinois" rule), and halved if that takes long.
    """
    low, at_low = 1, float(excess(1))
    if at_low > 0:
        return None
    high, at_high, guess = highest + 1, None, min(max(2, start), highest)
    for turn in itertools.count():
        value = float(excess(guess))
        if value <= 0:
            slope = (value - at_low) / (guess - low)
            low, at_low, at_high = guess, value, at_high and at_high / 2
        else:
            high, at_high, at_low = guess, value, at_low / 2
            slope = 0.0
        if high - low <= 1:
            return low
        if at_high is not None:
            slope = (at_high - at_low) / (high - low)
        step = int(-at_low / slope) + 1 if slope > 0 and turn % 6 < 5 else (high - low) // 2
        guess = min(max(low + step, low + 1), high - 1)
