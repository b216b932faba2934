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
from ._advice_text import prose
from ._ladder import FREE, RUNGS, Change, joined
from .estimation import Estimate, estimate, human, reserved
from .recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd

    from .memory import MemoryReport

GiB = 2**30
LONGEST = 131_072  # tokens: longer completions are not looked for
TRIES = 4  # how often the instrument may disagree before the search gives up


@dataclass(frozen=True)
class Taken:
    """A change in its place: what the peak was before it and is after it."""

    change: Change
    before: int
    after: int


@dataclass(frozen=True, repr=False)
class Advice:
    """What `advise` found.

    ``recipe``: one that fits, or None. ``taken``: the changes, in order. Where none was needed: ``room``, what could be
    given back, each alone, and ``free``, what costs nothing and would take less, one after the other. ``verified``: the instrument's report on ``recipe``. ``least``: the smallest peak that was found, in bytes.
    ``notes``: what of the recipe had to be taken otherwise before the search (``start`` is what it began with).
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
        table = self.changes.assign(saves=[human(size) if size > 0 else "nothing alone" for size in self.changes["saves"]])
        html = table.drop(columns="kind").to_html(index=False, max_rows=None) if len(table) else ""
        lines = self.text.splitlines()
        count = len(self.notes) + 1  # the table says what the numbered lines say; where there is none, all are shown
        head, rest = (lines[:count], lines[-1:]) if len(table) else (lines, [])
        return "".join(f"<p>{escape(line)}</p>" for line in head) + html + "".join(f"<p>{escape(r)}</p>" for r in rest)


def advise(recipe: Recipe, gpu: str | int | None = None, *, verify: bool = True) -> Advice:
    """The cheapest set of changes with which ``recipe`` fits its card, or ``gpu``.

    ``verify`` runs the answer through `simulate` (some seconds) and goes on searching where that disagrees. A recipe that
    fits comes back unchanged, with what there is room for. Where nothing fits, ``recipe`` is None and ``least`` says what
    the leanest version would need. TypeError for anything but a Recipe; ValueError for an unknown card.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"advise takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    start = _available(recipe if gpu is None else _on(recipe, gpu))
    notes = tuple(_notes(recipe, start))
    budget, report = start.card.budget, None
    for attempt in range(TRIES):
        found, taken, least = _search(start, budget)
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
    return Advice(start, found, taken if found is not None else (), _room(found) if fits else (),
                  _free(found) if fits else (), report, least, attempt, notes)  # fmt: skip


def _available(recipe: Recipe) -> Recipe:
    """Offloads can't be counted yet: the recipe without them."""
    return recipe.replace(activation_offload=False, optimizer_offload=False)


def _notes(asked: Recipe, start: Recipe) -> Iterator[str]:
    if asked.activation_offload or asked.optimizer_offload:
        yield "Offloads are not available in this version, and left out."
    if (asked.dtype, asked.autocast, asked.lora_dtype) != (start.dtype, start.autocast, start.lora_dtype):
        autocast = f", autocast {start.autocast}" if start.autocast else ""
        yield f"{start.card.name} has no bfloat16: taken with weights in {start.dtype}{autocast}."


def _on(recipe: Recipe, gpu: str | int) -> Recipe:
    """The recipe on another card; where that has no bfloat16, in float32."""
    if gpus.get(gpu).bf16:
        return recipe.replace(gpu=gpu)
    fields: dict[str, Any] = {name: "float32" for name in ("dtype", "lora_dtype") if getattr(recipe, name) == "bfloat16"}
    if recipe.autocast == "bfloat16":
        fields |= {"autocast": "float16", "dtype": "float32" if recipe.lora_rank is None else "float16"}
    return recipe.replace(gpu=gpu, **fields)


# ---- down -----------------------------------------------------------------------------------------------------------


def _search(start: Recipe, budget: int) -> tuple[Recipe | None, tuple[Taken, ...], int]:
    """Down the ladder until it fits, then back up where a change turns out not to be needed."""
    now, chosen, least = start, [], estimate(start).peak_reserved
    for index, rung in enumerate(RUNGS):
        while not _fits(now, budget) and (change := rung(now)) is not None:
            after = _replaced(now, change)
            if after is None or not _worth(now, after):
                break
            now = after
            chosen.append((index, change))
            least = min(least, estimate(now).peak_reserved)
    if not _fits(now, budget):
        return None, (), least
    return *_told(start, _joined(_needed(start, chosen, budget))), least


def _fits(recipe: Recipe, budget: int) -> bool:
    return estimate(recipe).peak_reserved <= budget


def _replaced(recipe: Recipe, change: Change) -> Recipe | None:
    """None where the change doesn't go with the rest of the recipe."""
    try:
        return recipe.replace(**change.fields)
    except ValueError:
        return None


def _worth(before: Recipe, after: Recipe) -> bool:
    """Whether a change lowers the peak, or any phase that doesn't fit: what it lowers may not be the peak yet."""
    old, new = estimate(before), estimate(after)
    budget = before.card.budget
    too_large = [name for name, moment in old.moments.items() if reserved(moment.bytes) > budget]
    return any(new.moments[name].bytes < old.moments[name].bytes for name in too_large if name in new.moments) or any(
        name not in new.moments for name in too_large)  # fmt: skip


def _needed(start: Recipe, chosen: list[tuple[int, Change]], budget: int) -> list[tuple[int, Change]]:
    """Without the steps that aren't needed, the most costly tried first; what costs nothing stays."""
    kept = list(chosen)
    for step in reversed(chosen):
        without = [other for other in kept if other is not step]
        recipe = None if step[1].keep else _all(start, [change for _, change in without])
        if recipe is not None and _fits(recipe, budget):
            kept = without
    return kept


def _joined(chosen: list[tuple[int, Change]]) -> list[Change]:
    """Several steps of one rung as one change; without those that a later one makes void."""
    changes: dict[int, Change] = {}
    for index, change in chosen:
        changes[index] = joined(changes[index], change) if index in changes else change
    told = list(changes.values())
    later = [{name for change in told[i + 1 :] for name in change.fields} for i in range(len(told))]
    return [change for change, after in zip(told, later, strict=True) if set(change.fields) - after]


def _all(start: Recipe, changes: list[Change]) -> Recipe | None:
    fields: dict[str, Any] = {}
    for change in changes:
        fields |= change.fields
    try:
        return start.replace(**fields)
    except ValueError:
        return None


def _told(start: Recipe, changes: list[Change]) -> tuple[Recipe, tuple[Taken, ...]]:
    """The changes one after the other, with the peaks between them."""
    taken, now, fields = [], start, {}
    for change in changes:
        fields |= change.fields
        try:
            after = start.replace(**fields)
        except ValueError:  # goes only with a later one
            after = now
        taken.append(Taken(change, estimate(now).peak_allocated, estimate(after).peak_allocated))
        now = after
    return start.replace(**fields), tuple(taken)


# ---- up -------------------------------------------------------------------------------------------------------------


def _free(recipe: Recipe) -> tuple[Taken, ...]:
    """What costs nothing and lowers the peak, as far as it goes."""
    now, chosen = recipe, []
    for index, rung in enumerate(FREE):
        while (change := rung(now)) is not None and (after := _replaced(now, change)) is not None:
            if estimate(after).peak_allocated >= estimate(now).peak_allocated:
                break
            now = after
            chosen.append((index, change))
    return _told(recipe, _joined(chosen))[1]


def _room(recipe: Recipe) -> tuple[tuple[str, Recipe], ...]:
    """What a recipe that fits could give back, each alone, and how much longer its completions may get."""
    found = []
    for what, fields in _looser(recipe):
        try:
            looser = recipe.replace(**fields)
        except ValueError:
            continue
        if _fits(looser, recipe.card.budget):
            found.append((what, looser))
    longest = longest_completion(recipe)
    if longest is not None and longest > recipe.max_completion_length:
        found.append((f"completions of up to {longest:,} tokens", recipe.replace(max_completion_length=longest)))
    return tuple(found)


def _looser(recipe: Recipe) -> list[tuple[str, dict[str, Any]]]:
    size, accumulated = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    options: list[tuple[str, dict[str, Any]]] = []
    if recipe.quantization is not None:
        options.append(("weights in 16 bits instead of 4", {"quantization": None}))
    if recipe.lora_rank is not None and recipe.quantization is None:
        options.append(("every weight trained, without an adapter", {"lora_rank": None}))
    if recipe.activation_checkpointing:
        options.append(("no activation checkpointing: no second forward", {"activation_checkpointing": False}))
    if recipe.rollout_batch < recipe.generation_batch_size:
        options.append(("all sequences generated at once", {"rollout_batch_size": None}))
    if accumulated % 2 == 0 and not (recipe.steps_per_generation or 0) % 2:
        fields = {"per_device_train_batch_size": 2 * size, "gradient_accumulation_steps": accumulated // 2}
        if recipe.steps_per_generation is not None:
            fields["steps_per_generation"] = recipe.steps_per_generation // 2
        options.append((f"micro-batches of {2 * size}, accumulated {accumulated // 2} times", fields))
    return options


def longest_completion(recipe: Recipe, budget: int | None = None) -> int | None:
    """The most tokens a completion may have so that the recipe fits; None if not even one does.

    >>> longest_completion(Recipe(model="SmolLM2-135M", gpu="RTX 3090")) > 1000
    True
    """
    budget = recipe.card.budget if budget is None else budget

    def fits(length: int) -> bool:
        return _fits(recipe.replace(max_completion_length=length), budget)

    if not fits(1):
        return None
    low, high = 1, LONGEST
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
