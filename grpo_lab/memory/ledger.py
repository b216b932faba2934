"""The ledger: every storage that PyTorch makes while it is on, with its size, op, category and phase, until it dies.

>>> import torch
>>> with Ledger() as ledger:
...     with ledger.phase("forward"):
...         x = torch.zeros(1000, dtype=torch.float32)      # 4,000 bytes, rounded up to 4,096 as CUDA does
...         y = x + 1
...         del x
>>> ledger.allocated, ledger.peak_allocated
(4096, 8192)

It works the same over real and fake tensors, and it knows nothing of models. It is a ``TorchDispatchMode``; storages
are followed by weak reference. Some of autograd's formulas take another, hungrier path while any mode is on; the
ledger leads them back (:mod:`grpo_lab.memory.eager`), so that it doesn't change what it measures.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import CachingAllocator, DoesNotFit
from .cuda_words import cuda_message
from .eager import IN_PLACE, KERNEL_TEMPORARIES, MATMULS, eager_again, seen_by_a_mode
from .snapshot import DriverLog

CATEGORIES = ["parameters", "gradients", "optimizer state", "reference model", "activations", "logits", "KV cache",
              "temporaries", "workspace", "other"]

aten = torch.ops.aten


class Record:
    """One storage's life: bytes (of its block) and as asked for, the op that made it, its category, its phase."""

    __slots__ = ("bytes", "requested", "op", "category", "phase", "module", "frames", "block", "address", "died")

    def __init__(self, nbytes: int, op: str, category: str | None, phase: str):
        self.bytes = self.requested = nbytes
        self.op, self.category, self.phase = op, category, phase
        self.module, self.frames = "", ()           # which module ran, and the Python lines, if asked for
        self.block, self.address, self.died = None, 0, False


class Ledger(TorchDispatchMode):
    """Counts while it is entered. ``allocator``: the replica that the bytes go through (default: one without a budget).

    ``enforce=True`` raises ``torch.OutOfMemoryError`` where the allocator's budget ends; otherwise the first failure
    is kept in ``oom`` and the count goes on as if there were no end.
    """

    def __init__(self, allocator: CachingAllocator | None = None, enforce: bool = False, context: int = 0):
        super().__init__()
        self.allocator = allocator or CachingAllocator()
        self.budget, self.context = self.allocator.budget, context
        self.enforce, self.oom = enforce, None
        self.events: list[tuple[int, Record, int, int]] = []        # (+1 | -1, record, allocated, reserved) after it
        self.allocator.log = DriverLog(self.events)                 # what it asks of the driver, in between
        self.phases: list[dict] = []                                # name, start and end in events, peaks
        self.vocabularies: set[int] = set()                         # widths by which logits are recognized
        self.locate = None                                          # () -> (module, frames) of a new record
        self._records: dict[int, Record] = {}                       # storage address -> record, while it lives
        self._refs: dict[int, weakref.ref] = {}
        self._forward: list[Record] = []                            # made with gradients on, not yet classified
        self._backward_ran = False
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._phase: list[str] = ["start"]
        self._category: list[str | None] = [None]

    # ---- what a caller says -----------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        return self.allocator.allocated

    @property
    def peak_allocated(self) -> int:
        return max((event[2] for event in self.events), default=self.allocated)

    @contextmanager
    def phase(self, name: str):
        """Names what runs inside; peaks are kept for each phase."""
        self._phase.append(name)
        entry = {"phase": name, "start": len(self.events), "allocated": self.allocated,
                 "reserved": self.allocator.reserved}
        self.phases.append(entry)
        try:
            yield self
        finally:
            self._phase.pop()
            entry["end"] = len(self.events)
            if self._backward_ran:                                  # gradients may be there that no optimizer has seen
                self.label_gradients()

    @contextmanager
    def category(self, name: str):
        """Storages made inside are of this category."""
        self._category.append(name)
        try:
            yield self
        finally:
            self._category.pop()

    def tag(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Gives the storages of ``tensors`` a category, from their birth on. Storages never seen are left alone."""
        for tensor in tensors:
            for leaf in _plain(tensor):
                record = self._records.get(leaf.untyped_storage()._cdata)
                if record is not None:
                    record.category = category

    def adopt(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Enters storages that were there before the ledger was."""
        for tensor in tensors:
            for leaf in _plain(tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._records:
                    self._enter(storage, "was there before", category)

    def watch(self, module: torch.nn.Module, category: str = "parameters") -> None:
        """Parameters and buffers of ``module`` get this category, and their gradients will be known as gradients."""
        self.tag(held_by(module), category)
        self._note(module)

    def meet(self, module: torch.nn.Module) -> None:
        """A module runs that nobody named: what it holds are parameters, unless they are known as something else."""
        if module not in self._modules:
            for record in (self._records.get(t.untyped_storage()._cdata) for t in held_by(module)):
                if record is not None and record.category in (None, "activations", "temporaries", "other"):
                    record.category = "parameters"
            self._note(module)

    def _note(self, module: torch.nn.Module) -> None:
        if isinstance(width := getattr(getattr(module, "config", None), "vocab_size", None), int):
            self.vocabularies.add(width)                            # what is that wide is logits
        self._modules[module] = True

    def add(self, nbytes: int, op: str, category: str) -> Record:
        """Enters bytes that no tensor holds (a library's workspace). Give them back with :meth:`drop`."""
        self._allocate(record := Record(nbytes, op, category, self._phase[-1]))
        return record

    def drop(self, record: Record) -> None:
        if not record.died:
            record.died = True
            self.allocator.free(record.block)
            self._event(-1, record)

    # ---- what PyTorch says --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts[2] and (in_place := eager_again(func, args)) is not None:
            if torch._C._current_graph_task_id() == -1:
                return self._add_to_product(in_place, func, args, kwargs or {})
            func, facts = in_place, facts_of(in_place)
        out = self.run(func, args, kwargs or {})
        if not facts[1]:
            self._see(func, args, out)
        return out

    def _add_to_product(self, in_place, func, args, kwargs):
        """In a forward pass autograd wants another tensor than the one that it gave: its memory under a new name."""
        record = self._records.get(args[0].untyped_storage()._cdata)
        if record is None or record.op not in MATMULS or torch.broadcast_shapes(
                args[0].shape, args[1].shape) != args[0].shape or args[0].dtype != args[1].dtype:
            out = self.run(func, args, kwargs)
            self._see(func, args, out)
            return out
        self.run(in_place, args, kwargs)
        return self.run(aten.detach.default, args[:1], {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                    # nobody compiles inside a ledger, and the guard costs more than the ledger

    def run(self, func, args, kwargs):              # over fake tensors there is a shorter way
        return func(*args, **kwargs)

    def _see(self, func, args, out) -> None:
        _, aliases, _, inside = FACTS.get(id(func)) or facts_of(func)
        if aliases:
            return
        grad = torch.is_grad_enabled()
        if self._forward and not grad and torch._C._current_graph_task_id() != -1:
            self._classify_activations()
        for tensor in (out,) if _is_plain(out) else leaves(out):
            storage = tensor.untyped_storage()
            if storage._cdata in self._records:
                continue
            category = self._category[-1]
            if category is None and self.vocabularies and tensor.dim() > 1 and tensor.shape[-1] in self.vocabularies:
                category = "logits"                                 # known before it is allocated: an oom says it, too
            record = self._enter(storage, func, category)
            if grad and record is not None and record.category is None:
                self._forward.append(record)
        if inside is not None and (nbytes := inside(out, *args)):
            self.drop(self.add(nbytes, f"{op_name(func)} (inside)", "temporaries"))

    def _enter(self, storage: torch.UntypedStorage, op, category: str | None) -> Record | None:
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        record = Record(nbytes, op, category, self._phase[-1])
        key = storage._cdata
        self._allocate(record)
        self._records[key] = record
        self._refs[key] = weakref.ref(storage, lambda _, key=key: self._died(key))
        return record

    def _died(self, key: int) -> None:
        self._refs.pop(key, None)
        if (record := self._records.pop(key, None)) is not None:
            self.drop(record)

    def _allocate(self, record: Record) -> None:
        if self.locate is not None:
            record.module, record.frames = self.locate()
        try:
            record.block = self.allocator.allocate(record.bytes)
        except DoesNotFit as failure:
            oom = {**vars(failure), "op": op_name(record.op), "phase": record.phase, "event": len(self.events),
                   "category": record.category, "module": record.module, "frames": record.frames}
            self.oom = self.oom or oom
            if self.enforce:
                raise torch.OutOfMemoryError(cuda_message(oom, self.budget, self.context)) from None
            self.allocator.budget = None
            record.block = self.allocator.allocate(record.bytes)
        record.address, record.bytes = record.block.address, record.block.size      # what isn't worth splitting off, too
        self._event(1, record)

    def _event(self, sign: int, record: Record) -> None:
        self.events.append((sign, record, self.allocator.allocated, self.allocator.reserved))

    # ---- whose bytes they are -------------------------------------------------------------------------------------

    def _classify_activations(self) -> None:
        """What a forward made and a backward still finds is an activation; what was gone by then was temporary."""
        for record in self._forward:
            if not record.died and record.category is None:
                record.category = "activations"
        self._forward.clear()
        self._backward_ran = True

    def label_gradients(self) -> None:
        self._backward_ran = False
        for module in list(self._modules):
            self.tag((p.grad for p in module.parameters() if p.grad is not None), "gradients")
            for parameter in module.parameters():                       # added since: adapters
                record = self._records.get(parameter.untyped_storage()._cdata)
                if record is not None and record.category is None:
                    record.category = "parameters"

    def _before_step(self, optimizer, args, kwargs) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.tag(parameters, "parameters")
        self.tag((p.grad for p in parameters if p.grad is not None), "gradients")

    def _after_step(self, optimizer, args, kwargs) -> None:
        for state in optimizer.state.values():
            self.tag((v for v in state.values() if isinstance(v, torch.Tensor)), "optimizer state")

    def __enter__(self):
        seen_by_a_mode()                # here: inside a dispatch autograd is off
        self._hooks = [register_optimizer_step_pre_hook(self._before_step),
                       register_optimizer_step_post_hook(self._after_step)]
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        self.label_gradients()
        return super().__exit__(*exc)


def held_by(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and the scales and tables of bitsandbytes' packed weights."""
    states = [p.quant_state for p in module.parameters() if getattr(p, "quant_state", None) is not None]
    states += [state.state2 for state in states if state.state2 is not None]
    parts = [getattr(state, name) for state in states for name in ("absmax", "code", "offset")]
    return [*module.parameters(), *module.buffers(), *(t for t in parts if isinstance(t, torch.Tensor))]


def _is_plain(tensor) -> bool:
    """A tensor with a storage of its own, and no wrapper around others."""
    kind = type(tensor)
    return (kind is torch.Tensor or kind is FakeTensor) and tensor.layout is torch.strided and not tensor.is_meta


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself, or the plain ones inside a wrapper (DTensor and the like)."""
    if _is_plain(tensor):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        return [leaf for name in tensor.__tensor_flatten__()[0] for leaf in _plain(getattr(tensor, name))]
    return [tensor] if tensor.layout is torch.strided and not tensor.is_meta else []


def leaves(out) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return _plain(out)
    if isinstance(out, (tuple, list)):
        return [leaf for item in out for leaf in leaves(item)]
    return []


# By the id of an op, for its hash is slow: the op, whether it makes no storage, whether `eager_again` may know another
# one, what its kernel holds inside.
FACTS: dict[int, tuple] = {}


def facts_of(func) -> tuple:
    if id(func) not in FACTS:
        FACTS[id(func)] = func, aliases_input(func), func in IN_PLACE, KERNEL_TEMPORARIES.get(func)
    return FACTS[id(func)]


def aliases_input(func) -> bool:
    """Whether ``func`` returns a view of an argument, or the argument itself: no new storage either way. (Nor has a
    zero that autograd knows to be one any memory.)"""
    return func is aten._efficientzerotensor.default or any(r.alias_info is not None for r in func._schema.returns)


def op_name(op) -> str:
    return op if isinstance(op, str) else str(op).removesuffix(".default")
