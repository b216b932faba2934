"""What an out-of-memory message means: which tensor it was, whether memory was short or only in pieces, what to do.

>>> from grpo_lab.recipe import Recipe
>>> message = ("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 15.73 GiB of which 0.31 GiB is "
...            "free. Including non-PyTorch memory, this process has 15.41 GiB memory in use. Of the allocated memory 9.90 GiB "
...            "is allocated by PyTorch, and 5.02 GiB is reserved by PyTorch but unallocated.")
>>> diagnose(message).kind
'fragmentation'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from math import prod
from typing import Any

from .estimation import estimate, human
from .formula.shape import Shape
from .memory.cuda_words import other_processes, parse, size
from .memory.segments import round_up, segment_size
from .recipe import Recipe

# How a library says that memory ran out: PyTorch on CUDA, HIP, XPU and MPS; the driver; cuBLAS; cuDNN; the CPU's allocator.
_CARD = re.compile(r"(CUDA|HIP|XPU|MPS backend) out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation"
                   r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDA driver error: out of memory")
_HOST = re.compile(r"can't allocate memory|not enough memory: you tried to allocate|MemoryError|Cannot allocate memory")
_HOST_BYTES = re.compile(r"tried to allocate (\d+) bytes")
SHARE = 0.25  # of what is reserved: unallocated bytes beyond it, and more than were asked for, are fragmentation
EXPANDABLE = ('set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before torch is imported (before PyTorch 2.9: '
              "PYTORCH_CUDA_ALLOC_CONF); in a notebook, os.environ[...] in the first cell")  # fmt: skip
REMEDY = {
    "logits": 'logits="chunked" (TRL 1.16 chunks them always), or a smaller per_device_train_batch_size',
    "scores": 'attn_implementation="sdpa": no score is kept',
    "cache": "rollout_batch_size: fewer sequences at once, and a smaller cache",
    "weights": "LoRA, or an optimizer with smaller states (adamw_8bit); every trained weight has a gradient and states",
    "activations": "a smaller per_device_train_batch_size with more accumulation, or activation checkpointing",
}


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


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found.

    ``kind``: "shortage", "fragmentation", "another process", "library" (the driver or cuBLAS found no room, in words
    without numbers), "host memory", or "not an out-of-memory error". ``numbers``: bytes in the message by name, as
    :func:`grpo_lab.memory.cuda_words.parse` has them. ``candidates``: tensors of the recipe that have the size asked for.
    ``advice``: what to do, in order.
    """

    kind: str
    numbers: dict[str, int | None]
    others: int
    candidates: tuple[Candidate, ...]
    advice: tuple[str, ...]
    message: str

    @property
    def requested(self) -> int | None:
        return self.numbers.get("requested")

    @property
    def text(self) -> str:
        headline = _HEADLINES[self.kind].format(**self._words())
        if self.kind == "shortage" and self.numbers.get("allocated") is None:
            headline = f"The card was full: {self._words()['requested']} were asked for. (The message has no more numbers.)"
        lines = [headline]
        if self.candidates:
            lines.append("What was asked for is as large as:")
            lines += [f"- {candidate}" for candidate in self.candidates]
        lines += [f"{number}. {words}" for number, words in enumerate(self.advice, 1)]
        return "\n".join(lines)

    def _words(self) -> dict[str, str]:
        names = ("requested", "capacity", "free", "allocated", "unallocated", "reserved")
        words = {name: "an unknown amount" if self.numbers.get(name) is None else human(self.numbers[name]) for name in names}
        return words | {"others": human(self.others)}

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        first, *rest = self.text.splitlines()
        items = "".join(f"<li>{escape(line.lstrip('-0123456789. '))}</li>" if line[:1] in "-0123456789" else
                        f"</ul><p>{escape(line)}</p><ul>" for line in rest)  # fmt: skip
        return f"<p><b>{escape(self.kind)}</b>: {escape(first)}</p><ul>{items}</ul>"


_HEADLINES = {
    "shortage": "The card was full: {requested} were asked for, {allocated} were in use by tensors, {unallocated} were kept "
                "by PyTorch without being used, and {free} were free.",
    "fragmentation": "There was room, but in pieces: {requested} were asked for while PyTorch kept {unallocated} of its "
                     "{reserved} unused.",
    "another process": "Something else has the card: other processes use {others} of {capacity}, and this one's tensors "
                       "{allocated}.",
    "library": "The driver or a library found no room beside what PyTorch keeps; its message has no numbers.",
    "host memory": "This was the computer's own memory, not a card's: {requested} were asked for.",
    "not an out-of-memory error": "This is not an out-of-memory error: nothing in it says that memory ran out. Paste the "
                                  "whole message, from the line with 'out of memory' on.",
}  # fmt: skip


def diagnose(error_or_text: Any, recipe: Recipe | None = None) -> Diagnosis:
    """What a message (or the exception itself) means; with a ``recipe``, which of its tensors has that size.

    Takes a whole traceback, too; of several messages the last counts. What isn't about memory gets the kind "not an
    out-of-memory error". ValueError for empty text, TypeError for what is neither text nor an exception.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r}: takes a Recipe, or None")
    text = _text(error_or_text)
    places = list(_CARD.finditer(text))
    message = text[places[-1].start():] if places else text
    numbers: dict[str, int | None] = parse(message)
    if places:
        others = _others(message, numbers)
        kind = _kind(numbers, others)
    elif _HOST.search(text):
        kind, others = "host memory", 0
        asked = _HOST_BYTES.search(text)
        numbers["requested"] = int(asked[1]) if asked else None
    else:
        return Diagnosis("not an out-of-memory error", {}, 0, (), (), text)
    found = _candidates(message, recipe) if recipe is not None and kind != "host memory" else ()
    return Diagnosis(kind, numbers, others, found, tuple(_advice(kind, numbers, found, recipe)), message)


def _text(given: Any) -> str:
    if isinstance(given, BaseException):
        given = f"{type(given).__name__}: {given}"
    elif isinstance(given, (list, tuple)):
        given = "\n".join(_text(part) for part in given)
    if not isinstance(given, str):
        raise TypeError(f"diagnose takes an error or its text, not {type(given).__name__}")
    if not given.strip():
        raise ValueError("diagnose: the text is empty; paste the error's message")
    return re.sub(r"\s+", " ", given)  # a terminal may have broken lines anywhere


def _others(message: str, numbers: dict[str, int | None]) -> int:
    """Bytes that other processes hold: as named, or as what is missing between capacity, free and this process."""
    if named := other_processes(message):
        return named
    capacity, free, in_use = (numbers[name] for name in ("capacity", "free", "in_use"))
    return 0 if None in (capacity, free, in_use) else max(0, capacity - free - in_use)


def _kind(numbers: dict[str, int | None], others: int) -> str:
    requested, unallocated, free, reserved = (numbers[n] for n in ("requested", "unallocated", "free", "reserved"))
    if requested is None:
        return "library"
    if others and others + (free or 0) >= requested and others > 0.05 * (numbers["capacity"] or 0):
        return "another process"
    if unallocated is not None and reserved and unallocated >= requested and unallocated >= SHARE * reserved:
        return "fragmentation"
    return "shortage"


# ---- which tensor ---------------------------------------------------------------------------------------------------


def _candidates(message: str, recipe: Recipe) -> tuple[Candidate, ...]:
    """Tensors whose size, or that of the segment that PyTorch asks the driver for on their behalf, reads as in the message."""
    asked = re.search(r"(?:[Tt]ried to allocate|Requested size:) ([\d.]+ \w+)", message)
    if asked is None:
        return ()
    found: dict[int, Candidate] = {}
    for candidate in _tensors(recipe):
        nbytes = candidate.bytes
        words = {size(nbytes), size(segment_size(round_up(nbytes))), f"{nbytes / 2**30:.2f} GiB"}
        if asked[1] in words:
            found.setdefault(nbytes, candidate)
    return tuple(found.values())


def _tensors(recipe: Recipe) -> list[Candidate]:
    """The large tensors of a step, those of other implementations among them; the likelier ones first."""
    s, rows = Shape(recipe), recipe.rollout_batch
    found = []
    for batch, whose in ((s.B, "the micro-batch"), (recipe.generation_batch_size, "all sequences at once"), (1, "one row")):
        for tokens, which in ((s.C, "the completions"), (s.C + 1, "the completions"), (s.T, "prompt and completion"),
                              (s.T - 1, "prompt and completion")):  # fmt: skip
            for width in (4, 2):
                kind = "one float32 copy of the logits" if width == 4 else "the logits in 16 bits"
                found.append(Candidate(f"{kind} over {which}, {whose}", (batch, tokens, s.V, width), "logits"))
        for width in (4, 2):
            what = f"attention scores of a layer, {whose}"
            found.append(Candidate(what, (batch, s.heads, s.T, s.T, width), "scores"))
    for width in (2, 4):
        found.append(Candidate("keys (or values) of a layer, all sequences", (rows, s.T - 1, s.kv, width), "cache"))
        found.append(Candidate("keys and values of all layers", (s.L, 2, rows, s.T, s.kv, width), "cache"))
        found.append(Candidate("logits of one token a sequence", (rows, s.V, width), "logits"))
        found.append(Candidate("a gradient or optimizer state of the embedding", (s.V, s.h, width), "weights"))
        found.append(Candidate("a gradient or optimizer state of an MLP weight", (s.I, s.h, width), "weights"))
        found.append(Candidate("the MLP's activations of a layer", (s.B, s.T, s.I, width), "activations"))
        found.append(Candidate("hidden states", (s.B, s.T, s.h, width), "activations"))
    return [candidate for candidate in found if candidate.bytes >= 2**20]


# ---- what to do -----------------------------------------------------------------------------------------------------


def _advice(kind: str, numbers: dict[str, int | None], found: tuple[Candidate, ...], recipe: Recipe | None) -> list[str]:
    if kind == "host memory":
        return ["fewer DataLoader workers, or weights in 16 bits while they are loaded; a card's settings don't help"]
    first = []
    if kind == "fragmentation":
        first.append(EXPANDABLE)
    elif kind == "another process":
        first.append("nvidia-smi lists the processes: end those you don't need (other notebooks' kernels, a serving engine)")
    elif kind == "library":
        first.append("cuBLAS and the driver take memory beside PyTorch's: leave them some hundred MiB "
                     "(torch.cuda.set_per_process_memory_fraction), or make the step smaller")  # fmt: skip
    first += dict.fromkeys(REMEDY[candidate.kind] for candidate in found)
    unallocated, requested = numbers.get("unallocated"), numbers.get("requested")
    if kind == "shortage" and None not in (unallocated, requested) and unallocated >= requested:
        first.append(f"{EXPANDABLE}; {human(unallocated)} were kept unused")
    if recipe is not None and kind != "another process" and not estimate(recipe).fits:
        from .advice import advise

        plan = advise(recipe, verify=False)
        changes = ", ".join(taken.change.what for taken in plan.taken)
        first.append(f"to make the recipe fit: {changes}" if plan.fits else plan.text)
    elif recipe is None:
        first.append("diagnose(message, recipe) says which tensor it was; advise(recipe) what to change")
    return first
