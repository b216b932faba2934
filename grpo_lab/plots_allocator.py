"""Pictures of what the caching allocator holds: segments, and the blocks they are cut into. They compute nothing.

>>> from grpo_lab.memory.allocator import CachingAllocator, MiB
>>> allocator = CachingAllocator()
>>> block = allocator.allocate(3 * MiB)
>>> memory_map(allocator.snapshot()).alt
'Map of 1 segment, 20.00 MiB: 3.00 MiB in use, 17.00 MiB free; the largest free block is 17.00 MiB.'

A segment is what `CachingAllocator.snapshot` lists, or `torch.cuda.memory_snapshot()` on a card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Patch, Rectangle

from ._picture import GREY, INK, PAPER, RED, STYLE, GiB, MiB, Picture, size
from .plots import CATEGORIES

FREE = {"facecolor": "white", "hatch": "////", "edgecolor": "#C9C9C9"}
USED = {"facecolor": "#A9C7DE", "hatch": "", "edgecolor": "white"}
NEW = {"facecolor": "#E69F00", "hatch": "", "edgecolor": "white"}
HEIGHT = 0.72  # of a row
THINNEST = 0.006  # of the width: smaller blocks are drawn this wide, to be seen


def memory_map(
    segments: Sequence[Mapping[str, Any]], owners: Mapping[int, str] | None = None, *, request: int | None = None,
    width: int | None = None, title: str = "",
) -> Picture:
    """All segments to scale, the largest first, packed into rows; what is free is hatched.

    owners: address of a block -> category, which gives its colour. request: bytes that were asked for in vain, drawn
    on top for comparison. width: bytes in a row (the largest segment or the request by default); a longer segment goes
    on in the next row.
    """
    sizes = [segment["total_size"] for segment in segments]
    width = width or max([*sizes, request or 0, 1])
    rows = _pack(segments, width)
    first = 1 if request else 0
    unit, name = (GiB, "GiB") if width >= GiB / 4 else (MiB, "MiB")
    with matplotlib.rc_context(STYLE):
        picture = Picture(figsize=(9.5, 0.36 * (len(rows) + first) + 1.3), layout="constrained")
        ax = picture.subplots()
        seen, edges = [], []
        for y, row in enumerate(rows, first):
            for x, (blocks, begins, ends) in row:
                stretch = _merged(blocks, owners or {})
                for label, start, length in stretch:
                    _box(ax, x + start, y, length, unit, _look(label))
                seen += [label for label, *_ in stretch]
                edges += _edges(x, x + sum(length for *_, length in stretch), y, begins, ends, unit)
        ax.add_collection(LineCollection(edges, colors=INK, linewidths=0.8, zorder=3))
        if request:
            ax.add_patch(Rectangle((0, -HEIGHT / 2), request / unit, HEIGHT, facecolor="none", edgecolor=RED, linewidth=2))
            ax.text(request / unit / 2, 0, f"asked for: {size(request)} in one piece", color=RED, weight="bold",
                    ha="center", va="center", fontsize=9)
        ax.set(xlim=(0, 1.004 * width / unit), ylim=(len(rows) + first - 0.5, -0.6), yticks=[], xlabel=name)
        ax.spines["left"].set_visible(False)
        ax.set_title(title or _sums(segments))
        names = [category for category in CATEGORIES if category in seen] + [n for n in ("in use",) if n in seen]
        handles = [Patch(linewidth=0, label=label, **_look(label)) for label in names]
        handles.append(Patch(linewidth=0.6, label="free", **FREE))
        ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.6)
    picture.alt = f"Map of {_sums(segments)}" + (f" Asked for were {size(request)} in one piece." if request else "")
    return picture


def film(frames: Sequence[Mapping[str, Any]], columns: int = 3) -> Picture:
    """A few segments, moment by moment: one small map a frame, one row a segment.

    frames: each with `title`, `segments`, and maybe `names` (address of a block -> the letter on it) and `new` (the
    address of the block that this moment is about).
    """
    width = max(segment["total_size"] for frame in frames for segment in frame["segments"])
    deep = max(len(frame["segments"]) for frame in frames)
    lines = -(-len(frames) // columns)
    with matplotlib.rc_context(STYLE):
        picture = Picture(figsize=(3.35 * columns, lines * (0.27 * deep + 0.72)), layout="constrained")
        axes = picture.subplots(lines, columns, squeeze=False).ravel()
        for ax, frame in zip(axes, frames):
            names, new = frame.get("names", {}), frame.get("new")
            for y, segment in enumerate(frame["segments"]):
                _draw(ax, y, segment, width, names, new)
            ax.set(xlim=(-0.004 * width / MiB, 1.004 * width / MiB), ylim=(deep - 0.4, -0.6))
            ax.set_title(frame["title"], fontsize=9.5)
        for ax in axes:
            ax.set_axis_off()
    picture.alt = "Maps of the segments, step by step. " + " ".join(
        f"{frame['title']}: {_contents(frame['segments'], frame.get('names', {}))}." for frame in frames)
    return picture


def _pack(segments: Sequence[Mapping[str, Any]], width: int) -> list[list[tuple[int, tuple]]]:
    """Rows of (offset, (blocks, whether the segment begins here, whether it ends here)): first fit, largest first."""
    rows: list[list[tuple[int, tuple]]] = []
    filled: list[int] = []
    for segment in sorted(segments, key=lambda segment: (-segment["total_size"], segment["address"])):
        pieces = list(_wrapped(segment["blocks"], width))
        for i, piece in enumerate(pieces):
            length, last = sum(block["size"] for block in piece), i == len(pieces) - 1
            whole = len(pieces) == 1
            row = next((y for y, taken in enumerate(filled) if taken + length <= width), None) if whole else None
            if row is None:
                row = len(rows)
                rows.append([])
                filled.append(0)
            rows[row].append((filled[row], (piece, i == 0, last)))
            filled[row] += length
    return rows


def _wrapped(blocks: Sequence[Mapping[str, Any]], width: int):
    """A segment's blocks, cut into stretches of at most `width` bytes; a cut block keeps its address."""
    line, left = [], width
    for block in blocks:
        rest = block["size"]
        while rest:
            taken = min(rest, left)
            line.append({**block, "size": taken})
            rest, left = rest - taken, left - taken
            if not left:
                yield line
                line, left = [], width
    if line:
        yield line


def _merged(blocks: Sequence[Mapping[str, Any]], owners: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """(label, start, length) of the stretches that look alike."""
    stretches: list[tuple[str, int, int]] = []
    at = 0
    for block in blocks:
        label = "free" if block["state"] == "inactive" else owners.get(block["address"], "in use")
        if stretches and stretches[-1][0] == label:
            _, start, length = stretches.pop()
            stretches.append((label, start, length + block["size"]))
        else:
            stretches.append((label, at, block["size"]))
        at += block["size"]
    return stretches


def _draw(ax: Axes, y: int, segment: Mapping[str, Any], width: int, names: Mapping[int, str], new: int | None) -> None:
    """One segment of a film, with its blocks' names."""
    x, cuts = 0, []
    for block in segment["blocks"]:
        used = block["state"] != "inactive"
        wide = max(block["size"], THINNEST * width) if used else block["size"]
        look = NEW if used and block["address"] == new else _look("in use" if used else "free")
        _box(ax, x, y, wide, MiB, look, zorder=2 if used else 1)
        if used and block["address"] in names:
            at, side = (x + wide / 2, "center") if wide > 0.03 * width else (x + 1.6 * wide, "left")
            ax.text(at / MiB, y, names[block["address"]], ha=side, va="center", fontsize=9, weight="bold", zorder=4,
                    bbox={**PAPER, "pad": 0.6})
        x += block["size"]
        cuts += _edges(x, x, y, False, True, MiB)
    ax.add_collection(LineCollection(cuts, colors=GREY, linewidths=0.6, zorder=3))
    ax.add_collection(LineCollection(_edges(0, x, y, True, True, MiB), colors=INK, linewidths=0.8, zorder=3, clip_on=False))


def _box(ax: Axes, x: float, y: int, wide: float, unit: int, look: Mapping[str, Any], zorder: int = 1) -> None:
    ax.add_patch(Rectangle((x / unit, y - HEIGHT / 2), wide / unit, HEIGHT, linewidth=0, zorder=zorder, **look))


def _edges(left: int, right: int, y: int, begins: bool, ends: bool, unit: int) -> list[list[tuple[float, float]]]:
    """The frame of a stretch; open where its segment goes on in another row."""
    (a, b), (top, bottom) = (left / unit, right / unit), (y - HEIGHT / 2, y + HEIGHT / 2)
    lines = [[(a, top), (b, top)], [(a, bottom), (b, bottom)]]
    return lines + [[(x, top), (x, bottom)] for x, there in ((a, begins), (b, ends)) if there]


def _look(label: str) -> dict[str, Any]:
    if label in CATEGORIES:
        face, hatch, line = CATEGORIES[label]
        return {"facecolor": face, "hatch": hatch, "edgecolor": line}
    return FREE if label == "free" else USED


def _sums(segments: Sequence[Mapping[str, Any]]) -> str:
    """What a map shows, as a sentence."""
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    held = sum(segment["total_size"] for segment in segments)
    count = f"{len(segments)} segment" + ("s" if len(segments) != 1 else "")
    return (f"{count}, {size(held)}: {size(held - sum(free))} in use, {size(sum(free))} free; the largest free block is "
            f"{size(max(free, default=0))}.")


def _contents(segments: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> str:
    def words(block):
        name = "free" if block["state"] == "inactive" else names.get(block["address"], "in use")
        return f"{name} {size(block['size'])}"

    return "; ".join(f"segment of {size(segment['total_size'])} [{', '.join(map(words, segment['blocks']))}]"
                     for segment in segments) or "no segment"
