"""What a recipe would take, by arithmetic alone: without torch, in about a millisecond.

>>> from grpo_lab.recipe import Recipe
>>> report = estimate(Recipe(model="SmolLM2-135M", max_completion_length=512))
>>> report.peak_phase, report.fits
('forward', True)
>>> print(report.explain().splitlines()[0])
the peak, in phase 'forward':

The formulas, with the tensor that each one counts, are those of :mod:`grpo_lab.formula`. `simulate` runs the real code
and is the measure of them (``scripts/bench_estimate.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

from .formula.step import play
from .formula.tape import Moment, Term
from .recipe import Recipe

GiB, MiB = 2**30, 2**20
# Reserved over allocated. The allocator takes whole segments and keeps what is freed; free blocks between used ones
# can't be given back. How much depends on the order of events, which no formula knows: the median over the recipes of
# scripts/bench_estimate.py, which prints it with its spread. Short of memory, wholly free segments go back first.
RESERVED_MARGIN = 0.05


@dataclass(frozen=True, repr=False)
class Estimate:
    """`MemoryReport`'s counterpart: bytes are ints, ``budget`` is what the card leaves to PyTorch.

    ``moments``: phase -> its fullest moment, a :class:`grpo_lab.formula.tape.Moment` with the tensors in it.
    """

    recipe: Recipe
    moments: Mapping[str, Moment]
    budget: int
    card: str
    simulated = False

    @cached_property
    def peak_phase(self) -> str:
        """The phase that owns the peak."""
        return max(self.moments, key=lambda name: self.moments[name].bytes)

    @property
    def peak_allocated(self) -> int:
        return self.moments[self.peak_phase].bytes

    @property
    def peak_reserved(self) -> int:
        """`peak_allocated` and a margin: what the allocator keeps beyond, in the median (`RESERVED_MARGIN`)."""
        return reserved(self.peak_allocated)

    @property
    def fits(self) -> bool:
        """Whether `peak_reserved` stays within the budget."""
        return self.peak_reserved <= self.budget

    def by_category(self, phase: str | None = None) -> dict[str, int]:
        """Category -> its bytes at a phase's fullest moment (None: at the peak), the largest first."""
        moment = self.moments[self.peak_phase if phase is None else phase]
        sums: dict[str, int] = {}
        for term in moment.terms:
            sums[term.category] = sums.get(term.category, 0) + term.blocks
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @cached_property
    def phases(self):
        """DataFrame: one row a phase, ``peak_allocated`` and ``peak_reserved``."""
        import pandas as pd

        rows = [(moment.bytes, reserved(moment.bytes)) for moment in self.moments.values()]
        frame = pd.DataFrame(rows, index=list(self.moments), columns=["peak_allocated", "peak_reserved"])
        frame.index.name = "phase"
        return frame

    @cached_property
    def categories(self):
        """DataFrame: one row a category, ``bytes`` at the peak."""
        import pandas as pd

        frame = pd.DataFrame({"bytes": self.by_category()})
        frame.index.name = "category"
        return frame

    def explain(self, phase: str | None = None) -> str:
        """The sum with numbers in it, one line for tensors alike, the largest first: of a phase, or of the peak.

        >>> print(estimate(Recipe(model="SmolLM2-135M", optim="sgd")).explain("optimizer").splitlines()[1])
        parameters, embedding: 49,152 x 576 x 2 B = 54.0 MiB
        """
        name = self.peak_phase if phase is None else phase
        moment = self.moments[name]
        terms = sorted(together(moment.terms), key=lambda term: -term.bytes)
        what = "the peak, in phase" if name == self.peak_phase else "the fullest moment of phase"
        lines = [f"{what} {name!r}:"]
        lines += [line(term) for term in terms if term.bytes >= moment.bytes // 1000]
        small = [term for term in terms if term.bytes < moment.bytes // 1000]
        if small:
            lines.append(f"{len(small)} kinds below a thousandth: {human(sum(term.bytes for term in small))}")
        beyond = moment.bytes - sum(term.bytes for term in terms)
        if beyond:
            lines.append(f"what blocks keep beyond their tensors: {human(beyond)}")
        lines.append(f"sum: {human(moment.bytes)} allocated")
        if name == self.peak_phase:
            lines.append(f"with {RESERVED_MARGIN:.1%} that the allocator keeps in segments: "
                         f"{human(self.peak_reserved)}, of {human(self.budget)}: {self._verdict}")  # fmt: skip
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        return "fits" if self.fits else "does not fit"

    def __str__(self) -> str:
        owners = ", ".join(f"{name} {size / GiB:.2f}" for name, size in list(self.by_category().items())[:4])
        return (f"estimated on {self.card}: peak {human(self.peak_allocated)} allocated in phase "
                f"{self.peak_phase!r}, about {human(self.peak_reserved)} reserved, of {human(self.budget)}: "
                f"{self._verdict}\nat the peak (GiB): {owners}")  # fmt: skip

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = (self.categories["bytes"] / GiB).rename("GiB at the peak").to_frame()
        table["share"] = self.categories["bytes"] / max(1, self.peak_allocated)
        html = table.to_html(formatters={"GiB at the peak": "{:.2f}".format, "share": "{:.0%}".format})
        return "<p>" + escape(str(self).splitlines()[0]) + "</p>" + html


def estimate(recipe: Recipe, gpu: str | int | None = None) -> Estimate:
    """What a step of the recipe would take of its card (or of ``gpu``), as `simulate` counts it in the steady state.

    >>> estimate(Recipe(model="Qwen2.5-0.5B", gpu="RTX 3090", beta=0.04)).by_category()["reference model"] // 10**6
    988

    TypeError for anything but a Recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"estimate takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    if gpu is not None:
        recipe = recipe.replace(gpu=gpu)
    card = recipe.card
    return Estimate(recipe, play(recipe).peaks, card.budget, card.name)


def reserved(allocated: int) -> int:
    """Bytes with the margin."""
    return allocated + int(allocated * RESERVED_MARGIN)


def together(terms: tuple[Term, ...]) -> list[Term]:
    """Alike tensors in one term each.

    >>> together((Term("activations", "gate", (8, 2), 27), Term("activations", "gate", (8, 2))))
    [Term(category='activations', what='gate', factors=(8, 2), count=28)]
    """
    counts: dict[tuple, int] = {}
    for term in terms:
        counts[term[:3]] = counts.get(term[:3], 0) + term.count
    return [Term(*key, count) for key, count in counts.items()]


def line(term: Term) -> str:
    """One term as one reads it.

    >>> line(Term("logits", "and their gradients", (8, 1024, 151_936, 4), 3))
    'logits, and their gradients: 3 x 8 x 1,024 x 151,936 x 4 B = 13.91 GiB'
    """
    factors = ((term.count,) if term.count != 1 else ()) + term.factors
    return f"{term.category}, {term.what}: {' x '.join(f'{n:,}' for n in factors)} B = {human(term.bytes)}"


def human(nbytes: int) -> str:
    """GiB, or MiB below one."""
    return f"{nbytes / GiB:,.2f} GiB" if nbytes >= GiB else f"{nbytes / MiB:.1f} MiB"
