"""The most that would still fit, each choice alone: a search on `estimate`, quick enough for every move of a slider.

>>> most_that_fits(Recipe.preset("laptop_8gb"))["micro-batch"] >= 1
True
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from . import models
from .advice import LONGEST
from .estimation import Estimate, estimate
from .recipe import Recipe

POWERS = [1, 2, 4, 8, 16, 32, 64, 128]
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@functools.lru_cache(32)
def cached(recipe: Recipe) -> Estimate:
    """`estimate`, remembered: sliders come back to where they were."""
    return estimate(recipe)


@functools.lru_cache(4096)
def beyond(recipe: Recipe) -> int:
    """Bytes past the budget; 0 and below fits. Only the number is kept: whole estimates are many small objects, and
    with a thousand of them at hand Python's collector stopped the sliders for up to half a second."""
    found = estimate(recipe)
    return found.peak_reserved - found.budget


@functools.lru_cache(256)
def most_that_fits(recipe: Recipe) -> dict[str, Any]:
    """The longest completion, the largest micro-batch, the largest model that fit, the rest as it is; None: none."""
    return {
        "completion tokens": longest(recipe),
        "micro-batch": largest_batch(recipe),
        "model": largest_model(recipe),
    }


def longest(recipe: Recipe) -> int | None:
    """The same number as :func:`grpo_lab.advice.longest_completion`, from about a third of the estimates."""
    def at(length: int) -> int:
        return beyond(recipe.replace(max_completion_length=length))

    return last_below(at, recipe.max_completion_length, LONGEST)


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


def largest_batch(recipe: Recipe) -> int | None:
    """Of `POWERS`, by halving; those that the rest of the recipe forbids are left out."""
    allowed = [made for size in POWERS if (made := _replaced(recipe, per_device_train_batch_size=size)) is not None]
    low, high = 0, len(allowed)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if beyond(allowed[middle]) <= 0 else (low, middle)
    return allowed[low - 1].per_device_train_batch_size if low else None


def largest_model(recipe: Recipe) -> str | None:
    """By its number of weights. Needs aren't quite in that order (vocabularies differ), so all larger are asked."""
    for name in _by_size():
        if _least(recipe, name) > recipe.card.budget:
            continue
        made = _replaced(recipe, model=name)
        if made is not None and beyond(made) <= 0:
            return name
    return None


@functools.cache
def _by_size() -> list[str]:
    names = [name for name in models.names() if name != "tiny"]
    return sorted(names, key=lambda name: -models.architecture(name).parameters)


def _least(recipe: Recipe, name: str) -> float:
    """A floor that needs no estimate: the weights, and their gradients where all are trained."""
    each = 0.5 if recipe.quantization else BYTES[recipe.dtype]
    return models.architecture(name).parameters * each * (2 if recipe.lora_rank is None else 1)


def _replaced(recipe: Recipe, **fields: Any) -> Recipe | None:
    try:
        return recipe.replace(**fields)
    except ValueError:
        return None
