"""What to change so that a recipe fits its card, the cheapest change first; or what room is left for.

>>> from grpo_lab.recipe import Recipe
>>> advice = advise(Recipe.preset("baseline", model="Qwen2.5-0.5B"), verify=False)
>>> advice.fits, list(advice.changes["change"])[0]
(True, 'chunked logits')

The search asks `estimate`, some hundred times; the answer is checked once with `simulate`. Free changes come first, then
what costs time, precision, the optimizer's states, adapters; what changes the task (lengths, answers a prompt, the model)
comes last and says so. Of the changes found, those that turn out not to be needed are taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from . import gpus
from ._advice_room import LONGEST, free, longest_completion, room
from ._advice_search import Taken, search
from ._advice_text import prose
from .estimation import estimate
from .recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd

    from .memory import MemoryReport

__all__ = ["LONGEST", "Advice", "Taken", "advise", "longest_completion"]
TRIES = 4  # how often the instrument may disagree before the search gives up


@dataclass(frozen=True, repr=False)
class Advice:
    """What `advise` found.

    ``recipe``: one that fits, or None. ``taken``: the changes, in order. Where none was needed: ``room``, what could
    be given back, each alone, and ``free``, what costs nothing and would take less, one after the other.
    ``verified``: the instrument's report on ``recipe``. ``least``: the smallest peak that was found, in bytes.
    ``disagreed``: how often the instrument refused what the formula had let pass. ``notes``: what of the recipe had
    to be taken otherwise before the search (``start`` is what it began with).
    """

    start: Recipe
    recipe: Recipe | None
    taken: tuple[Taken, ...]
    room: tuple[tuple[str, Recipe], ...]
    free: tuple[Taken, ...]
    verified: MemoryReport | None
    least: int
    disagreed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.recipe is not None

    @property
    def changes_task(self) -> bool:
        """Whether lengths, answers a prompt or the model had to change."""
        return any(taken.change.changes_task for taken in self.taken)

    @cached_property
    def changes(self) -> pd.DataFrame:
        """DataFrame: one row a change, with the bytes that it saves at the peak, in this order."""
        import pandas as pd

        rows = [(t.change.what, t.change.kind, t.before - t.after, t.change.cost, t.change.trl, t.change.why)
                for t in self.taken]  # fmt: skip
        return pd.DataFrame(rows, columns=["change", "kind", "saves", "cost", "TRL", "why"])

    @cached_property
    def text(self) -> str:
        """The same as prose."""
        return "\n".join(prose(self))

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = self.changes.assign(saves=[taken.effect.removeprefix("saves ") for taken in self.taken])
        html = table.drop(columns="kind").to_html(index=False, max_rows=None) if len(table) else ""
        lines = self.text.splitlines()
        count = len(self.notes) + 1  # the table says what the numbered lines say; where there is none, all are shown
        head, rest = (lines[:count], lines[count + len(table) :]) if len(table) else (lines, [])
        return "".join(f"<p>{escape(line)}</p>" for line in head) + html + "".join(f"<p>{escape(r)}</p>" for r in rest)


def advise(recipe: Recipe, gpu: str | int | None = None, *, verify: bool = True) -> Advice:
    """The cheapest set of changes with which ``recipe`` fits its card, or ``gpu``.

    ``verify`` runs the answer through `simulate` (some seconds) and goes on searching where that disagrees. A recipe that
    fits comes back unchanged, with what there is room for. Where nothing fits, ``recipe`` is None and ``least`` says what
    the leanest version would need. TypeError for anything but a Recipe; ValueError for an unknown card.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"advise takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    start = recipe if gpu is None else _on(recipe, gpu)
    notes = tuple(_notes(recipe, start))
    budget, report = start.card.budget, None
    for attempt in range(TRIES):
        found, taken, least = search(start, budget)
        if found is None or not verify:
            break
        from .simulation import simulate

        report = simulate(found)
        if report.fits:
            break
        # the instrument needs more than the formula knew: look for as much less
        budget -= max(report.peak_allocated - estimate(found).peak_allocated, budget // 50)
    else:
        found = None
    fits = found is not None and not taken
    return Advice(start, found, taken if found is not None else (), room(found) if fits else (),
                  free(found) if fits else (), report, least, attempt, notes)  # fmt: skip


def _notes(asked: Recipe, start: Recipe) -> Iterator[str]:
    if (asked.dtype, asked.autocast, asked.lora_dtype) != (start.dtype, start.autocast, start.lora_dtype):
        autocast = f", autocast {start.autocast}" if start.autocast else ""
        yield f"{start.card.name} has no bfloat16: taken with weights in {start.dtype}{autocast}."


def _on(recipe: Recipe, gpu: str | int) -> Recipe:
    """The recipe on another card; where that has no bfloat16, float16 autocast over float32 trainable weights."""
    halves = [name for name in ("dtype", "autocast", "lora_dtype") if getattr(recipe, name) == "bfloat16"]
    if gpus.get(gpu).bf16 or not halves:
        return recipe.replace(gpu=gpu)
    fields: dict[str, Any] = {"autocast": "float16", "lora_dtype": "float32"}
    if recipe.dtype == "bfloat16":  # adapters leave the weights alone, so these may stay at 16 bits
        fields["dtype"] = "float32" if recipe.lora_rank is None else "float16"
    return recipe.replace(gpu=gpu, **fields)
