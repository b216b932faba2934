"""What `advise` found, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import gpus
from .estimation import estimate, human

if TYPE_CHECKING:
    from .advice import Advice


def prose(advice: Advice) -> Iterator[str]:
    start, before = advice.start, estimate(advice.start)
    card = f"{start.card.name} ({human(start.card.budget)} for PyTorch)"
    batches = (f"micro-batch {start.per_device_train_batch_size}, accumulation {start.gradient_accumulation_steps}, "
               f"generation batch {start.generation_batch_size}, rollout batch {start.rollout_batch}")  # fmt: skip
    yield from advice.notes
    if advice.recipe is None:
        yield (f"{start.model} on {card} with {batches}: does not fit, and nothing that was tried makes it fit. It needs "
               f"about {human(before.peak_reserved)} as it is; the leanest version found needs {human(advice.least)}.")  # fmt: skip
        yield _larger_card(advice.least)
        return
    if not advice.taken:
        yield f"{start.model} on {card} with {batches}: fits, about {human(before.peak_reserved)} reserved."
        if advice.room:
            yield "There is room for one of these:"
            yield from (f"- {what} (about {human(estimate(r).peak_reserved)} reserved)" for what, r in advice.room)
        if advice.free:
            yield "For more room, at no cost, one after the other:"
            yield from (f"- {t.change.what}: {t.effect}. {t.change.trl} ({t.change.why})" for t in advice.free)
        yield _checked(advice)
        return
    verdict = "fits by the formula, but not by the instrument" if before.fits else "does not fit"
    yield (f"{start.model} on {card} with {batches}: {verdict}, about {human(before.peak_reserved)} reserved in phase "
           f"{before.peak_phase!r}. {len(advice.taken)} change{'s' * (len(advice.taken) > 1)}, in this order:")  # fmt: skip
    for number, taken in enumerate(advice.taken, 1):
        yield f"{number}. {taken.change.what}: {taken.effect}. {taken.change.cost}. {taken.change.trl}. ({taken.change.why})"
    if advice.changes_task:
        yield "Careful: this changes what you asked for. Cheaper changes alone did not suffice."
    yield _checked(advice)


def _checked(advice: Advice) -> str:
    if advice.verified is None:
        found = estimate(advice.recipe)
        return f"Estimated with these: about {human(found.peak_reserved)} reserved (not simulated)."
    report = advice.verified
    return (f"Simulated with these: {human(report.peak_allocated)} allocated, {human(report.peak_reserved)} reserved at the "
            f"peak: fits.")  # fmt: skip


def _larger_card(least: int) -> str:
    cards = [gpus.get(name) for name in gpus.names()]
    enough = [card for card in cards if card.budget >= least]
    if not enough:
        return "No card that grpo_lab knows has as much."
    card = min(enough, key=lambda card: card.budget)
    return f"The smallest card that would do is {card.name}, with {human(card.budget)} for PyTorch."
