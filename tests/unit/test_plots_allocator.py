"""Maps of segments and blocks: to scale, nothing lost in packing, in colours, hatches and words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from grpo_lab import plots_allocator
from grpo_lab.memory.allocator import CachingAllocator, MiB
from grpo_lab.plots import CATEGORIES
from grpo_lab.plots_allocator import _pack


def held(*sizes, conf=None):
    """An allocator of which every second block was freed, and the blocks still in use."""
    allocator = CachingAllocator(settings=conf)
    blocks = [allocator.allocate(size) for size in sizes]
    for block in blocks[::2]:
        allocator.free(block)
    return allocator, blocks[1::2]


def rectangles(ax, colour=None):
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return [box for box in boxes if colour is None or box.get_facecolor()[:3] == pytest.approx(colour, abs=1 / 255)]


def rgb(text):
    return [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def test_a_map_is_to_scale_and_says_its_sums():
    allocator, _ = held(30 * MiB, 40 * MiB, 50 * MiB)
    picture = plots_allocator.memory_map(allocator.snapshot())
    assert sum(box.get_width() for box in rectangles(picture.axes[0])) == pytest.approx(120)
    assert picture.alt == ("Map of 3 segments, 120.00 MiB: 40.00 MiB in use, 80.00 MiB free; the largest free block is "
                           "50.00 MiB.")


def test_owners_give_the_colour_and_the_legend():
    allocator, blocks = held(30 * MiB, 40 * MiB, 50 * MiB, 60 * MiB)
    owners = {blocks[0].address: "gradients"}
    ax = plots_allocator.memory_map(allocator.snapshot(), owners).axes[0]
    [box] = rectangles(ax, rgb(CATEGORIES["gradients"][0]))
    assert box.get_width() == pytest.approx(40)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["gradients", "in use", "free"]


def test_what_was_asked_for_is_drawn_on_top():
    allocator, _ = held(30 * MiB, 40 * MiB)
    picture = plots_allocator.memory_map(allocator.snapshot(), request=300 * MiB)
    first = min(rectangles(picture.axes[0]), key=lambda box: box.get_y())
    assert first.get_width() * (2**30 if picture.axes[0].get_xlabel() == "GiB" else MiB) == 300 * MiB
    assert picture.alt.endswith("Asked for were 300.00 MiB in one piece.")


def test_a_segment_longer_than_a_row_goes_on_in_the_next():
    allocator, _ = held(30 * MiB, 70 * MiB, 30 * MiB, conf="expandable_segments:True")
    [segment] = allocator.snapshot()
    rows = _pack([segment], 50 * MiB)
    assert [(begins, ends) for [(_, (_, begins, ends))] in rows] == [(True, False), (False, False), (False, True)]
    assert sum(block["size"] for [(_, (blocks, *_))] in rows for block in blocks) == segment["total_size"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 120 * MiB), min_size=1, max_size=30), st.integers(20, 300))
def test_packing_loses_nothing_and_overlaps_nowhere(sizes, width):
    allocator, _ = held(*sizes)
    rows = _pack(allocator.snapshot(), width * MiB)
    total = 0
    for row in rows:
        end = 0
        for start, (blocks, *_) in row:
            assert start == end
            end += sum(block["size"] for block in blocks)
        assert end <= width * MiB
        total += end
    assert total == allocator.reserved


def test_a_film_has_a_map_a_frame_and_names_the_blocks():
    allocator, frames, names = CachingAllocator(), [], {}
    for letter in "abcd":
        block = allocator.allocate(3 * MiB)
        names[block.address] = letter
        frames.append({"title": f"{letter} comes", "segments": allocator.snapshot(), "names": dict(names),
                       "new": block.address})
    picture = plots_allocator.film(frames)
    shown = [ax for ax in picture.axes if ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in shown] == ["a comes", "b comes", "c comes", "d comes"]
    assert [text.get_text() for text in shown[2].texts] == ["a", "b", "c"]
    [new] = rectangles(shown[2], rgb(plots_allocator.NEW["facecolor"]))
    assert (new.get_x(), new.get_width()) == (6, 3)
    assert "c comes: segment of 20.00 MiB [a 3.00 MiB, b 3.00 MiB, c 3.00 MiB, free 11.00 MiB]." in picture.alt


def test_an_empty_heap_is_a_picture_too():
    assert plots_allocator.film([{"title": "x", "segments": []}, {"title": "y", "segments": held(9)[0].snapshot()}]).alt
    assert "0 segments" in plots_allocator.memory_map([]).alt
