"""Tensors of a recipe by their size: what an allocation of so many bytes may have been.

>>> from grpo_lab.recipe import Recipe
>>> recipe = Recipe(model="Qwen2.5-1.5B", max_completion_length=1024, dtype="float32")
>>> print(suspects("4.64 GiB", recipe)[0])
8 x 1,024 x 151,936 x 4 B = 4.64 GiB: logits, divided by the temperature
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .estimation import estimate, human
from .formula.shape import Shape, tensors
from .memory.cuda_words import UNITS
from .memory.segments import LARGE_SEGMENT, SMALL_SEGMENT, round_up, segment_size
from .recipe import Recipe

MOST = 6  # candidates: more explain nothing
# The estimate's category -> the kind of remedy. Weights and what has their shapes are told below, once for all.
KINDS = {"logits": "logits", "KV cache": "cache", "activations": "activations"}


@dataclass(frozen=True)
class Candidate:
    """A tensor of the recipe that has the size in the message."""

    what: str
    factors: tuple[int, ...]
    kind: str

    @property
    def bytes(self) -> int:
        return prod(self.factors)

    def __str__(self) -> str:
        return f"{' x '.join(f'{n:,}' for n in self.factors)} B = {human(self.bytes)}: {self.what}"


def suspects(asked: str, recipe: Recipe) -> tuple[Candidate, ...]:
    """The recipe's tensors whose size reads as ``asked`` ("1.90 GiB"), to its last digit; the likeliest first.

    PyTorch names what it asked the driver for: above 10 MiB that is the tensor, rounded up to 2 MiB.
    """
    if says_nothing(asked):
        return ()
    found: dict[tuple[int, str], Candidate] = {}
    for candidate in (*_own(recipe), *_of_others(recipe)):
        if _reads_as(candidate.bytes, asked):
            key = candidate.bytes, candidate.kind
            found[key] = candidate if candidate.kind == "activations" else found.get(key, candidate)    # the plainer name
    return tuple(found.values())[:MOST] or tuple(_grown(asked, recipe))


def says_nothing(asked: str) -> bool:
    """Whether it is the segment that PyTorch asks for on behalf of any smaller tensor.

    >>> says_nothing("20.00 MiB"), says_nothing("22.00 MiB")
    (True, False)
    """
    return any(_shown(nbytes, asked) for nbytes in (SMALL_SEGMENT, LARGE_SEGMENT))


def _reads_as(nbytes: int, asked: str) -> bool:
    return _shown(nbytes, asked) or _shown(segment_size(round_up(nbytes)), asked)


def _shown(nbytes: int, asked: str) -> bool:
    """Whether so many bytes are ``asked``, in its unit and with as many decimals."""
    number, unit = asked.split()
    decimals = len(number.partition(".")[2])
    return unit in UNITS and f"{nbytes / UNITS[unit]:.{decimals}f}" == number


def _own(recipe: Recipe) -> Iterator[Candidate]:
    """What the estimate counts, term by term: tensors of our own step."""
    moments = estimate(recipe).moments
    s = Shape(recipe)
    for name in sorted(moments, key=lambda phase: -moments[phase].bytes):
        for term in moments[name].terms:
            if term.category in KINDS and len(term.factors) > 1:
                first, *rest = term.factors
                factors = (s.B, s.T, *rest) if first == s.B * s.T else term.factors
                yield Candidate(f"{term.category}, {term.what}", factors, KINDS[term.category])


def _of_others(recipe: Recipe) -> Iterator[Candidate]:
    """What comes and goes between the fullest moments, and what other implementations of the step make."""
    s = Shape(recipe)
    widths = dict.fromkeys((s.a, 4, 2))
    for rows, whose in _rows(s, recipe):
        yield from _logits(s, rows, whose)
        for width in widths:
            yield Candidate(f"attention scores of a layer, {whose}", (rows, s.heads, s.T, s.T, width), "scores")
            yield Candidate(f"the MLP's activations of a layer, {whose}", (rows, s.T, s.I, width), "activations")
            yield Candidate(f"hidden states, {whose}", (rows, s.T, s.h, width), "activations")
    for width in widths:
        for rows in dict.fromkeys((recipe.rollout_batch, recipe.generation_batch_size)):
            yield Candidate("keys and values of all layers", (s.L, 2, rows, s.T, s.kv, width), "cache")
            yield Candidate("keys (or values) of a layer", (rows, s.T, s.kv, width), "cache")
            yield Candidate("logits of one token a sequence", (rows, s.V, width), "logits")
    roles = "a 16-bit or dequantized copy" if s.lora else "its gradient, an optimizer state or the optimizer's temporary"
    for width in dict.fromkeys((s.w, s.a) if s.lora else (s.w, 4)):
        for name, shape, _ in tensors(s):
            if shape:
                yield Candidate(f"{name}: the weight, {roles}", (*shape, width), "weights")


def _rows(s: Shape, recipe: Recipe) -> list[tuple[int, str]]:
    named = {s.B: "the micro-batch"}
    named.setdefault(recipe.generation_batch_size, "all sequences of the generation batch at once")
    named.setdefault(recipe.rollout_batch, "the sequences generated together")
    named.setdefault(1, "one row")
    return list(named.items())


def _logits(s: Shape, rows: int, whose: str) -> Iterator[Candidate]:
    for tokens, which in ((s.C, "the completions"), (s.C + 1, "the completions"), (s.T, "prompt and completion"),
                          (s.T - 1, "prompt and completion"), (s.P, "the prompts")):  # fmt: skip
        for width, words in ((4, "one float32 copy of the logits"), (2, "the logits in 16 bits")):
            yield Candidate(f"{words} over {which}, {whose}", (rows, tokens, s.V, width), "logits")


def _grown(asked: str, recipe: Recipe) -> Iterator[Candidate]:
    """A layer's keys or values after so many tokens: generation makes them anew, one longer, at each."""
    s, (number, unit) = Shape(recipe), asked.split()
    if unit not in UNITS or not s.kv:
        return
    for rows in dict.fromkeys((recipe.rollout_batch, recipe.generation_batch_size)):
        each = rows * s.kv * s.w
        tokens = int(float(number) * UNITS[unit] / each)
        if s.P < tokens < s.T and _reads_as(tokens * each, asked):
            what = f"keys (or values) of a layer while sequences of {s.T:,} tokens are generated, after about {tokens:,}"
            yield Candidate(what, (rows, tokens, s.kv, s.w), "cache")
            return
