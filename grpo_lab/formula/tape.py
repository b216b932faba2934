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
from functools import cached_property, lru_cache
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
        return blocks(self.factors, self.count)


@lru_cache(65536)
def blocks(factors: tuple[int, ...], count: int) -> int:
    """Bytes of the blocks that hold ``count`` tensors."""
    each = prod(factors)
    return count * each if each <= MiB else int(count * (each + kept_beyond(each)))


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


class Tensor:
    """Alive as long as somebody uses it: a name in a function, or the graph that a backward pass needs."""

    __slots__ = ("category", "what", "factors", "count", "bytes", "uses")

    def __init__(self, category: str, what: str, factors: tuple[int, ...], count: int) -> None:
        self.category, self.what, self.factors, self.count, self.uses = category, what, factors, count, 1
        self.bytes = blocks(factors, count)

    @property
    def term(self) -> Term:
        return Term(self.category, self.what, self.factors, self.count)


class Moment:
    """What is alive together after so many events of a tape: ``bytes``, and the ``terms``, told on demand."""

    def __init__(self, nbytes: int, events: list[Tensor], count: int) -> None:
        self.bytes, self._events, self._count = nbytes, events, count

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        alive: dict[int, Tensor] = {}
        for tensor in self._events[: self._count]:  # the first time it is made, the second it is gone
            if alive.pop(id(tensor), None) is None:
                alive[id(tensor)] = tensor
        return tuple(tensor.term for tensor in alive.values())


class Tape:
    def __init__(self) -> None:
        self.bytes, self.peaks = 0, {}
        self.events: list[Tensor] = []
        self._most, self._fullest = float("inf"), 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is made inside belongs to this phase, whose peak is at least what is alive at its start."""
        self._most, self._fullest = self.bytes, len(self.events)
        yield
        self.peaks[name] = Moment(self._most, self.events, self._fullest)
        self._most = float("inf")

    def make(self, category: str, what: str, *factors: int, count: int = 1) -> Tensor:
        """A new tensor (or ``count`` alike), with one user: whoever asked for it."""
        tensor = Tensor(category, what, factors, count)
        self.events.append(tensor)
        self.bytes += tensor.bytes
        if self.bytes > self._most:
            self._most, self._fullest = self.bytes, len(self.events)
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
                    self.events.append(tensor)
                    self.bytes -= tensor.bytes

    def since(self, count: int) -> list[Tensor]:
        """What was made after the first ``count`` events and is alive."""
        alive: dict[int, Tensor] = {}
        for tensor in self.events[count:]:
            if alive.pop(id(tensor), None) is None and tensor.uses:
                alive[id(tensor)] = tensor
        return list(alive.values())
