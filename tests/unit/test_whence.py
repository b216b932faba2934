"""Which module and which lines a storage came from: forwards, backwards, recomputation, adapters, errors."""
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from grpo_lab import VirtualGPU, track
from grpo_lab.memory.ledger import Ledger
from grpo_lab.memory.whence import Whence


class Block(torch.nn.Module):
    def __init__(self, recompute: bool | None = None):
        super().__init__()
        self.up, self.down, self.recompute = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), recompute

    def inner(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.recompute is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.recompute)


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x / 2


def records(ledger: Ledger) -> list:
    return [event[1] for event in ledger.events if event[0] > 0]


def made(ledger: Ledger, op: str, phase: str) -> set[str]:
    """The modules of the records of one op and phase."""
    return {r.module for r in records(ledger) if str(r.op).startswith(op) and r.phase == phase}


def run(instrument, stacks: bool = False, whence: bool = True, **options) -> Ledger:
    with instrument as on, Whence(on.ledger, stacks=stacks) if whence else nullcontext():
        model = Model(**options)
        with on.phase("forward"):
            loss = (model(torch.ones(4, 8, requires_grad=True)) / 3).sum()      # the line of the loss
        with on.phase("backward"):
            loss.backward()                                                     # the line of the backward
    return on.ledger


INSTRUMENTS = [lambda: VirtualGPU("T4"), lambda: track(existing=False)]


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_forward_and_backward_know_their_module(instrument):
    ledger = run(instrument())
    linears = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert made(ledger, "aten.addmm", "forward") == linears
    assert made(ledger, "aten.mm", "backward") == linears
    assert made(ledger, "aten.relu", "forward") == made(ledger, "aten.threshold_backward", "backward") == {
        "layers.0", "layers.1"}
    assert made(ledger, "aten.div", "forward") == {"Model", ""}                 # inside the root, and outside
    assert made(ledger, "aten.div", "backward") == {"Model", "DivBackward0"}    # no module made this node


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_runs_again_in_its_module(reentrant):
    """Inside a backward pass the running node is the checkpoint's, not that of the op."""
    ledger = run(VirtualGPU("T4"), recompute=reentrant)
    linears = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert made(ledger, "aten.mm", "backward") == linears
    again = {f"layers.{i}.up" for i in (0, 1)} if not reentrant else linears    # the other stops when it has enough
    assert made(ledger, "aten.addmm", "backward") >= again


def line_of(words: str) -> int:
    return next(i for i, line in enumerate(open(__file__), 1) if words in line and "line_of" not in line)


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_lines(instrument):
    ledger = run(instrument(), stacks=True)
    for phase in ("forward", "backward"):               # a backward op has the line of its forward
        relu = next(r for r in records(ledger) if str(r.op).startswith(("aten.relu", "aten.threshold"))
                    and r.phase == phase)
        assert relu.frames == ((__file__, line_of("self.down(torch.relu"), "Block.inner"),)
    loss = [r for r in records(ledger) if str(r.op).startswith("aten.div") and not r.module.startswith("Model")]
    assert {r.frames[0][1] for r in loss} == {line_of("# the line of the loss")}
    ones = next(r for r in records(ledger) if str(r.op).startswith("aten.ones_like"))
    assert ones.frames[0][1] == line_of("# the line of the backward")          # where no forward made it


def test_a_librarys_line_and_the_users():
    from tiny_llama import make_model
    with track(existing=False) as memory, Whence(memory.ledger, stacks=True):
        make_model()(torch.zeros(1, 4, dtype=torch.long))
    rows = {r.module: r.frames for r in records(memory.ledger)}
    library, user = rows["model.layers.0.mlp"]
    assert library[0].endswith("modeling_llama.py") and library[2] == "LlamaMLP.forward"
    assert user[::2] == (__file__, "test_a_librarys_line_and_the_users")


def test_adapters_and_inner_calls_go_by_the_outermost_name():
    """An inner part that is called alone (as TRL calls the body without its head) keeps the whole model's names."""
    with VirtualGPU("T4") as gpu, Whence(gpu.ledger):
        model = Model()
        gpu.ledger.watch(model)
        model.layers[1](torch.ones(4, 8))
        model.layers[1].down = torch.nn.Sequential(model.layers[1].down)        # added since
        model(torch.ones(4, 8))
        torch.nn.ReLU()(torch.ones(4, 8))                                       # nobody's part
    modules = {r.module for r in records(gpu.ledger)}
    assert {"layers.1.up", "layers.1.down", "layers.1.down.0", "Model", "ReLU"} <= modules
    assert not [name for name in modules if name in ("up", "down")]


def test_weights_belong_to_their_module():
    with VirtualGPU("T4") as gpu, Whence(gpu.ledger):
        model = Model()
        gpu.ledger.watch(model)                                                 # and never called
    weights = [r.module for r in records(gpu.ledger) if r.category == "parameters"]
    assert sorted(set(weights)) == sorted(f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down"))
    assert len(weights) == 8


def test_an_error_inside_leaves_nothing_behind():
    with VirtualGPU("T4") as gpu, Whence(gpu.ledger):
        model = Model()
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 9))
        x = torch.ones(3)
    assert records(gpu.ledger)[-1].module == ""
    assert x.shape == (3,)
    assert not nn_module._global_forward_hooks and not nn_module._global_forward_pre_hooks
    assert gpu.ledger.locate is None


def test_another_threads_nodes_are_not_mistaken():
    """Each thread numbers its own autograd nodes: those of a second one must not be looked up among the first's."""
    with track(existing=False) as memory, Whence(memory.ledger):
        model = Model()
        model(torch.ones(4, 8)).sum()
        seen = []

        def elsewhere():
            with memory.ledger:
                loss = model.layers[0](torch.ones(4, 8)).sum()
                start = len(memory.ledger.events)
                loss.backward()
                seen.extend(memory.ledger.events[start:])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    modules = {event[1].module for event in seen if event[0] > 0}
    assert modules and not [name for name in modules if name.startswith("layers")]


@pytest.mark.parametrize("instrument", INSTRUMENTS)
@pytest.mark.parametrize("recompute", [None, True, False])
def test_looking_changes_no_bytes(instrument, recompute):
    with_it, without = (run(instrument(), stacks=on, whence=on, recompute=recompute) for on in (True, False))
    lives = [[(sign, record.bytes, str(record.op)) for sign, record, *_ in ledger.events[:ledger.phases[-1]["end"]]]
             for ledger in (with_it, without)]
    assert lives[0] == lives[1]
