"""Graphics cards: the memory a program really gets, and what the chip supports.

A card sold as "16 GB" does not give a program 16 GiB: the driver keeps some (see `total_memory`), and
every process that opens CUDA pays for a context before its first tensor (see `context`). What is left
is `Card.budget`, and that is what has to hold the allocator's reserved memory.
"""

from __future__ import annotations

import csv
import functools
import operator
import re
from dataclasses import dataclass

from ._data import data_path
from ._names import did_you_mean, nearest

MiB = 2**20
GiB = 2**30


@dataclass(frozen=True)
class Card:
    """A graphics card, or a bare budget.

    >>> card = get("T4")
    >>> card.total_memory / MiB, card.compute_capability, card.bf16
    (14912.0, (7, 5), False)
    >>> card.budget < card.total_memory
    True

    total_memory: bytes that `torch.cuda.get_device_properties(0).total_memory` reports.
    compute_capability: (major, minor); 8.6 is (8, 6).
    bf16: whether the chip computes in bfloat16 natively (compute capability 8.0 and later).
    context: (low, high) bytes that a CUDA process takes on this card before its first tensor: driver
        context, loaded kernels, library handles. It varies with the versions of driver and PyTorch.
    source: where total_memory was read; context_source: where the context range comes from.
    """

    name: str
    total_memory: int
    compute_capability: tuple[int, int]
    bf16: bool
    context: tuple[int, int]
    source: str
    context_source: str = ""

    @property
    def typical_context(self) -> int:
        """Bytes of context counted in `budget`: the middle of the range, as none of its ends is the rule."""
        return sum(self.context) // 2

    @property
    def budget(self) -> int:
        """Bytes that PyTorch's allocator can reserve: `total_memory` less the typical context.

        A desktop on the same card, or another process, takes more away.
        """
        return self.total_memory - self.typical_context

    def __str__(self) -> str:
        return f"{self.name} ({self.total_memory / GiB:.2f} GiB seen by a program)"


@functools.cache
def _cards() -> dict[str, Card]:
    cards = {}
    with open(data_path("cards.csv"), newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            capability = tuple(int(part) for part in row["compute_capability"].split("."))
            cards[row["name"]] = Card(
                name=row["name"],
                total_memory=int(row["total_memory_bytes"]),
                compute_capability=capability,
                bf16=capability >= (8, 0),
                context=(int(row["context_low_bytes"]), int(row["context_high_bytes"])),
                source=row["source"],
                context_source=row["context_source"],
            )
    return cards


def names() -> list[str]:
    """Return the names of the known cards.

    >>> "RTX 3080 Laptop 16GB" in names()
    True
    """
    return list(_cards())


@functools.lru_cache(1024)
def _parts(name: str) -> tuple[str, float | None]:
    """Split the ways people write one card into model and size in GiB.

    `NVIDIA GeForce RTX 3090 24 GB`, `rtx3090` and `RTX 3090` are one model.
    """
    folded = re.sub(r"nvidia|geforce|tesla|\bgpu\b|graphics|pcie|sxm\d?|hbm\d\w?|rtx", " ", name.lower())
    size = re.search(r"(\d+(?:\.\d+)?)\s*gi?b\b", folded)
    model = folded.replace(size[0], " ") if size else folded
    return re.sub(r"[^a-z0-9]", "", model), float(size[1]) if size else None


def budget_card(budget: int) -> Card:
    """Return a stand-in card whose `budget` is exactly `budget` bytes.

    >>> budget_card(8 * GiB).budget == 8 * GiB
    True

    Nothing is taken off for a context. As a number says nothing about the chip, it is taken to be of the
    RTX 30 series (8.6), with bfloat16.
    """
    if isinstance(budget, bool) or not hasattr(budget, "__index__"):
        raise TypeError(f"gpu={budget!r}: a budget is a whole number of bytes, such as 16 * 2**30")
    budget = operator.index(budget)
    if budget < 64 * MiB:
        raise ValueError(
            f"gpu={budget!r}: a budget is counted in bytes and at least 64 MiB; 16 GiB is 16 * 2**30"
        )
    return Card(f"{budget / GiB:.2f} GiB budget", budget, (8, 6), True, (0, 0), "given in bytes")


def get(name: str | int | Card) -> Card:
    """Return a card by its name, or a stand-in for a budget in bytes.

    >>> get("nvidia geforce rtx 3090").name
    'RTX 3090'
    >>> get("20GB").budget == get(20 * 2**30).budget     # a bare size is a budget too, in GiB
    True
    >>> get("RTX 3080 Laptop")
    Traceback (most recent call last):
    ...
    ValueError: gpu='RTX 3080 Laptop' comes in several sizes: 'RTX 3080 Laptop 8GB' or 'RTX 3080 Laptop 16GB'

    Case, spaces, "NVIDIA", "GeForce" and "RTX" do not matter. An unknown name raises ValueError with the
    nearest known ones.
    """
    if isinstance(name, Card):
        return name
    if not isinstance(name, str):
        return budget_card(name)
    model, size = _parts(name)
    if name.strip().startswith("-"):
        raise ValueError(f"gpu={name!r}: a budget is a positive number of bytes, or a size such as '16GB'")
    if not model and size:
        return budget_card(int(size * GiB))
    cards = [card for card in _cards().values() if _parts(card.name)[0] == model]
    if size:  # a card shows a program a few percent less than its nominal size
        cards = [card for card in cards if 0.88 * size < card.total_memory / GiB <= size]
    if len(cards) == 1:
        return cards[0]
    if cards:
        sizes = " or ".join(repr(card.name) for card in cards)
        raise ValueError(f"gpu={name!r} comes in several sizes: {sizes}")
    hint = did_you_mean(name, names()) if nearest(name, names()) else "known: " + ", ".join(names())
    raise ValueError(
        f"gpu={name!r} is not a card that grpo_lab knows; {hint} A budget in bytes works too: gpu=16 * 2**30"
    )
