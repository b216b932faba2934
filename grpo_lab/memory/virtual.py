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
branch on a fake boolean takes the False side, a fake number reads as 1 (:mod:`grpo_lab.memory.values`).
"""
from __future__ import annotations

import threading
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import gpus
from . import cuda_functions, nf4
from .allocator import CachingAllocator
from .allocator_settings import AllocatorSettings
from .card_ledger import VirtualLedger
from .cuda_api import cuda_api
from .host import is_host, moves
from .ledger import held_by
from .memo import Memo
from .patches import cuda_choices, kv_cache_known
from .report import MemoryReport
from .swap import on_card
from .values import READS, ReadsOfValues
from .whence import Whence


_ONE = threading.Lock()             # what `patches` changes is changed for the whole process


class VirtualGPU:
    """``with VirtualGPU(card) as gpu``: what runs inside runs on that card, without one.

    ``card``: a name (see ``python -c "from grpo_lab import gpus; print(gpus.names())"``) or a budget in bytes.
    ``enforce=False`` measures past the budget and reports that it would not fit. ``kernels="cpu"`` takes the choices
    that PyTorch makes on a CPU instead of a card's (no foreach optimizers, no cuBLAS workspace): for comparing with
    :func:`track` on a machine without a card. ``alloc_conf`` is what PYTORCH_ALLOC_CONF would hold
    (``"expandable_segments:True"``); None means PyTorch's defaults, whatever this machine's environment says.
    ``stacks=True`` also notes the Python lines that made each tensor, for ``report().top()``.
    """

    def __init__(self, card: str | int, enforce: bool = True, kernels: str = "cuda", alloc_conf: str | None = None,
                 stacks: bool = False):
        if kernels not in ("cuda", "cpu"):
            raise ValueError(f"kernels={kernels!r}: takes 'cuda' (the card's choices) or 'cpu' (this machine's)")
        self.card, self.kernels = gpus.get(card), kernels
        capability = self.card.compute_capability if kernels == "cuda" else None
        self.ledger = VirtualLedger(
            CachingAllocator(self.card.budget, AllocatorSettings.of(alloc_conf), self.card.total_memory),
            enforce=enforce, context=self.card.total_memory - self.card.budget, capability=capability)
        self.stacks, self._stack, self._open = stacks, None, False

    def __enter__(self) -> VirtualGPU:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            raise RuntimeError("a VirtualGPU can't be opened inside another one (or inside a FakeTensorMode): "
                               "leave the outer `with` first")
        if not _ONE.acquire(blocking=False):
            raise RuntimeError("a VirtualGPU is open in another thread: only one at a time, for it changes PyTorch's "
                               "functions while it is open")
        self._stack = ExitStack()
        self._stack.callback(_ONE.release)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger.run = Memo(self.fake)
        self._stack.enter_context(cuda_api(self.ledger.allocator, self.card))
        self._stack.enter_context(cuda_choices(self._move_in, self.kernels))
        self._stack.enter_context(kv_cache_known(self.ledger))
        self._stack.enter_context(self.fake)
        self._stack.enter_context(self.ledger)
        self._stack.enter_context(Whence(self.ledger, stacks=self.stacks))
        self.reads = self._stack.enter_context(CudaIsHere(self.ledger))
        self._stack.enter_context(cuda_functions.also_in_backward(self.reads))
        self._open = True
        return self

    def __exit__(self, *exc) -> None:
        self._stack.close()
        self._open = False

    def _move_in(self, module: torch.nn.Module) -> None:
        """A real module moved here (``.to("cuda")``): fake weights stand for its own, which come back at the end."""
        self._stack.enter_context(on_card(self, module))

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
        if not self._open:
            raise RuntimeError("load: this VirtualGPU isn't open; call it inside `with VirtualGPU(...) as gpu:`")
        config = models.config(model)
        weights, compute = _dtype(dtype, "dtype"), _dtype(compute_dtype or dtype, "compute_dtype")
        with _disable_current_modes(), torch.device("meta"):    # else the fake mode would make fake meta tensors
            module = AutoModelForCausalLM.from_config(config, dtype=weights, **options)
        quantizer = nf4.replace_linears(module, quantization, weights, compute) if quantization is not None else None
        with self.phase("load"):
            if quantizer is not None:
                nf4.warm_up(module, quantizer)
            self.place(module, category)
        module.train(False)             # as from_pretrained leaves it
        return module

    def place(self, module: torch.nn.Module, category: str = "parameters") -> torch.nn.Module:
        """Puts a module that lies on the meta device onto the card: fake weights of the same shapes and dtypes."""
        made: dict[int, torch.Tensor] = {}
        with self.ledger.category(category), torch.no_grad():
            if nf4.pack_weights(module, lambda part, name: materialize_one(part._parameters, name, made)):
                self.ledger.on_the_card[torch.ops.bitsandbytes.gemm_4bit.default] = nf4.gemm_4bit
            materialize(module, made)
        self.ledger.adopt(held_by(module), category)            # tables made of Python numbers, which no op makes
        self.ledger.watch(module, category)
        return module

    def report(self) -> MemoryReport:
        """What happened so far."""
        return MemoryReport.of(self.ledger, card=self.card.name, budget=self.card.budget)


def _dtype(dtype: str | torch.dtype, field: str) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{field}={dtype!r}: takes 'float32', 'bfloat16' or 'float16'")
    return found


def materialize(module: torch.nn.Module, made: dict[int, torch.Tensor] | None = None) -> None:
    """Replaces meta parameters and buffers by empty ones under the present mode; ties and requires_grad stay.

    ``made``: what was made before, by the id of what it replaced.
    """
    made = {} if made is None else made
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name in store:
                materialize_one(store, name, made)


def materialize_one(store: dict[str, torch.Tensor | None], name: str, made: dict[int, torch.Tensor]) -> None:
    old = store[name]
    if old is None or old.device.type != "meta":
        return
    if id(old) not in made:
        new = torch.empty(old.shape, dtype=old.dtype)
        is_parameter = isinstance(old, torch.nn.Parameter)
        made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
    store[name] = made[id(old)]


class CudaIsHere(ReadsOfValues):
    """Takes ``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` for the virtual card, where everything is already.

    With a ``capability``, attention, dropout and autocast are a card's.
    """

    def __init__(self, ledger: VirtualLedger):
        super().__init__()
        self.ledger, self.capability = ledger, ledger.capability
        self.handled = READS | {_CUDA, _TO, _CPU} | (cuda_functions.HANDLED if self.capability is not None else set())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.handled and "device" not in kwargs and "pin_memory" not in kwargs:
            # nearly all: also ``x.shape`` comes by here
            return self.call(func, args, kwargs)
        if self.capability is not None:
            out = cuda_functions.on_the_card(func, args, kwargs, self.capability)
            if out is not cuda_functions.NOT_HERE:
                return out
        if func is _CPU or func is _CUDA or func is _TO:
            return self.move(func, args, kwargs)
        if kwargs.pop("pin_memory", False) or self.ledger.host.counts and is_host(kwargs.get("device")):
            with self.ledger.host.making("host"):
                return super().__torch_function__(func, types, args, kwargs)
        if "device" not in kwargs:
            return super().__torch_function__(func, types, args, kwargs)
        with self.ledger.host.making(self.ledger.host.place or kwargs["device"] and "card"):
            out = super().__torch_function__(func, types, args, {**kwargs, "device": _here(kwargs["device"])})
        return self.bring(out) if func in _FROM_DATA and _here(kwargs["device"]) is not kwargs["device"] else out

    def move(self, func, args: tuple, kwargs: dict):
        """``tensor.to``, ``.cpu()`` and ``.cuda()``: a copy where the tensor lies elsewhere, then the change of dtype."""
        tensor, host = args[0], self.ledger.host
        if func is _CPU and not isinstance(tensor, FakeTensor):
            return tensor                                   # data that never was on the card
        place, rest, others = ("host", (), {}) if func is _CPU else ("card", (), {})
        if func is _TO:
            place, rest, others = moves(args[1:], kwargs)
        named = place == "card" and (func is _CUDA or any(_here(v) is not v for v in (*args[1:], *kwargs.values())))
        if named and not host.holds([tensor]):
            tensor = self.bring(tensor)
        elif host.counts and place is not None and host.holds([tensor]) != (place == "host"):
            with host.making(place):
                tensor = tensor.clone()
        return tensor.to(*rest, **others) if rest or others else tensor

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that no op made here, counted from now on: a real one is replaced by a fake."""
        if not isinstance(tensor, FakeTensor):
            with torch.no_grad():
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self.ledger.adopt([tensor], "other")
        return tensor


_CUDA, _CPU, _TO = torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.to
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


def _here(value):
    """Any name of the card means the virtual card, whose tensors are fake CPU tensors. Others come back as they are."""
    if type(value) is int and value == 0:
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda" or isinstance(value, torch.device) and value.type == "cuda":
        if torch.device(value).index not in (None, 0):
            raise RuntimeError(f"device {str(value)!r}: there is one virtual card, 'cuda' or 'cuda:0'")
        return torch.device("cpu")
    return value
