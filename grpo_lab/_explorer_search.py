"""The most that would still fit, each choice alone: a search on `estimate`, quick enough for every move of a slider.

>>> most_that_fits(Recipe.preset("laptop_8gb"))["micro-batch"] >= 1
True
"""

from __future__ import annotations

import functools
from typing import Any

from . import models
from ._advice_room import LONGEST, last_below
from .estimation import Estimate, estimate
from .formula.shape import SIZES
from .recipe import Recipe

POWERS = [1, 2, 4, 8, 16, 32, 64, 128]


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
    """The same number as :func:`grpo_lab.advice.longest_completion`, with each length's bytes remembered."""
    def at(length: int) -> int:
        return beyond(recipe.replace(max_completion_length=length))

    return last_below(at, recipe.max_completion_length, LONGEST)


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
    each = 0.5 if recipe.quantization else SIZES[recipe.dtype]
    return models.architecture(name).parameters * each * (2 if recipe.lora_rank is None else 1)


def _replaced(recipe: Recipe, **fields: Any) -> Recipe | None:
    try:
        return recipe.replace(**fields)
    except ValueError:
        return None
