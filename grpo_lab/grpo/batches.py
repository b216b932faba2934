"""Micro-batches by a budget of tokens instead of a number of rows: what a batch costs is its tokens, with padding."""

from __future__ import annotations

from collections.abc import Sequence


def token_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows packed into batches of at most `max_tokens` tokens, padding included; the longest come first.

    >>> token_batches([3, 10, 4, 9], max_tokens=20)
    [[1, 3], [2, 0]]

    A batch is as wide as its longest row, so neighbours in length share one. Longest first: what doesn't fit fails
    at once, and later batches find the allocator's blocks large enough. ValueError for a row longer than the
    budget.
    """
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lengths[row] > max_tokens:
            raise ValueError(f"micro_batch_tokens={max_tokens} is less than one sequence of {lengths[row]} tokens: raise "
                             "it, or lower max_completion_length.")  # fmt: skip
        if batches and (len(batches[-1]) + 1) * width <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            width = lengths[row]
    return batches


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of a batching's tokens that are padding.

    >>> padding_share([3, 10, 4, 9], [[0, 1], [2, 3]])
    0.3157894736842105
    """
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1 - sum(lengths) / padded
