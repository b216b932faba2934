"""What an out-of-memory message means: which tensor it was, whether memory was short or in pieces, what to do.

>>> message = ("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 15.73 GiB of which 0.31 "
...            "GiB is free. Including non-PyTorch memory, this process has 15.41 GiB memory in use. Of the allocated "
...            "memory 9.90 GiB is allocated by PyTorch, and 5.02 GiB is reserved by PyTorch but unallocated.")
>>> diagnose(message).kind
'fragmentation'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Any

from ._remedies import HEADLINES, advice, notes
from ._suspects import Candidate, suspects
from .estimation import human
from .memory.cuda_words import SIZE, other_processes, parse
from .recipe import Recipe

# How a library says that a card's memory ran out: PyTorch on CUDA, HIP, XPU and MPS, and its cudaMallocAsync backend;
# the driver; cuBLAS, cuDNN, NCCL; vLLM. The bare name counts where a traceback has it, not in a line of code.
_CARD = re.compile(
    r"(?i:(CUDA|HIP|XPU|MPS backend) out of memory)|Allocation on device \S+ would exceed allowed memory"
    r"|^(\[rank\d+\]:\s*)?([\w.]+\.)?OutOfMemoryError(?=:|\s*$)"
    r"|(?i:\bout of memory)(?=\s*([.,:;!)'\"\]]|$|allocating\b|at\b))"
    r"|cudaErrorMemoryAllocation|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublasCreate"
    r"|No available memory for the cache blocks|is less than desired GPU memory utilization", re.MULTILINE)  # fmt: skip
# The computer's own memory: the CPU's allocator (c10/core/impl/alloc_cpu.cpp), Python, NumPy; Linux ends a process.
_HOST = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|\b(_Array)?MemoryError\b|Cannot allocate memory"
    r"|(?i:oom[-_ ]kill|\bkilled(?=\s*$|\s{2,})|exit ?code\s*:? *-9\b)|\bsignal 9\b|SIGKILL", re.MULTILINE)  # fmt: skip
_NUMBERLESS = re.compile(r"(?i:(CUDA|HIP|XPU|MPS backend) out of memory)|OutOfMemoryError|Allocation on device")
_HOST_SIZE = re.compile(rf"tried to allocate (\d+ bytes)|Unable to allocate {SIZE}")
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|Requested size:|Requested *:) {SIZE}")
SHARE = 0.15  # of what is reserved: unallocated bytes beyond it, and more than were asked for, are fragmentation
OTHERS = 0.1  # of the card: less in other processes isn't what a run fails for
CONTEXT = 2**30  # bytes that a CUDA context, its kernels and libraries take at most (gpus.Card.context)
LONGEST = 4000  # characters of a message that are looked at


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found.

    ``kind``: "shortage", "fragmentation", "another process", "limit" (a memory fraction or the like, below the card's
    size), "refused" (although the message calls enough memory free), "library" (the driver, cuBLAS or an engine found no
    room, in words without numbers), "host memory" (the computer's), or "not an out-of-memory error". ``numbers``: bytes
    in the message by name, as :func:`grpo_lab.memory.cuda_words.parse` has them. ``others``: bytes that other processes
    hold. ``candidates``: tensors of the recipe that have the size asked for. ``notes``: what else the numbers say.
    ``advice``: what to do, in order. ``message``: what of the text was read.
    """

    kind: str
    numbers: dict[str, int | None]
    others: int
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    message: str

    @property
    def requested(self) -> int | None:
        """Bytes that were asked for; None where the message doesn't say. So are the next."""
        return self.numbers.get("requested")

    @property
    def allocated(self) -> int | None:
        return self.numbers.get("allocated")

    @property
    def reserved(self) -> int | None:
        return self.numbers.get("reserved")

    @property
    def total(self) -> int | None:
        return self.numbers.get("capacity")

    @property
    def free(self) -> int | None:
        return self.numbers.get("free")

    @property
    def text(self) -> str:
        """The same as prose."""
        lines = [self._headline, *self.notes]
        if self.candidates:
            lines += ["What was asked for is as large as:", *(f"- {candidate}" for candidate in self.candidates)]
        return "\n".join(lines + [f"{number}. {words}" for number, words in enumerate(self.advice, 1)])

    @property
    def _headline(self) -> str:
        given = {name: human(size) for name, size in self.numbers.items() if size is not None}
        for sentence in HEADLINES[self.kind]:  # the first for which the message has the numbers
            try:
                return sentence.format(**given, others=human(self.others))
            except KeyError:
                continue
        raise AssertionError("the last headline of a kind needs no number")

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<p>{escape(words)}</p>" for words in (self._headline, *self.notes))
        found = "".join(f"<li>{escape(str(candidate))}</li>" for candidate in self.candidates)
        found = f"<p>What was asked for is as large as:</p><ul>{found}</ul>" if found else ""
        steps = "".join(f"<li>{escape(words)}</li>" for words in self.advice)
        return f"<p><b>{escape(self.kind)}</b></p>{head}{found}" + (f"<ol>{steps}</ol>" if steps else "")


def diagnose(error_or_text: Any, recipe: Recipe | None = None) -> Diagnosis:
    """What a message (or the exception itself) means; with a ``recipe``, which of its tensors has that size.

    >>> diagnose("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`").kind
    'library'

    Takes a whole traceback or log, a list of errors, or what `oom_guard` caught, too; of several messages the last that
    has numbers counts. What isn't about memory gets the kind "not an out-of-memory error". ValueError for empty text,
    TypeError for what is neither text nor an error.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r}: takes a Recipe, or None")
    text = _unquoted(_text(error_or_text))
    message = _last_message(text)
    numbers: dict[str, int | None] = parse(message or "")
    others, found = 0, ()
    if message is not None:
        others = _others(message, numbers)
        kind = _kind(message, numbers, others)
        asked = _ASKED.search(message)
        found = suspects(asked[1], recipe) if asked and recipe is not None else ()
    elif (host := list(_HOST.finditer(text))):
        kind, message = "host memory", _flat(text[host[-1].start():][:LONGEST])
        asked = _HOST_SIZE.search(text)
        numbers = parse(f"Tried to allocate {asked[1] or asked[2]}" if asked else "")
    else:
        return Diagnosis("not an out-of-memory error", {}, 0, (), (), (), _flat(text[:LONGEST]))
    told = (kind, numbers, others, found, message, recipe)
    return Diagnosis(kind, numbers, others, found, tuple(notes(*told)), tuple(advice(*told)), message)


def _text(given: Any, seen: tuple[int, ...] = ()) -> str:
    """As a traceback would show it: an error after those that it came from or consists of."""
    if isinstance(given, BaseException):
        before = [given.__cause__ or given.__context__, *getattr(given, "exceptions", ())]
        parts = [_text(error, (*seen, id(given))) for error in before if error is not None and id(error) not in seen]
        return "\n".join([*parts, f"{type(given).__name__}: {given}"])
    if isinstance(given, (list, tuple)):
        given = "\n".join(_text(part) for part in given)
    elif hasattr(given, "message"):  # oom_guard's
        given = given.message if given.message is not None else ""
    if not isinstance(given, str):
        raise TypeError(f"diagnose takes an error or its text, not {type(given).__name__}")
    if not given.strip():
        raise ValueError("diagnose: the text is empty; paste the error's message")
    return given


def _unquoted(text: str) -> str:
    """Without a terminal's colours and what mail, Markdown and rich's boxes put around lines."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()
    return "\n".join(line.strip().lstrip(">│|").rstrip("│|").strip() for line in lines)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()  # a terminal may have broken lines anywhere


def _last_message(text: str) -> str | None:
    """From the last place that says it with numbers, else from the last; up to the next."""
    if not _CARD.search(text):
        text = _flat(text)
    places = [match.start() for match in _CARD.finditer(text)]
    if not places:
        return None
    messages = [_flat(text[start:end][:LONGEST]) for start, end in zip(places, [*places[1:], None], strict=True)]
    return next((message for message in reversed(messages) if _ASKED.search(message)), messages[-1])


def _others(message: str, numbers: dict[str, int | None]) -> int:
    """Bytes that other processes hold: as named, or as what is missing between capacity, free and this process."""
    if named := other_processes(message):
        return named
    capacity, free, in_use, reserved = (numbers[name] for name in ("capacity", "free", "in_use", "reserved"))
    if in_use is None and reserved is not None and not re.search(r"Process \d+ has", message):
        in_use = reserved + CONTEXT
    return 0 if None in (capacity, free, in_use) else max(0, capacity - free - in_use)


def _kind(message: str, numbers: dict[str, int | None], others: int) -> str:
    requested, unallocated, free, reserved = (numbers[n] for n in ("requested", "unallocated", "free", "reserved"))
    capacity, allowed, allocated = numbers["capacity"], numbers["allowed"], numbers["allocated"]
    if requested is None:
        return "shortage" if _NUMBERLESS.match(message) else "library"
    if "per_process_memory_fraction limit" in message:
        return "limit"
    if capacity is not None and requested > capacity:
        return "shortage"
    if unallocated is not None and reserved and unallocated >= requested and unallocated >= SHARE * reserved:
        return "fragmentation"
    enough = free is not None and free >= requested
    held = reserved if reserved is not None else allocated or 0
    if allowed is not None and held + requested >= 0.99 * allowed and (free is None or enough):
        return "limit"
    if enough:
        return "refused"
    return "another process" if others + (free or 0) >= requested and others > OTHERS * (capacity or 0) else "shortage"
