"""PyTorch's own viewer opens what a report saves: the trace, the segments, the flame graphs, the texts."""
import base64
import json
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import _memory_viz

from grpo_lab import VirtualGPU, track
from grpo_lab.memory.snapshot import DriverLog
from grpo_lab.memory.whence import Whence

MiB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step on the virtual card that ends with an emptied cache, its report and its snapshot."""
    with VirtualGPU("T4") as gpu, Whence(gpu.ledger, stacks=True):
        gpu.ledger.allocator.log = DriverLog(gpu.ledger.events)
        model = torch.nn.Sequential(torch.nn.Linear(1000, 5000), torch.nn.GELU())
        gpu.ledger.watch(model)
        with gpu.phase("forward"):
            loss = model(torch.zeros(3000, 1000)).mean()
        with gpu.phase("backward"):
            loss.backward()
        del loss
        gpu.ledger.allocator.empty_cache()
    report = gpu.report()
    path = report.save_snapshot(tmp_path_factory.mktemp("snapshot") / "step.pickle")
    with open(path, "rb") as file:
        return SimpleNamespace(report=report, path=path, snapshot=pickle.load(file), allocator=gpu.ledger.allocator,
                               model=model)


# `python -m torch.cuda._memory_viz`, several commands in one process (importing torch is what takes the time).
VIEWER = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    sys.argv = ["_memory_viz", *line.split("\t")]
    runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
    print("\f", end="")
"""


def viewer(*commands: list) -> list[str]:
    """What each command prints."""
    lines = "\n".join("\t".join(map(str, words)) for words in commands)
    done = subprocess.run([sys.executable, "-c", VIEWER], input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\f")[:-1]


@pytest.fixture(scope="module")
def opened(run, tmp_path_factory):
    """What the viewer makes of the file, by command."""
    folder = tmp_path_factory.mktemp("viewer")
    plots = ["trace_plot", "trace_plot -s", "trace_plot -f", "segment_plot"]
    said = viewer(["stats", run.path], ["trace", run.path],
                  *([*name.split(), run.path, "-o", folder / f"{name}.html"] for name in plots))
    return {"stats": said[0], "trace": said[1]} | {name: (folder / f"{name}.html").read_text() for name in plots}


@pytest.mark.parametrize("command", ["trace_plot", "trace_plot -s", "trace_plot -f", "segment_plot"])
def test_the_plots_open(opened, command):
    files = json.loads(re.search(r"const local_files = (\[.*\])", opened[command])[1])
    shown = pickle.loads(base64.b64decode(files[0]["base64"]))
    said = {frame["name"] for event in shown["device_traces"][0] for frame in event["frames"]}
    assert said >= {"aten.mm", "backward", "0"}
    assert ("aten.addmm" in said) == (command != "trace_plot -f")       # -f leaves out what was freed
    assert {block["state"] for segment in shown["segments"] for block in segment["blocks"]} == {"active_allocated",
                                                                                                   "inactive"}


def test_the_texts(run, opened):
    stats, trace = opened["stats"], opened["trace"]
    assert f"total_reserved: {_memory_viz.Bytes(run.allocator.reserved)}" in stats
    assert f"segments: {len(run.snapshot['segments'])}" in stats
    mallocs = sum(action == "segment_alloc" for _, action, *_ in run.report.heap.driver)
    assert trace.count("= cudaMalloc(") == mallocs > 3
    assert trace.count("cudaFree(") > 0                             # the cache was emptied
    assert re.search(r"= \w+\[0:58\.0MiB\]", trace)                 # the Linear's output, at the start of its segment


def test_the_flame_graphs(run):
    """Their drawing is a Perl script that the viewer downloads; what it is given is made here."""
    lines = _memory_viz.memory(run.snapshot, format_flamegraph=lambda lines: lines).splitlines()
    gradient = (r"stream_0;active_allocated;phase:0:backward;module:0:0;test_snapshot\.py:\d+:run;"
                r"gradients:0:aten\.mm 20000000")
    assert [line for line in lines if re.fullmatch(gradient, line)]
    assert not [line for line in lines if "active_allocated;<non-python>" in line]     # every block says whose it is
    assert "stream_0;seg_" in _memory_viz.segments(run.snapshot, format_flamegraph=lambda lines: lines)


def test_what_the_trace_holds_is_what_the_segments_hold(run):
    """The segment view draws the end and goes backwards from there: the two must agree."""
    held, segments = {}, {}
    for event in run.snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            end = event["addr"] + event["size"]
            assert sum(a <= event["addr"] and end <= a + size for a, size in segments.items()) == 1
            held[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert held.pop(event["addr"]) == event["size"]
        elif event["action"] == "segment_alloc":
            segments[event["addr"]] = event["size"]
        elif event["action"] == "segment_free":
            size = segments.pop(event["addr"])
            assert not [a for a in held if event["addr"] <= a < event["addr"] + size]
    assert segments == {s["address"]: s["total_size"] for s in run.snapshot["segments"]}
    blocks = [b for s in run.snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert held == {b["address"]: b["size"] for b in blocks}
    assert all(b["frames"] for b in blocks)
    assert sum(segments.values()) == run.allocator.reserved


def test_stacks_are_real_lines(run):
    event = next(e for e in run.snapshot["device_traces"][0] if e["frames"] and e["frames"][0]["name"] == "aten.addmm")
    op, line, module, phase = event["frames"]
    assert (op["filename"], module["name"], phase["name"]) == ("activations", "0", "forward")
    assert line["filename"] == __file__
    assert "model(torch.zeros" in open(__file__).read().splitlines()[line["line"] - 1]


def test_the_category_that_the_viewer_insists_on(run):
    """MemoryViz.js adds "unknown" to the categories through a misspelt name, and stops: it must be there already."""
    categories = {event.get("category") for event in run.snapshot["device_traces"][0]}
    assert {"unknown", "parameters", "activations", "gradients"} <= categories


def test_running_out_is_in_the_trace(tmp_path):
    with VirtualGPU(64 * MiB, enforce=False) as gpu:
        gpu.ledger.allocator.log = DriverLog(gpu.ledger.events)
        torch.zeros(40 * MiB)
    with open(gpu.report().save_snapshot(tmp_path / "oom.pickle"), "rb") as file:
        trace = _memory_viz.trace(pickle.load(file))
    assert "raise OutOfMemoryError # 160.0MiB requested, 64.0MiB free in CUDA" in trace


def test_real_tensors_too(tmp_path):
    with track(existing=False) as memory:
        torch.zeros(MiB)
    with open(memory.report().save_snapshot(tmp_path / "real.pickle"), "rb") as file:
        snapshot = pickle.load(file)
    assert ":4.0MiB]" in _memory_viz.trace(snapshot)
    assert [segment["total_size"] for segment in snapshot["segments"]] == [20 * MiB]


def test_no_such_folder(tmp_path):
    with VirtualGPU("T4") as gpu:
        pass
    with pytest.raises(FileNotFoundError, match="save_snapshot: the folder .*nowhere does not exist; make it first"):
        gpu.report().save_snapshot(tmp_path / "nowhere" / "x.pickle")
