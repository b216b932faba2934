"""The ledger over a virtual card: reads get an answer, and what a card's libraries and kernels take is added by name.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu:
...     x = torch.empty(64, 64)
...     y = x @ x
>>> [(str(record.op), record.bytes) for sign, record, *_ in gpu.ledger.events if record.category == "workspace"]
[('cuBLAS workspace (forward thread)', 8519680)]
"""
from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import cuda_kernels
from .host import HostMemory
from .ledger import Ledger, aten, leaves, op_name
from .values import READ_AS

WHICH_DEVICE = torch.ops.prim.device.default

PAGED_FROM = 100_000                # weights: a paged optimizer keeps the states of smaller ones as usual
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class VirtualLedger(Ledger):
    """``capability``: the card's compute capability; None leaves out what only a card does."""

    def __init__(self, *args, capability: tuple[int, int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.capability, self._handles = capability, set()
        self._elsewhere, self._paged = 0, []
        self.host, self._stepping = HostMemory(counts=capability is not None), None
        self.on_the_card = {}           # op -> f(run, *args): what it does there, op by op; None where the op will do
        self.run = lambda func, args, kwargs: func(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is WHICH_DEVICE:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default:
            constant = args[0].constant if isinstance(args[0], FakeTensor) else args[0]
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return READ_AS.get(args[0].dtype, 1) if constant is None else constant.item()
        if kwargs and kwargs.get("pin_memory"):             # asked for inside another op, by a hook of autograd's
            with self.host.making("host"):
                return self.__torch_dispatch__(func, types, args, {**kwargs, "pin_memory": False})
        if func in self.on_the_card:
            out = self.on_the_card[func](self._run_one, *args, **(kwargs or {}))
            if out is not None:
                return out
        if self.capability is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in MATMULS:
            self._workspaces(func, args, kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in cuda_kernels.TEMPORARIES and not self.host.takes(args):
            self._temporaries(func, args, kwargs or {})
        return out

    def _workspaces(self, func, args, kwargs) -> None:
        """Kept by each thread's handle from the first use on; a card's backward runs on a thread of its own."""
        thread = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        needed = [("cuBLAS", cuda_kernels.cublas_workspace(self.capability))]
        if func is aten.addmm.default and cuda_kernels.takes_cublaslt(args, kwargs):
            needed.append(("cuBLASLt", cuda_kernels.cublaslt_workspace()))
        for library, nbytes in needed:
            if (library, thread) not in self._handles and nbytes:
                self._handles.add((library, thread))
                self.add(nbytes, f"{library} workspace ({thread} thread)", "workspace")

    def _temporaries(self, func, args, kwargs) -> None:
        """What a kernel takes beside its outputs and gives back at its end."""
        made = [self.add(nbytes, f"{op_name(func)} ({name})", "temporaries")
                for name, nbytes in cuda_kernels.inside(func, args, kwargs, self.capability)]
        for record in made:
            self.drop(record)

    def _run_one(self, func, *args, **kwargs):
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _see(self, func, args, out) -> None:
        if self._elsewhere:
            return
        if self.host.takes(args):
            for storage in (tensor.untyped_storage() for tensor in leaves(out)):
                if storage._cdata not in self._records:
                    self.host.enter(storage)
            return
        if self.capability is not None and func in cuda_kernels.ON_THE_HOST:
            out = [item for place, item in enumerate(out) if place not in cuda_kernels.ON_THE_HOST[func]]
        super()._see(func, args, out)

    @contextmanager
    def elsewhere(self):
        """What is made inside lies outside the allocator: in the host's memory, or in memory that CUDA moves about."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    def _before_step(self, optimizer, args, kwargs) -> None:
        super()._before_step(optimizer, args, kwargs)
        if self.host.holds(p for group in optimizer.param_groups for p in group["params"]):
            self._stepping = self.host.making("host")        # also what it makes without looking at a weight
            self._stepping.__enter__()
        if getattr(optimizer, "is_paged", False) and "get_state_buffer" not in vars(optimizer):
            optimizer._cpu_paged_warned = True              # its fakes lie on a CPU: no word about that
            optimizer.get_state_buffer = functools.partial(self._paged_state, optimizer.get_state_buffer)
            self._paged.append(optimizer)

    def _after_step(self, optimizer, args, kwargs) -> None:
        if self._stepping is not None:
            self._stepping.__exit__(None, None, None)
            self._stepping = None
        super()._after_step(optimizer, args, kwargs)

    def _paged_state(self, get_state_buffer, parameter, dtype=torch.float32):
        """bitsandbytes keeps larger states in managed memory (`get_state_buffer` in bitsandbytes/optim/optimizer.py)."""
        with self.elsewhere() if parameter.numel() >= PAGED_FROM else nullcontext():
            return get_state_buffer(parameter, dtype=dtype)

    def __exit__(self, *exc):
        for optimizer in self._paged:
            vars(optimizer).pop("get_state_buffer", None)
        return super().__exit__(*exc)
