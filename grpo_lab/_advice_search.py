"""Down the ladder of changes until a recipe fits, then back up past those that turn out not to be needed."""

from __future__ import annotations

from dataclasses import dataclass

from ._ladder import RUNGS, Change, Rung, forgotten_dtype, joined
from .estimation import estimate, human, reserved
from .recipe import Recipe

Chosen = list[tuple[int, Change]]  # with the rung's number: several steps of one rung are told as one change


@dataclass(frozen=True)
class Taken:
    """A change in its place: what the peak was before it and is after it, in bytes.

    ``phase`` is the one that the change lowers the most, which need not be the peak's; it has its own before and
    after.
    """

    change: Change
    before: int
    after: int
    peak_phase: str
    phase: str
    phase_before: int
    phase_after: int

    @property
    def effect(self) -> str:
        """What it does to the peak, or, where something else owns that, to the phase that it is about."""
        if self.after < self.before:
            return f"saves {human(self.before - self.after)} at the peak"
        if self.phase_after < self.phase_before:
            return (f"saves nothing at the peak yet, which phase {self.peak_phase!r} owns, but "
                    f"{human(self.phase_before - self.phase_after)} in phase {self.phase!r}")  # fmt: skip
        return "saves nothing alone, but is needed with the rest"


def search(start: Recipe, budget: int) -> tuple[Recipe | None, tuple[Taken, ...], int]:
    """A recipe within ``budget`` bytes, the changes that lead there, and the smallest peak that was met."""
    now, chosen, least = start, [], estimate(start).peak_reserved
    for index, rung in enumerate(RUNGS):
        if fits(now, budget):
            break
        now, changes = _best(now, rung, budget)
        chosen += [(index, change) for change in changes]
        least = min(least, estimate(now).peak_reserved)
    if not fits(now, budget):
        return None, (), least
    return *told(start, together(_needed(start, chosen, budget))), least


def fits(recipe: Recipe, budget: int) -> bool:
    return estimate(recipe).peak_reserved <= budget


def chain(recipe: Recipe, rung: Rung) -> list[tuple[Change, Recipe]]:
    """All that one rung can do, step by step."""
    links = []
    while (change := rung(recipe)) is not None:
        try:
            recipe = recipe.replace(**change.fields)
        except ValueError:  # doesn't go with the rest of the recipe
            break
        links.append((change, recipe))
    return links


def told(start: Recipe, changes: list[Change]) -> tuple[Recipe, tuple[Taken, ...]]:
    """The changes one after the other, with the peaks between them."""
    taken, now, fields = [], start, {}
    for change in changes:
        fields |= change.fields
        try:
            after = start.replace(**fields)
        except ValueError:  # goes only with a later one
            after = now
        taken.append(_taken(change, now, after))
        now = after
    return start.replace(**fields), tuple(taken)


def together(chosen: Chosen) -> list[Change]:
    """Several steps of one rung as one change; without those that a later one makes void."""
    changes: dict[int, Change] = {}
    for index, change in chosen:
        changes[index] = joined(changes[index], change) if index in changes else change
    told_ = list(changes.values())
    later = [{name for change in told_[i + 1 :] for name in change.fields} for i in range(len(told_))]
    return [change for change, after in zip(told_, later, strict=True) if set(change.fields) - after]


def _best(now: Recipe, rung: Rung, budget: int) -> tuple[Recipe, list[Change]]:
    """The first of the rung's steps that fits, else the one that leaves least too much.

    Looks past a step that helps nothing: two micro-batches keep the gradients of the first, which half the
    activations may not make up for, and eight take no more than two.
    """
    best, steps, too_much, links = now, 0, _too_much(now, budget), chain(now, rung)
    for count, (_, after) in enumerate(links, 1):
        if fits(after, budget):
            best, steps = after, count
            break
        if (left := _too_much(after, budget)) < too_much:
            best, steps, too_much = after, count, left
    return best, [change for change, _ in links[:steps]]


def _too_much(recipe: Recipe, budget: int) -> int:
    """Bytes above the budget, summed over the phases: what a change lowers may not be the peak yet."""
    return sum(max(0, reserved(moment.bytes) - budget) for moment in estimate(recipe).moments.values())


def _needed(start: Recipe, chosen: Chosen, budget: int) -> Chosen:
    """As few steps of each rung as will do, the most costly rung tried first, until nothing more can be left out.

    What costs nothing stays where it lowers the peak; and no trap is laid that the ladder itself warns of.
    """
    kept: Chosen = chosen
    while True:
        before = kept
        for rung in dict.fromkeys(index for index, _ in reversed(before)):
            steps = [step for step in kept if step[0] == rung]
            for count in range(len(steps)):  # not from the end: one step less may take more than none
                fewer = [step for step in kept if step[0] != rung or step in steps[:count]]
                if _do(start, fewer, kept, budget):
                    kept = fewer
                    break
        if len(kept) == len(before):
            return kept


def _do(start: Recipe, fewer: Chosen, kept: Chosen, budget: int) -> bool:
    """Whether ``fewer`` steps do as well as those ``kept``."""
    recipe, now = _all(start, fewer), _all(start, kept)
    if recipe is None or now is None or not fits(recipe, budget) or forgotten_dtype(recipe) is not None:
        return False
    free = any(change.keep for index, change in kept if (index, change) not in fewer)
    return not free or estimate(recipe).peak_allocated <= estimate(now).peak_allocated


def _all(start: Recipe, chosen: Chosen) -> Recipe | None:
    fields = {name: value for _, change in chosen for name, value in change.fields.items()}
    try:
        return start.replace(**fields)
    except ValueError:
        return None


def _taken(change: Change, before: Recipe, after: Recipe) -> Taken:
    old, new = estimate(before), estimate(after)
    falls = {name: moment.bytes - new.moments[name].bytes
             for name, moment in old.moments.items() if name in new.moments}  # fmt: skip
    phase = max(falls, key=falls.__getitem__)
    return Taken(change, old.peak_allocated, new.peak_allocated, old.peak_phase, phase,
                 old.moments[phase].bytes, new.moments[phase].bytes)  # fmt: skip
