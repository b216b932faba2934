"""Pictures: what they show, in colours, hatches and words."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_lab import plots
from grpo_lab._picture import bundle

GiB = 2**30


def report(*, budget=6 * GiB, oom=None, spike=GiB, events=3000):
    """A run whose peak lasts three events out of thousands, as the logits of a real step do."""
    phase = np.repeat(["start", "rollout", "forward", "backward"], events // 4)
    logits = np.zeros(events, dtype=np.int64)
    logits[events // 2 : events // 2 + 3] = spike
    table = pd.DataFrame({"phase": phase, "parameters": 2 * GiB, "activations": np.arange(events) * 100_000,
                          "logits": logits})
    owners = table[["parameters", "activations", "logits"]]
    table.insert(1, "allocated", owners.sum(axis=1))
    table.insert(2, "reserved", table["allocated"].cummax())
    table.index.name = "event"
    peak = table["allocated"].idxmax()
    phases = table[table["phase"] != "start"].groupby("phase", sort=False)[["allocated", "reserved"]].max()
    return SimpleNamespace(
        timeline=table, phases=phases.add_prefix("peak_"), budget=budget, oom=oom,
        categories=owners.loc[peak].rename("bytes").to_frame(), fits=oom is None,
        peak_allocated=int(table["allocated"].max()), peak_reserved=int(table["reserved"].max()),
    )


def rows():
    return pd.DataFrame({
        "label": ["baseline", "+ change"], "fits": [False, True],
        "peak_allocated": [30 * GiB, 7 * GiB], "peak_reserved": [32 * GiB, 8 * GiB],
        "parameters": [10 * GiB, 5 * GiB], "logits": [20 * GiB, 2 * GiB],
    })


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_timeline_draws_a_peak_of_three_events():
    """A step has tens of thousands of events; drawn one by one, its peak was thinner than a pixel."""
    made = report()
    ax = plots.timeline(made).axes[0]
    filled = max(path.vertices[:, 1].max() for fill in ax.collections for path in fill.get_paths())
    assert filled == pytest.approx(made.peak_allocated / GiB)
    logits = ax.collections[2]  # stacked third
    x = logits.get_paths()[0].vertices
    wide = np.ptp(x[np.isclose(x[:, 1], filled, rtol=1e-3), 0])
    assert wide >= len(made.timeline) / 300


def test_timeline_names_phases_budget_and_unit():
    ax = plots.timeline(report()).axes[0]
    assert {"rollout", "forward", "backward", "budget: 6.00 GiB"} <= set(texts(ax))
    assert "start" not in texts(ax)
    assert ax.get_ylabel() == "GiB"
    assert [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1] == [6.0]


def test_timeline_marks_where_memory_ran_out():
    oom = {"event": 1500, "allocated": 3 * GiB, "requested": 4 * GiB, "op": "aten.mm", "phase": "forward"}
    ax = plots.timeline(report(oom=oom)).axes[0]
    cross = [line for line in ax.lines if line.get_marker() == "X"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in cross] == [([1500], [7.0])]
    assert "out of memory\nasked for 4.00 GiB more" in texts(ax)
    assert not [line for line in plots.timeline(report()).axes[0].lines if line.get_marker() == "X"]
    assert ax.get_ylim()[1] > 7.0


def test_timeline_without_a_budget_has_no_budget_line():
    ax = plots.timeline(report(budget=None)).axes[0]
    assert not [text for text in texts(ax) if "budget" in text]
    assert "fit" not in ax.get_title(loc="left")


def test_small_runs_are_drawn_in_MiB():
    small = report(spike=0)
    small.timeline[["allocated", "reserved", "parameters", "activations"]] //= 1024
    assert plots.timeline(small).axes[0].get_ylabel() == "MiB"


def test_repeated_micro_batches_are_named_once():
    made = report()
    phase = ["rollout"] * 20 + (["forward"] * 5 + ["backward"] * 5) * 8
    table = pd.DataFrame({"phase": phase, "parameters": GiB, "allocated": GiB, "reserved": GiB})
    table.index.name = "event"
    made.timeline = table
    named = texts(plots.timeline(made).axes[0])
    assert [text for text in named if "forward" in text] == ["8 × (forward, backward)"]


def test_breakdown_puts_the_largest_owner_on_top():
    made = report()
    ax = plots.breakdown(made).axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == made.categories["bytes"].sort_values().index.tolist()
    widths = [bar.get_width() for bar in ax.patches]
    assert sum(widths) * GiB == pytest.approx(made.peak_allocated)
    assert any("2.00 GiB" in text for text in texts(ax))


def test_waterfall_stacks_each_stage_and_draws_both_cards():
    picture = plots.waterfall(rows(), budgets={"16 GB": 15 * GiB, "8 GB": 7 * GiB})
    ax = picture.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["baseline", "+ change"]
    stacked = [bar for bar in ax.patches if bar.get_facecolor()[3] > 0]
    first = sum(bar.get_width() for bar in stacked if round(bar.get_y() + 0.35) == 0)
    assert first == pytest.approx(30)
    assert sorted(line.get_xdata()[0] for line in ax.lines) == [7.0, 15.0]
    assert {"32.00 GiB", "8.00 GiB"} <= set(texts(ax))
    assert "baseline: 32.00 GiB" in picture.alt and "16 GB: 15.00 GiB" in picture.alt


def test_waterfall_takes_a_stage_that_lacks_a_category():
    table = rows()
    table["KV cache"] = [np.nan, float(GiB)]
    ax = plots.waterfall(table, budgets={}).axes[0]
    assert all(np.isfinite(bar.get_width()) for bar in ax.patches)


def test_waterfall_draws_the_course_s_two_cards_unless_told_otherwise():
    from grpo_lab import gpus

    ax = plots.waterfall(rows()).axes[0]
    cards = [gpus.get(f"RTX 3080 Laptop {n}GB").budget / GiB for n in (8, 16)]
    assert sorted(line.get_xdata()[0] for line in ax.lines) == pytest.approx(cards)


def test_learning_draws_the_running_mean_and_the_control():
    history = pd.DataFrame({"step": range(1, 11), "reward": np.linspace(0, 0.9, 10)})
    control = pd.DataFrame({"step": range(1, 11), "reward": np.zeros(10)})
    picture = plots.learning(history, control, smooth=4)
    mean = picture.axes[0].lines[1].get_ydata()
    assert mean[-1] == pytest.approx(history["reward"].tail(4).mean())
    assert len(picture.axes[0].lines) == 4
    assert "control: shuffled rewards goes from 0.00 to 0.00" in picture.alt


def test_every_picture_can_be_drawn_on_given_axes():
    from matplotlib.figure import Figure

    axes = Figure(figsize=(10, 20)).subplots(4)
    history = pd.DataFrame({"reward": [0.0, 1.0]})
    drawn = [plots.timeline(report(), ax=axes[0]), plots.breakdown(report(), ax=axes[1]),
             plots.waterfall(rows(), ax=axes[2]), plots.learning(history, ax=axes[3])]
    assert all(figure is axes[0].figure for figure in drawn)


def test_alt_says_the_peak_its_owners_and_the_verdict():
    text = plots.alt(report(oom={"event": 1}))
    assert "in forward: parameters 2.00 GiB (64%)" in text and "it does not fit" in text
    assert plots.alt(report(budget=None)).endswith("are reserved.")


def test_a_notebook_gets_the_picture_with_its_words():
    """JupyterLab drops the alternative text of a bare PNG: it has to be there as HTML as well."""
    picture = plots.breakdown(report())
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt
    assert f'alt="{picture.alt}"' in data["text/html"] and data["image/png"] in data["text/html"]
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(2**24)) > 10
        assert metadata["image/png"]["width"] < image.width
    assert len(data["image/png"]) < 120_000


def test_alternative_text_is_escaped():
    data, _ = bundle(plots.breakdown(report()), 'a "quoted" <b>')
    assert 'alt="a &quot;quoted&quot; &lt;b&gt;"' in data["text/html"]


def test_show_refuses_a_figure_without_words():
    from matplotlib.figure import Figure

    with pytest.raises(ValueError, match="alternative text"):
        plots.show(Figure())


def test_every_category_of_the_ledger_has_a_look_of_its_own():
    from grpo_lab.memory.ledger import CATEGORIES

    assert set(CATEGORIES) <= set(plots.CATEGORIES)
    assert len(set(plots.CATEGORIES.values())) == len(plots.CATEGORIES)
    hatched = [hatch for _, hatch, _ in plots.CATEGORIES.values() if hatch]
    assert len(set(hatched)) == len(hatched)


@given(st.integers(0, 2**50))
@settings(max_examples=50)
def test_size_is_within_its_last_digit(n):
    number, unit = plots.size(n).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * scale - n) <= 0.00501 * scale
