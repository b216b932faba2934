"""A graphics card that isn't there: PyTorch code runs on fake tensors, its bytes go through a replica of the card.

>>> import torch
>>> with VirtualGPU("RTX 3080 Laptop 8GB") as gpu:
...     with gpu.phase("forward"):
...         x = torch.empty(2**20, 1024)                        # 4 GiB, none of it real
...     try:
...         y = x + 1
...     except torch.OutOfMemoryError as error:
...         print(str(error)[:56])
CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 ha

Only shapes are computed. Inside, ``device="cuda"`` is accepted and means the virtual card; values can't be read: a
branch on a fake boolean takes the False side, a fake number reads as 1 (:data:`READ_AS`).
"""
from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import gpus
from .allocator import CachingAllocator
from .allocator_settings import AllocatorSettings
from .cuda_api import cuda_api
from .ledger import Ledger, aten, held_by
from .memo import Memo
from .patches import cuda_choices, kv_cache_known
from .report import MemoryReport

WHICH_DEVICE = torch.ops.prim.device.default
READ_AS = {torch.bool: False}       # everything else reads as 1

# cuBLAS's workspace a handle and stream: ":4096:2:16:8" before Hopper, ":4096:8" from Hopper on
# (getChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp). Autograd's thread has a handle of its own.
CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER = 8_519_680, 33_554_432
PAGED_FROM = 100_000                # weights: a paged optimizer keeps the states of smaller ones as usual
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class VirtualLedger(Ledger):
    """The ledger over fake tensors: reads get an answer, and a card's own workspaces are added by name."""

    def __init__(self, *args, cublas: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.cublas, self._handles = cublas, set()
        self._elsewhere, self._paged = 0, []
        self.on_the_card = {}           # op -> f(run, *args): what it does there, op by op; None where the op will do
        self.run = lambda func, args, kwargs: func(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is WHICH_DEVICE:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default:
            constant = args[0].constant if isinstance(args[0], FakeTensor) else args[0]
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return READ_AS.get(args[0].dtype, 1) if constant is None else constant.item()
        if func in MATMULS and self.cublas:
            thread = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            if thread not in self._handles:
                self._handles.add(thread)
                self.add(self.cublas, f"cuBLAS workspace ({thread} thread)", "workspace")
        if func in self.on_the_card:
            out = self.on_the_card[func](self._run_one, *args, **(kwargs or {}))
            if out is not None:
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run_one(self, func, *args, **kwargs):
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _see(self, func, args, out) -> None:
        if not self._elsewhere:
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
        if getattr(optimizer, "is_paged", False) and "get_state_buffer" not in vars(optimizer):
            optimizer._cpu_paged_warned = True              # its fakes lie on a CPU: no word about that
            optimizer.get_state_buffer = functools.partial(self._paged_state, optimizer.get_state_buffer)
            self._paged.append(optimizer)

    def _paged_state(self, get_state_buffer, parameter, dtype=torch.float32):
        """bitsandbytes keeps larger states in managed memory (`get_state_buffer` in bitsandbytes/optim/optimizer.py)."""
        with self.elsewhere() if parameter.numel() >= PAGED_FROM else nullcontext():
            return get_state_buffer(parameter, dtype=dtype)

    def __exit__(self, *exc):
        for optimizer in self._paged:
            vars(optimizer).pop("get_state_buffer", None)
        return super().__exit__(*exc)


class VirtualGPU:
    """``with VirtualGPU(card) as gpu``: what runs inside runs on that card, without one.

    ``card``: a name (see ``python -c "from grpo_lab import gpus; print(gpus.names())"``) or a budget in bytes.
    ``enforce=False`` measures past the budget and reports that it would not fit. ``kernels="cpu"`` takes the choices
    that PyTorch makes on a CPU instead of a card's (no foreach optimizers, no cuBLAS workspace): for comparing with
    :func:`track` on a machine without a card. ``alloc_conf`` is what PYTORCH_ALLOC_CONF would hold
    (``"expandable_segments:True"``); None means PyTorch's defaults, whatever this machine's environment says.
    """

    def __init__(self, card: str | int, enforce: bool = True, kernels: str = "cuda", alloc_conf: str | None = None):
        if kernels not in ("cuda", "cpu"):
            raise ValueError(f"kernels={kernels!r}: takes 'cuda' (the card's choices) or 'cpu' (this machine's)")
        self.card, self.kernels = gpus.get(card), kernels
        self.ledger = VirtualLedger(
            CachingAllocator(self.card.budget, AllocatorSettings.of(alloc_conf), self.card.total_memory), enforce=enforce, context=self.card.total_memory - self.card.budget,
            cublas=self._cublas() if kernels == "cuda" else None)
        self._stack = None

    def _cublas(self) -> int:
        return CUBLAS_WORKSPACE if self.card.compute_capability < (9, 0) else CUBLAS_WORKSPACE_HOPPER

    def __enter__(self) -> VirtualGPU:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            raise RuntimeError("a VirtualGPU can't be opened inside another one (or inside a FakeTensorMode): "
                               "leave the outer `with` first")
        self._stack = ExitStack()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger.run = Memo(self.fake)
        self._stack.enter_context(cuda_api(self.ledger.allocator, self.card))
        self._stack.enter_context(cuda_choices(foreach=self.kernels == "cuda"))
        self._stack.enter_context(kv_cache_known(self.ledger))
        self._stack.enter_context(self.fake)
        self._stack.enter_context(self.ledger)
        self._stack.enter_context(CudaIsHere())
        return self

    def __exit__(self, *exc) -> None:
        self._stack.close()

    def phase(self, name: str):
        """``with gpu.phase("forward")``: names what runs inside, in the report and in the pictures."""
        return self.ledger.phase(name)

    def load(self, model: str, dtype: str = "float32", category: str = "parameters", quantization: str | None = None,
             compute_dtype: str | None = None, **options):
        """A transformers model of that architecture with fake weights, counted in phase "load".

        ``model`` as in :func:`grpo_lab.models.config`; ``options`` go to the model as ``from_pretrained`` would take
        them (``attn_implementation="eager"``). ``quantization``: None, "nf4", or "nf4_double"; then ``compute_dtype``
        is the dtype that the 4-bit layers multiply in (None: ``dtype``).
        """
        from transformers import AutoModelForCausalLM

        from .. import models
        config = models.config(model)
        weights = getattr(torch, dtype)
        with _disable_current_modes(), torch.device("meta"):    # else the fake mode would make fake meta tensors
            module = AutoModelForCausalLM.from_config(config, dtype=weights, **options)
        with self.phase("load"):
            if quantization is not None:
                self._quantize(module, quantization, weights, getattr(torch, compute_dtype or dtype), category)
            self.place(module, category)
        module.train(False)             # as from_pretrained leaves it
        return module

    def _quantize(self, module, quantization, weights, compute, category) -> None:
        from . import nf4
        nf4.replace_linears(module, quantization, weights, compute)
        self.ledger.on_the_card[torch.ops.bitsandbytes.gemm_4bit.default] = nf4.gemm_4bit
        with torch.no_grad():
            nf4.pack_weights(module, weights)

    def place(self, module: torch.nn.Module, category: str = "parameters") -> torch.nn.Module:
        """Puts a module that lies on the meta device onto the card: fake weights of the same shapes and dtypes."""
        with self.ledger.category(category), torch.no_grad():
            materialize(module)
        self.ledger.adopt(held_by(module), category)            # tables made of Python numbers, which no op makes
        self.ledger.watch(module, category)
        return module

    def report(self) -> MemoryReport:
        """What happened so far."""
        return MemoryReport.of(self.ledger, card=self.card.name, budget=self.card.budget)


def materialize(module: torch.nn.Module) -> None:
    """Replaces meta parameters and buffers by empty ones under the present mode; ties and requires_grad stay."""
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, old in store.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if store is part._parameters else new
                store[name] = made[id(old)]


class CudaIsHere(TorchFunctionMode):
    """Takes ``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` for the virtual card, where everything is already."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_here(a) for a in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _here(kwargs["device"])}
        return func(*args, **kwargs)


def _here(value):
    """Any CUDA device means the virtual card, whose tensors are fake CPU tensors."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value
