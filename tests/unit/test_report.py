"""What a report says of the peak: every byte has an owner, two reports compare, the timeline ends with the work."""
from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import VirtualGPU, track
from grpo_lab.memory.cuda_words import size
from grpo_lab.memory.report import OWNERS
from grpo_lab.memory.whence import Whence

MiB = 2**20


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)))


def step_report(instrument, stacks: bool = False, steps: int = 2, batch: int = 32):
    with instrument as on, Whence(on.ledger, stacks=stacks):
        model = two_layers()
        on.ledger.watch(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            with on.phase("forward"):
                loss = model(torch.ones(batch, 64)).square().mean()
            with on.phase("backward"):
                loss.backward()
            with on.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return on.report()


@pytest.mark.parametrize("by", [OWNERS, "category", ["phase", "op"]])
@pytest.mark.parametrize("instrument", [lambda: VirtualGPU("T4"), lambda: track(existing=False)])
def test_every_byte_at_the_peak_has_an_owner(instrument, by):
    report = step_report(instrument())
    table = report.top(None, by=by)
    assert table["bytes"].sum() == report.peak_allocated > 0
    assert table["bytes"].is_monotonic_decreasing
    if by == "category":
        assert table.set_index("category")["bytes"].to_dict() == report.categories["bytes"].to_dict()


actions = st.lists(st.tuples(st.sampled_from(["new", "add", "drop", "matmul", "logsumexp", "backward"]),
                             st.integers(1, 400), st.integers(0, 9)), min_size=1, max_size=25)


@given(actions)
@settings(deadline=None, max_examples=60)
def test_the_rows_sum_to_the_peak_whatever_ran(program):
    """Also where the peak lies inside a kernel (logsumexp) or among workspaces (matmul)."""
    with VirtualGPU("T4") as gpu:
        held = [torch.ones(4, 4)]
        for action, size, which in program:
            x = held[which % len(held)]
            with gpu.phase(action):
                if action == "new":
                    held.append(torch.empty(size, size, requires_grad=bool(which % 2)))
                elif action == "add":
                    held.append(x + 1)
                elif action == "matmul":
                    held.append(x @ x)
                elif action == "logsumexp":
                    held.append(x.logsumexp(0, keepdim=True).expand(len(x), -1).contiguous())
                elif action == "backward" and x.requires_grad:
                    x.exp().sum().backward(retain_graph=True)
                elif action == "drop" and len(held) > 1:
                    del held[which % len(held)]
            del x
    report = gpu.report()
    assert report.top(None)["bytes"].sum() == report.peak_allocated
    assert report.top(None, each_layer=True)["count"].sum() == report.top(None, by="op")["count"].sum()


def test_layers_are_taken_together_unless_asked():
    report = step_report(VirtualGPU("T4"))
    weights = report.top(None).query("category == 'parameters'").groupby("module")["count"].sum()
    assert weights.to_dict() == {"*.*": 4}                      # two layers' weight and bias
    apart = report.top(None, each_layer=True).query("category == 'parameters'").groupby("module")["count"].sum()
    assert apart.to_dict() == {"0.0": 2, "1.0": 2}


def test_what_is_no_storage_has_its_name_as_op():
    table = step_report(VirtualGPU("T4")).top(None)
    assert {"cuBLAS workspace (forward thread)", "cuBLAS workspace (backward thread)"} <= set(table["op"])


def test_lines_are_there_on_request():
    without, withal = step_report(VirtualGPU("T4")), step_report(VirtualGPU("T4"), stacks=True)
    assert set(without.top(None)["line"]) == {""}
    lines = withal.top(None).query("category == 'activations'")["line"]
    assert len(lines) and lines.str.contains(r"test_report\.py:\d+ \(step_report\)").all()
    assert withal.peak_allocated == without.peak_allocated      # looking costs no bytes


def test_what_only_the_card_counts_is_a_row_of_its_own():
    """On CUDA the peak is the card's own count; what the ledger can't see must not silently disappear."""
    report = step_report(track(existing=False))
    report = replace(report, peak_allocated=report.peak_allocated + 12345)
    table = report.top(None)
    assert table["bytes"].sum() == report.peak_allocated
    assert table.loc[table["op"].str.startswith("counted by the card"), "bytes"].item() == 12345


def test_n_rows_and_a_wrong_column():
    report = step_report(VirtualGPU("T4"))
    assert len(report.top(3)) == 3
    with pytest.raises(ValueError, match=r"by='layer': takes one or several of 'category', 'phase', 'module', 'op'"):
        report.top(by="layer")
    with pytest.raises(ValueError, match="by='nothing'"):
        report.top(by=[])


def test_a_report_of_nothing():
    with VirtualGPU("T4") as gpu:
        pass
    report = gpu.report()
    assert len(report.top(None)) == 0
    assert (report.diff(report)["change"] == 0).all()


def test_the_difference_of_two_reports():
    small, large = (step_report(VirtualGPU("T4"), batch=batch) for batch in (4096, 8192))
    table = small.diff(large)
    assert table.loc[("peak", "allocated"), "change"] == large.peak_allocated - small.peak_allocated > 0
    assert table.loc[("category", "activations"), "change"] > 0
    assert table.loc[("category", "parameters"), "change"] == 0
    assert table.loc["top", "change"].sum() == table.loc[("peak", "allocated"), "change"]
    back = large.diff(small)
    assert back["change"].sort_index().equals(-table["change"].sort_index())
    assert f"peak: allocated: {size(small.peak_allocated)} -> {size(large.peak_allocated)} (+" in table.text
    assert isinstance(table, pd.DataFrame)


def test_phases_that_only_one_report_has():
    one = step_report(VirtualGPU("T4"))
    with VirtualGPU("T4") as gpu, gpu.phase("rollout"):
        torch.zeros(MiB)
    table = one.diff(gpu.report())
    assert pd.isna(table.loc[("phase", "rollout"), "before"])
    assert pd.isna(table.loc[("phase", "backward"), "change"])
    assert table.loc[("phase", "rollout"), "after"] == 4 * MiB
    assert "phase: rollout: 4.00 MiB, only after" in table.text


def test_the_timeline_ends_with_the_last_phase():
    """It sloped down to nothing: releases after the run, of a function's locals, were drawn as part of it."""
    def run(gpu):
        with gpu.phase("forward"):
            x = torch.zeros(MiB)
            y = x + 1
        return x, y

    with VirtualGPU("T4") as gpu:
        run(gpu)
    report = gpu.report()
    assert report.timeline["allocated"].tolist() == [4 * MiB, 8 * MiB]
    assert set(report.timeline["phase"]) == {"forward"}
    assert report.log[-1][0] == -1                                  # the log knows of the releases
    assert len(report.log) > len(report.timeline)


def test_without_phases_the_timeline_is_all_there_was():
    with VirtualGPU("T4") as gpu:
        x = torch.zeros(MiB)
        del x
    assert gpu.report().timeline["allocated"].tolist() == [4 * MiB, 0]


def out_of_memory(enforce: bool):
    """A forward that runs out at its logits."""
    with VirtualGPU(64 * MiB, enforce=enforce) as gpu, Whence(gpu.ledger, stacks=True):
        gpu.ledger.vocabularies.add(5000)
        model = torch.nn.Sequential(torch.nn.Linear(8, 5000))
        try:
            with gpu.phase("forward"):
                model(torch.zeros(4096, 8))                         # 78 MiB
        except torch.OutOfMemoryError:
            assert enforce
    return gpu.report()


def test_what_ran_out_is_told_in_full():
    """The failed allocation's category was None: it was looked up before the record had one."""
    report = out_of_memory(enforce=False)
    assert report.oom["category"] == "logits"
    assert report.oom["module"] == "0"
    assert report.oom["line"].startswith("test_report.py:")
    assert "aten.addmm in 0 asked for 0.08 GiB in phase 'forward'" in str(report)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 80.00 MiB"):   # the segment
        report.raise_if_oom()


def test_what_ran_out_is_told_in_full_when_enforced():
    report = out_of_memory(enforce=True)
    assert (report.oom["op"], report.oom["phase"]) == ("aten.addmm", "forward")
    assert report.oom["category"] == "logits"
    assert report.oom["module"] == "0"
    assert report.oom["line"].startswith("test_report.py:")
