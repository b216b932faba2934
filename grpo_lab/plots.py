"""Pictures of memory and of learning. They draw what a report or a table says and compute nothing else.

Every function returns a `Picture`: a matplotlib figure that a notebook shows with alternative text, so that
a picture is also there for those who cannot see it. Colours are Okabe and Ito's (told apart under every
common colour blindness), and every category has a hatch as well.

>>> import pandas as pd
>>> history = pd.DataFrame({"reward": [0.1, 0.2, 0.4]})
>>> learning(history, smooth=1).alt
'Line chart: the mean reward goes from 0.10 to 0.40 over 3 steps.'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ._picture import GREY, INK, LINE, PAPER, RED, SLANTED, STYLE, GiB, MiB, Picture, show, size

__all__ = ["CATEGORIES", "Picture", "alt", "breakdown", "learning", "show", "size", "timeline", "waterfall"]

# Category -> (face, hatch, colour of the hatch), in the order in which they are stacked: what stays through
# the whole step at the bottom, what comes and goes on top. Faces: Okabe & Ito, "Color Universal Design".
CATEGORIES: dict[str, tuple[str, str, str]] = {
    "parameters": ("#0072B2", "", "white"),
    "reference model": ("#CC79A7", "..", "white"),
    "optimizer state": ("#009E73", "//", "white"),
    "gradients": ("#56B4E9", "\\\\", "white"),
    "KV cache": ("#F0E442", "xx", "#A89A00"),
    "activations": ("#E69F00", "--", "white"),
    "logits": ("#D55E00", "||", "white"),
    "temporaries": ("#BBBBBB", "oo", "white"),
    "workspace": ("#555555", "", "white"),
    "other": ("#FFFFFF", "**", "#6E6E6E"),
}


def alt(report: Any) -> str:
    """One sentence that says what the pictures of a memory report say: the peak, its owners, the budget."""
    owners = _shares(report)
    phase = report.phases["peak_allocated"].idxmax() if len(report.phases) else "no phase"
    text = f"The peak is {size(report.peak_allocated)} allocated, in {phase}"
    if len(owners):
        parts = (f"{name} {size(n)} ({_percent(n / owners.sum())})" for name, n in owners.items())
        text += ": " + ", ".join(parts)
    text += f". {size(report.peak_reserved)} are reserved"
    if report.budget is not None:
        text += f", the budget is {size(report.budget)}: it " + ("fits" if report.fits else "does not fit")
    return text + "."


def timeline(report: Any, ax: Axes | None = None) -> Figure:
    """Memory over one step, stacked by category, its phases marked; the budget; an X where it ran out.

    report: a MemoryReport. ax: axes to draw on, instead of a new figure.
    The horizontal axis counts allocations and frees, not time; where too dense, the highest is drawn.
    The line on top is what the allocator has reserved: what it holds above the colours is not in use.
    """
    table = _envelope(report.timeline.reset_index())
    with matplotlib.rc_context(STYLE):
        figure, ax = _axes(ax, (9.5, 4.2), f"Stacked area chart over one step. {alt(report)}")
        unit, name = _unit(max(table["reserved"].max(), table["allocated"].max()))
        names = _present(table)
        floor = np.zeros(len(table))
        for category in names:
            top = floor + table[category].to_numpy() / unit
            ax.fill_between(table["event"], floor, top, step="post", linewidth=0, **_fill(category))
            floor = top
        ax.step(table["event"], table["reserved"] / unit, where="post", color=INK, linewidth=1.2)
        late = report.oom is not None and report.oom["event"] > table["event"].iloc[-1] / 2
        if report.oom is not None:
            _mark_oom(ax, report.oom, unit, side="right" if late else "left")
        if report.budget is not None:
            _budget_across(ax, report.budget, unit, side="left" if late else "right")
        ax.set(xlabel="allocations and frees, in order", ylabel=name, xlim=_ends(table["event"]))
        ax.set_ylim(0, 1.08 * ax.dataLim.ymax + (0.12 * ax.dataLim.ymax if report.oom is not None else 0))
        ax.set_title(_verdict(report), pad=_phase_bands(ax, table))
        _legend(ax, names[::-1], reserved=True)
    return figure


def breakdown(report: Any, ax: Axes | None = None) -> Figure:
    """Who owns the memory at the peak: one bar per category, the largest on top."""
    owners = _shares(report)[::-1]
    with matplotlib.rc_context(STYLE):
        height = 0.42 * len(owners) + 1.1
        figure, ax = _axes(ax, (8.0, height), f"Bar chart of the peak by category. {alt(report)}")
        unit, name = _unit(report.peak_allocated)
        for y, (category, n) in enumerate(owners.items()):
            ax.barh(y, n / unit, height=0.72, linewidth=0, **_fill(category))
            ax.text(n / unit, y, f"  {size(n)}   {_percent(n / owners.sum())}", va="center", fontsize=9)
        ax.set_yticks(range(len(owners)), owners.index)
        ax.tick_params(axis="y", length=0)
        ax.set(xlabel=f"{name} at the peak", xlim=(0, 1.25 * owners.max() / unit))
        ax.set_title(f"At the peak: {size(report.peak_allocated)} allocated")
    return figure


def waterfall(rows: pd.DataFrame, budgets: Mapping[str, int] | None = None, ax: Axes | None = None) -> Figure:
    """One bar a stage, stacked by category at its peak, against the budgets of the course's two cards.

    rows: one row a stage, columns `label`, `peak_allocated`, optionally `peak_reserved`, and one column per
        category, in bytes (what `course.waterfall` returns). A category that a stage lacks is 0.
    budgets: name -> bytes; by default those of the RTX 3080 Laptop with 16 GB and with 8 GB.
    """
    budgets = _course_budgets() if budgets is None else budgets
    total = rows["peak_reserved"] if "peak_reserved" in rows else rows["peak_allocated"]
    with matplotlib.rc_context(STYLE):
        figure, ax = _axes(ax, (9.5, 0.52 * len(rows) + 1.7), _alt_waterfall(rows, total, budgets))
        unit, name = _unit(total.max())
        names = _present(rows)
        ax.barh(range(len(rows)), total / unit, height=0.7, facecolor="none", edgecolor=INK, linewidth=0.8)
        left = np.zeros(len(rows))
        for category in names:
            width = rows[category].fillna(0).to_numpy() / unit
            ax.barh(range(len(rows)), width, left=left, height=0.7, linewidth=0, **_fill(category))
            left += width
        for y, n in enumerate(total):
            ax.text(max(n / unit, left[y]) + 0.012 * total.max() / unit, y, size(n), va="center", fontsize=9,
                    fontweight="bold", bbox=PAPER)
        _budgets_down(ax, budgets, unit)
        ax.set_yticks(range(len(rows)), rows["label"])
        ax.tick_params(axis="y", length=0)
        ax.set(xlabel=f"{name} at the peak", xlim=(0, 1.13 * max(total.max() / unit, left.max())))
        ax.set_ylim(len(rows) - 0.5, -0.75)
        _legend(ax, names, reserved="peak_reserved" in rows)
    return figure


def learning(
    history: pd.DataFrame, control: pd.DataFrame | None = None, *, smooth: int = 20, label: str = "GRPO",
    control_label: str = "control: shuffled rewards", ax: Axes | None = None,
) -> Figure:
    """The mean reward of each step and its running mean, with an optional second run to compare it to.

    history, control: one row a step, with a column `reward` and maybe `step` (what `train` returns).
    smooth: steps in the running mean.
    """
    runs = [(history, label, "#0072B2", "-")]
    if control is not None:
        runs.append((control, control_label, "#D55E00", "--"))
    with matplotlib.rc_context(STYLE):
        texts = []
        figure, ax = _axes(ax, (8.0, 3.6), "")
        for table, name, colour, line in runs:
            mean = table["reward"].rolling(smooth, min_periods=1).mean()
            steps = np.asarray(table.get("step", range(1, len(table) + 1)))
            ax.plot(steps, table["reward"], color=colour, alpha=0.25, linewidth=0.8)
            ax.plot(steps, mean, line, color=colour, linewidth=2.2, label=name)
            first, last = mean.iloc[0], mean.iloc[-1]
            ax.annotate(f" {last:.2f}", (steps[-1], last), color=colour, va="center", weight="bold")
            subject = "the mean reward" if control is None else f"the mean reward of {name}"
            texts.append(f"{subject} goes from {first:.2f} to {last:.2f} over {len(table)} steps")
        ax.set(xlabel="step", ylabel="mean reward")
        ax.set_title("What the model earns")
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.7, zorder=0)
        if control is not None:
            ax.legend(loc="best")
        if isinstance(figure, Picture):
            figure.alt = f"Line chart: {'; '.join(texts)}."
    return figure


def _axes(ax: Axes | None, figsize: tuple[float, float], alt_text: str) -> tuple[Figure, Axes]:
    if ax is not None:
        return ax.figure, ax
    # Not through pyplot: it would keep every figure alive and show it a second time, without its text.
    picture = Picture(figsize=figsize, layout="constrained")
    picture.alt = alt_text
    return picture, picture.subplots()


def _envelope(table: pd.DataFrame, bins: int = 250) -> pd.DataFrame:
    """The highest row of each bin and phase, so that a peak of a few events is as wide as the eye needs."""
    stretch = (table["phase"] != table["phase"].shift()).cumsum()
    groups = table.groupby([stretch, np.arange(len(table)) * bins // len(table)], sort=False)
    thin = table.loc[groups["allocated"].idxmax()]
    thin = thin.assign(event=groups["event"].first().to_numpy())
    return pd.concat([thin, table.iloc[-1:]], ignore_index=True)


def _percent(part: float) -> str:
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def _shares(report: Any) -> pd.Series:
    """Bytes by category at the peak, the largest first, without those that own nothing."""
    owners = report.categories
    owners = owners["bytes"] if isinstance(owners, pd.DataFrame) else owners
    return owners[owners > 0].sort_values(ascending=False)


def _present(table: pd.DataFrame) -> list[str]:
    return [category for category in CATEGORIES if category in table and table[category].max() > 0]


def _fill(category: str) -> dict[str, Any]:
    face, hatch, line = CATEGORIES[category]
    return {"facecolor": face, "hatch": hatch, "edgecolor": line}


def _unit(largest: float) -> tuple[int, str]:
    return (GiB, "GiB") if largest >= GiB / 4 else (MiB, "MiB")


def _ends(events: pd.Series) -> tuple[float, float]:
    return float(events.iloc[0]), float(max(events.iloc[-1], events.iloc[0] + 1))


def _verdict(report: Any) -> str:
    text = f"{size(report.peak_allocated)} allocated, {size(report.peak_reserved)} reserved"
    if report.budget is None:
        return text
    return text + (", fits in " if report.fits else ", does not fit in ") + size(report.budget)


def _legend(ax: Axes, names: list[str], reserved: bool) -> None:
    handles = [Patch(linewidth=0, label=category, **_fill(category)) for category in names]
    if reserved:
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=1, label="reserved"))
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.6)


def _budget_across(ax: Axes, budget: int, unit: int, side: str) -> None:
    ax.axhline(budget / unit, **LINE)
    x = 0.005 if side == "left" else 0.995
    ax.text(x, budget / unit, f"budget: {size(budget)}", ha=side, va="bottom", bbox=PAPER,
            transform=ax.get_yaxis_transform(), **SLANTED)


def _budgets_down(ax: Axes, budgets: Mapping[str, int], unit: int) -> None:
    for i, (name, budget) in enumerate(sorted(budgets.items(), key=lambda item: item[1])):
        ax.axvline(budget / unit, **LINE)
        # The two labels point away from each other: the lines may lie close together.
        ax.text(budget / unit, -0.5, f" {name} ", va="bottom", ha="left" if i else "right", **SLANTED)


def _mark_oom(ax: Axes, oom: Mapping[str, Any], unit: int, side: str) -> None:
    x, y = oom["event"], (oom["allocated"] + oom["requested"]) / unit
    ax.plot([x], [y], "X", color=RED, markersize=13, markeredgecolor="white", clip_on=False, zorder=5)
    ax.annotate(f"out of memory\nasked for {size(oom['requested'])} more", (x, y), textcoords="axes fraction",
                xytext=(0.03 if side == "left" else 0.97, 0.97), ha=side, va="top", color=RED, weight="bold",
                fontsize=9, bbox=PAPER, arrowprops={"arrowstyle": "-", "color": RED}, zorder=6)


def _phase_bands(ax: Axes, table: pd.DataFrame) -> int:
    """Shade every other phase and name each above the axes; return the room (points) that the names take."""
    first, last = _ends(table["event"])
    across, room = ax.get_xaxis_transform(), 24
    for i, (name, start, end) in enumerate(_runs(table, last)):
        if i % 2:
            ax.axvspan(start, end, color="black", alpha=0.06, linewidth=0, zorder=0)
        ax.add_patch(Rectangle((start, 1.01), end - start, 0.03, transform=across, clip_on=False, linewidth=0,
                               facecolor=GREY if i % 2 else "#B5B5B5"))
        letters = (end - start) / (last - first) / 0.0135  # as many as fit on one line
        lines = name if len(name) <= letters else name.replace(" ", "\n", 1)
        flat = max(map(len, lines.split("\n"))) <= letters
        room = max(room, (24 if lines == name else 36) if flat else 26 + 2 * len(name))
        ax.text((start + end) / 2, 1.05, lines if flat else name, transform=across, fontsize=9, va="bottom",
                ha="center" if flat else "left", rotation=0 if flat else 24, rotation_mode="anchor")
    return room


def _runs(table: pd.DataFrame, last: float) -> list[tuple[str, float, float]]:
    """Stretches of one phase: (name, first event, last event). A pair repeated often is one, counted."""
    phase = table["phase"]
    starts = table.loc[phase != phase.shift(), "event"].tolist()
    names = phase[phase != phase.shift()].tolist()
    spans = list(zip(names, starts, [*starts[1:], last]))
    merged: list[tuple[str, float, float]] = []
    i = 0
    while i < len(spans):
        pair, k = names[i : i + 2], 1
        while names[i + 2 * k : i + 2 * k + 2] == pair:
            k += 1
        if k > 2:
            merged.append((f"{k} × ({', '.join(pair)})", spans[i][1], spans[i + 2 * k - 1][2]))
        else:
            merged.append(spans[i])
        i += 2 * k if k > 2 else 1
    return [span for span in merged if span[0] != "start"]  # what came before the first phase has no name


def _course_budgets() -> dict[str, int]:
    from . import gpus
    return {f"{n} GB card": gpus.get(f"RTX 3080 Laptop {n}GB").budget for n in (16, 8)}


def _alt_waterfall(rows: pd.DataFrame, total: pd.Series, budgets: Mapping[str, int]) -> str:
    stages = "; ".join(f"{label}: {size(n)}" for label, n in zip(rows["label"], total))
    lines = ", ".join(f"{name}: {size(n)}" for name, n in budgets.items())
    return f"Bar chart of the peak memory of each stage. {stages}. Budgets: {lines}."
