"""Memory must come back after an out-of-memory error, also in a real notebook kernel."""
import weakref

import pytest
import torch
from jupyter_client.manager import start_new_kernel

from grpo_lab import oom_guard
from grpo_lab.memory.cuda_words import cuda_message

GiB = 2**30


def run_out(witnesses: list) -> None:
    activations = torch.zeros(1000, requires_grad=True) * 2
    witnesses.append(weakref.ref(activations))
    oom = {"requested": 2 * GiB, "allocated": 12 * GiB, "reserved": 13 * GiB}
    raise torch.OutOfMemoryError(cuda_message(oom, budget=15 * GiB, context=GiB // 2))


def test_the_frame_that_failed_lets_go():
    witnesses: list = []
    with oom_guard() as oom:
        run_out(witnesses)
    assert witnesses[0]() is None
    assert oom
    assert (oom.requested, oom.allocated, oom.unallocated, oom.free) == (2 * GiB, 12 * GiB, GiB, 2 * GiB)
    assert oom.message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_other_errors_pass_and_no_error_is_false():
    with pytest.raises(KeyError), oom_guard():
        raise KeyError("x")
    with oom_guard() as oom:
        pass
    assert not oom


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 80000000000 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ExceptionGroup("two ranks", [torch.OutOfMemoryError("a"), ExceptionGroup("more", [torch.OutOfMemoryError("b")])]),
])
def test_out_of_memory_by_other_names(error):
    with oom_guard() as oom:
        raise error
    assert oom and oom.message


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"),
    ExceptionGroup("both", [torch.OutOfMemoryError("a"), ValueError("b")]),
])
def test_what_is_none_passes(error):
    with pytest.raises(type(error)), oom_guard() as oom:
        raise error
    assert not oom


def test_raised_from_one_is_one_but_raised_beside_one_is_not():
    with oom_guard() as oom:
        try:
            run_out([])
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the trainer failed") from error
    assert oom.requested == 2 * GiB                         # the numbers are those of the cause
    with pytest.raises(KeyError), oom_guard() as oom:
        try:
            run_out([])
        except torch.OutOfMemoryError:
            {}["a mistake in the handler"]
    assert not oom


def test_the_real_allocator_on_the_cpu():
    with oom_guard() as oom:
        torch.empty(2**60)
    assert "allocate" in oom.message


# Ways to run out. Each makes tensors that only the failed call's frames hold, and notes them in `seen`.
PRELUDE = """
import gc, torch, weakref
from grpo_lab import VirtualGPU, oom_guard, track
from grpo_lab.memory.guard import forget_last_error
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
seen = []
def note(x):
    seen.append(weakref.ref(x))
    return x
def deep(n, error):
    big = note(torch.zeros(1000))
    if n:
        return deep(n - 1, error)
    raise error
def left():
    return len(seen), sum(ref() is not None for ref in seen)
def fresh():
    return torch.OutOfMemoryError(*OOM.args)
class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(note(x * 2))
        return x * 3
    @staticmethod
    def backward(ctx, grad):
        saved, more = ctx.saved_tensors, note(grad + 1)
        raise fresh()
class Hungry(torch.nn.Module):
    def forward(self, x):
        y = note(x * 2)
        return note(torch.cat([y] * 4096))
"""
FAILS = {
    "in nested calls": "def fail():\n    deep(5, fresh())",
    "in a method of an object with state": "class Trainer:\n    def __init__(self):\n"
        "        self.state = note(torch.zeros(9))\n    def train(self):\n        deep(1, fresh())\n"
        "def fail():\n    Trainer().train()",
    "in a generator": "def produce():\n    x = note(torch.zeros(9))\n    yield 1\n    deep(1, fresh())\n"
        "def fail():\n    for _ in produce():\n        y = note(torch.zeros(9))",
    "raised from another": "def fail():\n    try:\n        deep(2, fresh())\n"
        "    except torch.OutOfMemoryError as error:\n        mine = note(torch.zeros(9))\n"
        "        raise RuntimeError('training failed') from error",
    "while another was handled": "def fail():\n    x = note(torch.zeros(9))\n    try:\n        x.no_such_thing\n"
        "    except AttributeError:\n        try:\n            deep(1, ValueError(note(torch.zeros(9))))\n"
        "        except ValueError:\n            deep(2, fresh())",
    "in a group": "def fail():\n    errors = []\n    for _ in range(2):\n        try:\n            deep(2, fresh())\n"
        "        except torch.OutOfMemoryError as error:\n            errors.append(error)\n"
        "    raise ExceptionGroup('two ranks', errors)",
    "in a backward": "def fail():\n    w = note(torch.ones(1000, requires_grad=True))\n"
        "    y = note(Breaks.apply(w * 2))\n    (y * y).sum().backward()",
    "in a recomputed forward": "from torch.utils.checkpoint import checkpoint\n"
        "def second(x, calls=[]):\n    calls.append(1)\n    y = note(x * 2)\n"
        "    if len(calls) % 2 == 0:\n        deep(1, fresh())\n    return y * y\n"
        "def fail():\n    w = note(torch.ones(1000, requires_grad=True))\n"
        "    checkpoint(second, w * 3, use_reentrant=False).sum().backward()",
    "on a virtual card": "def fail():\n    with VirtualGPU(2**28) as gpu:\n        w = note(torch.ones(4096, 8))\n"
        "        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Hungry())\n        model(w)",
    "in a backward on a virtual card": "def fail():\n    with VirtualGPU(100 * 2**20) as gpu:\n"
        "        w = note(torch.ones(2**23, requires_grad=True))\n        note(w.exp()).exp().sum().backward()",
    "on a budget with real tensors": "def fail():\n    with track(budget=2**26, existing=False) as memory:\n"
        "        w = note(torch.ones(4096, 8))\n        Hungry()(w)",
    "in a tracked backward": "def fail():\n    with track(budget=100 * 2**20, existing=False):\n"
        "        w = note(torch.ones(2**23, requires_grad=True))\n        note(w.exp()).exp().sum().backward()",
}


@pytest.fixture(scope="module")
def kernel():
    """Runs a cell in a real kernel; what it printed, and the name of the error."""
    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> tuple[str, str | None]:
        out = []
        reply = client.execute_interactive(code, timeout=120, output_hook=lambda message: out.append(
            message["content"].get("text", "") if message["msg_type"] == "stream" else ""))
        return "".join(out).strip(), reply["content"].get("ename")

    try:
        assert run(PRELUDE) == ("", None)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("way", FAILS)
def test_every_byte_comes_back_in_a_real_kernel(kernel, way):
    """After an uncaught error the failed frame's locals stay alive: clearing sys.last_* is not enough on IPython 9."""
    kernel("seen.clear()\n" + FAILS[way])
    said, error = kernel("with oom_guard() as oom:\n    fail()\nprint(bool(oom), *left())")
    caught, made, held = said.split()
    assert (error, caught, held) == (None, "True", "0")
    assert int(made) >= 2

    kernel("seen.clear()")
    _, error = kernel("fail()")                             # and nobody catches it
    assert error in ("OutOfMemoryError", "RuntimeError", "ExceptionGroup")
    said, _ = kernel("gc.collect()\nprint(*left())")
    made, held = map(int, said.split())
    assert made >= 2 and held >= 1                          # or there would be nothing to cure
    assert kernel("forget_last_error()\nprint(left()[1])") == ("0", None)


def test_after_the_magic(kernel):
    kernel("%load_ext grpo_lab\nseen.clear()\n" + FAILS["in nested calls"])
    _, error = kernel("%%vram --gpu T4\nfail()")
    assert error == "OutOfMemoryError"
    assert kernel("forget_last_error()\nprint(left()[1], len(seen) > 0)") == ("0 True", None)


def test_after_the_debugger(kernel):
    kernel("seen.clear()\ndef fail():\n    deep(2, fresh())")
    kernel("fail()")
    kernel("import sys\nshell = get_ipython()\nshell.InteractiveTB.pdb = shell.InteractiveTB.debugger_cls()\n"
           "shell.InteractiveTB.pdb.setup(None, sys.last_traceback)")
    assert kernel("gc.collect()\nforget_last_error()\nprint(left()[1])") == ("0", None)
