"""The largest micro-batch that fits: by formula, by simulation near the edge, then on the card where there is one.

>>> found = find_batch_size(Recipe(model="Qwen2.5-7B", gpu="8GB"))     # by far too large: nothing needs to be simulated
>>> found.recipe is None
True
"""

from __future__ import annotations

import bisect
import copy
import math
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from .estimation import estimate, human
from .recipe import Recipe

LARGEST = 65_536  # completions: larger micro-batches are not looked for
WITH_WEIGHTS = ("tiny", "SmolLM2-135M")  # loaded without asking; other names may mean gigabytes from a hub
Try = namedtuple("Try", "per_device_train_batch_size how peak_reserved fits")


@dataclass(frozen=True, repr=False, eq=False)
class BatchSearch:
    """`recipe` is `start` with the size found, None if no size fits. `tries` is a DataFrame, one row a try in their
    order: per_device_train_batch_size, how (estimated, simulated, measured), peak_reserved (bytes), fits."""
    recipe: Recipe | None
    start: Recipe
    tries: pd.DataFrame

    def __str__(self) -> str:
        rows = list(self.tries.itertuples(index=False))
        last = {row[0]: row for row in rows}  # the last word on each size
        name = f" on {self.start.gpu}" if isinstance(self.start.gpu, str) else ""
        of = f", of {human(self.start.card.budget)}{name}"
        counts = "tries: " + ", ".join(f"{n} {how}" for how, n in Counter(row.how for row in rows).items())
        if self.recipe is None:
            return f"no size fits: {_says(last[min(last)])}{of}\nadvise(recipe) knows what else to change\n{counts}"
        size, steps = self.recipe.per_device_train_batch_size, self.recipe.gradient_accumulation_steps
        before = self.start.per_device_train_batch_size * self.start.gradient_accumulation_steps
        same = "as before" if size * steps == before else f"{before} before"
        above = [n for n, row in last.items() if n > size and not row.fits and row.how != "estimated"]
        return (f"per_device_train_batch_size={size}, gradient_accumulation_steps={steps}: {size * steps} completions "
                f"an optimizer step ({same})\n{_says(last[size])}{of}"
                + (f"; {_says(last[min(above)])}" if above else "") + f"\n{counts}")  # fmt: skip

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sizes = ["" if pd.isna(n) else human(n) for n in self.tries["peak_reserved"]]
        table = self.tries.assign(peak_reserved=sizes).to_html(index=False)
        return f"<p>{escape(str(self))}</p>".replace("\n", "<br>") + table


def _says(row: Any) -> str:
    takes = "runs" if row.fits else "runs out of memory"
    return f"{row[0]} {takes if pd.isna(row[2]) else f'takes {human(row[2])} reserved'} ({row.how})"


def find_batch_size(
    recipe: Recipe, *, gpu: str | int | None = None, model: Any = None, keep_effective: bool = True,
    progress: bool = True, attempt: Callable[[Recipe], Any] | None = None,
) -> BatchSearch:  # fmt: skip
    """The largest ``per_device_train_batch_size`` with which the recipe fits its card (or ``gpu``), and that recipe.

    ``keep_effective``: only divisors of an optimizer step's completions are looked at, ``gradient_accumulation_steps``
    makes up for them, and learning stays as it is (but for ``loss_type="bnpo"``, which averages within a micro-batch).
    With False the accumulation stays and the batch grows, in whole groups.

    `estimate` brackets the edge in milliseconds; sizes beside it are simulated, two or three as a rule: seconds each,
    up to a minute with LoRA. With CUDA and ``model`` (or a recipe's model that is at hand: "tiny", "SmolLM2-135M", a
    folder), what is found is also tried for real within the card's budget, on copies of the model; after an
    out-of-memory error the memory is given back and a smaller size is tried. ``attempt(recipe)`` takes the place of
    that: it runs one step and lets PyTorch's errors through; a ``peak_reserved`` of what it returns is noted.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"find_batch_size takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    if not isinstance(keep_effective, bool):
        raise TypeError(f"keep_effective={keep_effective!r} must be True or False")
    if not (attempt is None or callable(attempt)):
        raise TypeError(f"attempt={attempt!r} must be a function that runs one step of the recipe it is given")
    if not (model is None or hasattr(model, "parameters")):
        raise TypeError(f"model={model!r} is no model: load one, as models.load({recipe.model!r})[0] does")
    if recipe.micro_batch_tokens is not None:
        raise ValueError("micro_batch_tokens packs micro-batches by tokens, per_device_train_batch_size has no effect: "
                         "set micro_batch_tokens=None to search for a number of rows")  # fmt: skip
    recipe = recipe if gpu is None else recipe.replace(gpu=gpu)
    search, best = _Search(recipe, *_sizes(recipe, keep_effective), progress), -1
    if search.highest(1 / 1.5) >= 0:  # else by far too large: the formula is right within percents
        from .simulation import simulate
        best = search.edge(len(search.sizes), "simulated", simulate)
    if best >= 0:
        with _attempts(recipe, model, attempt) as attempt:
            best = best if attempt is None else search.edge(best + 1, "measured", attempt)
    tries = pd.DataFrame(search.log, columns=list(Try._fields)).astype({"peak_reserved": "Int64"})
    return BatchSearch(search.made(search.sizes[best]) if best >= 0 else None, recipe, tries)


class _Search:
    """Looks for an edge between sizes that fit and sizes that don't. Places in `sizes`; -1 is before the first."""

    def __init__(self, recipe: Recipe, sizes: Sequence[int], made: Callable[[int], Recipe], progress: bool):
        self.budget, self.sizes, self.made, self.progress = recipe.card.budget, sizes, made, progress
        self.log: list[Try] = []
        self.estimates: dict[int, int] = {}

    def edge(self, high: int, how: str, run: Callable[[Recipe], Any]) -> int:
        """The last that fits below place `high`, which doesn't."""
        from tqdm.auto import tqdm

        from .memory.guard import oom_guard
        low = -1
        with tqdm(disable=not self.progress, unit="try", leave=False) as bar:
            while high - low > 1:
                index, peak = min(max(self._next(low, high, how), low + 1), high - 1), None
                bar.set_description(f"micro-batch {self.sizes[index]}, {how} (seconds each, with LoRA up to a minute)")
                with oom_guard() as oom:
                    peak = getattr(run(self.made(self.sizes[index])), "peak_reserved", None)
                fits = not oom and (peak is None or peak <= self.budget)
                self.log.append(Try(self.sizes[index], how, peak, fits))
                low, high = (index, high) if fits else (low, index)
                bar.update()
        return low

    def _next(self, low: int, high: int, how: str) -> int:
        tried = [row for row in self.log if row.how == how]
        if how == "measured" and low < 0:  # downwards, by more and more until one fits
            return high - max(1, 2 ** len(tried) // 2)
        if how == "measured" or len(tried) % 4 == 3:
            return (low + high) // 2
        # the formula, corrected by how far off it was at the last try
        return self.highest(tried[-1].peak_reserved / self._estimate(tried[-1][0]) if tried else 1.0)

    def highest(self, off: float) -> int:
        """The last place whose estimate, times `off`, is within the budget. Many sizes are halved; of few all are
        asked, for a whole batch may take less than half of it: accumulation keeps earlier gradients."""

        def within(index: int) -> bool:
            return self._estimate(self.sizes[index]) * off <= self.budget

        if len(self.sizes) <= 64:
            return max(filter(within, range(len(self.sizes))), default=-1)
        high = 1  # most are by far too large: double first
        while high < len(self.sizes) and within(high - 1):
            high *= 2
        return bisect.bisect_left(range(min(high, len(self.sizes))), True, key=lambda index: not within(index)) - 1

    def _estimate(self, size: int) -> int:
        if size not in self.estimates:
            found = estimate(self.made(size))
            self.estimates[size] = found.peak_reserved
            self.log.append(Try(size, "estimated", found.peak_reserved, found.fits))
        return self.estimates[size]


def _sizes(recipe: Recipe, keep_effective: bool) -> tuple[Sequence[int], Callable[[int], Recipe]]:
    """The micro-batches that the recipe may have, from the smallest on, and what makes the recipe with one of them."""
    steps = recipe.steps_per_generation or recipe.gradient_accumulation_steps
    if not keep_effective:
        unit = recipe.num_generations // math.gcd(recipe.num_generations, steps)
        return range(unit, LARGEST + 1, unit), lambda size: recipe.replace(per_device_train_batch_size=size)
    made, whole = {}, recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    for size in (n for n in range(1, whole + 1) if whole % n == recipe.generation_batch_size % n == 0):
        fields = {"per_device_train_batch_size": size, "gradient_accumulation_steps": whole // size}
        if recipe.steps_per_generation is not None:
            fields["steps_per_generation"] = recipe.generation_batch_size // size
        with suppress(ValueError):  # where something in the recipe goes without accumulation only
            made[size] = recipe.replace(**fields)
    return list(made), made.__getitem__


@contextmanager
def _attempts(recipe: Recipe, model: Any, attempt: Callable[[Recipe], Any] | None) -> Iterator[Any]:
    """What tries a recipe for real; None where nothing can."""
    import torch
    at_hand = model is not None or recipe.model in WITH_WEIGHTS or Path(recipe.model).expanduser().is_dir()
    if attempt is not None or not (torch.cuda.is_available() and at_hand):
        yield attempt
        return
    from . import _trl, models
    from .simulation import measure
    model = models.load(recipe.model, **_trl.model_init_kwargs(recipe))[0] if model is None else model
    home, allowed = next(model.parameters()).device, torch.cuda.get_per_process_memory_fraction()
    try:
        model.to("cpu")  # each try moves a copy of its own to the card, and may change it
        share = recipe.card.budget / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(allowed, share))
        yield lambda smaller: measure(smaller, copy.deepcopy(model))
    finally:
        torch.cuda.set_per_process_memory_fraction(allowed)
        model.to(home)
