"""Memory must come back after an out-of-memory error, also in a real notebook kernel."""
import weakref

import pytest
import torch
from jupyter_client.manager import start_new_kernel

from grpo_lab import oom_guard
from grpo_lab.memory.ledger import cuda_message

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


CELLS = {
    "define": "import torch, weakref\nfrom grpo_lab import oom_guard\n"
              "from grpo_lab.memory.guard import forget_last_error\nseen = []\n"
              "def fail():\n    big = torch.zeros(1000)\n    seen.append(weakref.ref(big))\n"
              "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
    "uncaught": "fail()",
    "held": "print(seen[-1]() is not None)",
    "forgotten": "forget_last_error()\nprint(seen[-1]() is None)",
    "guarded": "with oom_guard() as oom:\n    fail()\nprint(seen[-1]() is None, oom.requested)",
}


def test_in_a_real_kernel():
    """After an uncaught error the failed frame's locals stay alive: clearing sys.last_* is not enough on IPython 9."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        said = {}
        for name, code in CELLS.items():
            out = []
            client.execute_interactive(code, timeout=120, output_hook=lambda m, out=out: out.append(
                m["content"].get("text", "")))
            said[name] = "".join(out).strip()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert said["held"] == "True"           # or there would be nothing to cure
    assert said["forgotten"] == "True"
    assert said["guarded"] == f"True {2 * GiB}"
