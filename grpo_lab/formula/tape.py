"""Which tensors are alive together: a step is played on a tape, which remembers each phase's fullest moment.

>>> tape = Tape()
>>> with tape.phase("forward"):
...     x = tape.make("activations", "hidden states", 8, 1024, 896, 2)
...     y = tape.make("logits", "of all positions", 8, 1024, 151_936, 2)
...     tape.drop(x)
>>> tape.peaks["forward"].bytes, [term.what for term in tape.peaks["forward"].terms]
(2503999488, ['hidden states', 'of all positions'])
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple


MiB = 2**20


class Term(NamedTuple):
    """``count`` tensors alike, of as many bytes each as the product of ``factors``."""

    category: str
    what: str
    factors: tuple[int, ...]
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.count * prod(self.factors)

    @property
    def blocks(self) -> int:
        """Bytes of the blocks that hold them."""
        return self.count * prod(self.factors) + int(self.count * kept_beyond(prod(self.factors)))


def kept_beyond(nbytes: int) -> float:
    """What a block keeps beyond such a tensor, on average: the allocator doesn't split off 1 MiB or less.

    >>> kept_beyond(9 * MiB + MiB // 2) / MiB, kept_beyond(13 * MiB) / MiB, kept_beyond(MiB)
    (0.5, 1.0, 0.0)

    Tensors above 1 MiB are cut from segments of 20 MiB, those of 10 MiB and more have one of their own, a multiple of
    2 MiB (`CUDACachingAllocator.cpp`; grpo_lab/memory/allocator.py replays it, in the order of events).
    """
    if nbytes <= MiB:
        return 0.0
    many = 20 * MiB // nbytes if nbytes < 10 * MiB else 1
    segment = 20 * MiB if nbytes < 10 * MiB else -(-nbytes // (2 * MiB)) * 2 * MiB
    rest = segment - many * nbytes
    return rest / many if rest <= MiB else 0.0


class Moment(NamedTuple):
    """What is alive together."""

    bytes: int
    terms: tuple[Term, ...]


class Tensor:
    """Alive as long as somebody uses it: a name in a function, or the graph that a backward pass needs."""

    __slots__ = ("term", "bytes", "uses")

    def __init__(self, term: Term) -> None:
        self.term, self.bytes, self.uses = term, term.blocks, 1


class Tape:
    def __init__(self) -> None:
        self.bytes, self.peaks = 0, {}
        self._alive: dict[int, Tensor] = {}
        self._phase: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is made inside belongs to this phase, whose peak is at least what is alive at its start."""
        self._phase = name
        self._look()
        yield
        self._phase = None

    def make(self, category: str, what: str, *factors: int, count: int = 1) -> Tensor:
        """A new tensor (or ``count`` alike), with one user: whoever asked for it."""
        tensor = Tensor(Term(category, what, factors, count))
        self._alive[id(tensor)] = tensor
        self.bytes += tensor.bytes
        self._look()
        return tensor

    def keep(self, tensor: Tensor) -> Tensor:
        """One more user."""
        tensor.uses += 1
        return tensor

    def drop(self, *tensors: Tensor | None) -> None:
        """One user less of each; a tensor without any is gone."""
        for tensor in tensors:
            if tensor is not None:
                tensor.uses -= 1
                if not tensor.uses:
                    del self._alive[id(tensor)]
                    self.bytes -= tensor.bytes

    def _look(self) -> None:
        name = self._phase
        if name is not None and (name not in self.peaks or self.bytes > self.peaks[name].bytes):
            self.peaks[name] = Moment(self.bytes, tuple(tensor.term for tensor in self._alive.values()))
