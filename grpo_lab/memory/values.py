"""Code that reads values, where there are none: what a fake tensor answers, and which questions it refuses.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4"):
...     x = torch.zeros(3, 4)
...     print(x.sum().item(), bool(x.any()), x[x > 0].shape)
1 False torch.Size([12])

A number reads as 1, a boolean as False (:data:`READ_AS`), and a boolean mask picks all there is, the worst case for
memory. What the size of a result depends on can't be answered: one sentence says so and names the line.
"""
from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode

from . import nf4

_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
READ_AS = {torch.bool: False}           # everything else reads as 1


READS = {Tensor.tolist, Tensor.__format__, Tensor.__getitem__, Tensor.__setitem__, Tensor.masked_select,
         torch.masked_select, Tensor.masked_scatter, Tensor.numpy, Tensor.data_ptr, Tensor.pin_memory,
         Tensor.__deepcopy__}


class ReadsOfValues(TorchFunctionMode):
    """A boolean mask picks everything (the worst case), or what :meth:`picking` says; ``tolist()`` gives ones."""

    keep: int | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            return self.read(func, args, kwargs or {})
        return self.call(func, args, kwargs or {})

    def read(self, func, args, kwargs):
        """One of :data:`READS`."""
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            return _filled(args[0].shape, READ_AS.get(args[0].dtype, 1))
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor) and args[0].dim() == 0:
            return format(READ_AS.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1), args[1])
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            return _Select.apply(args[0], args[1], self.count(args[1]))
        if func is Tensor.__setitem__ and _is_mask(args[1]):
            return None                                     # writes in place
        if func in (Tensor.masked_select, torch.masked_select) and _is_mask(args[1]):
            return _Select.apply(*torch.broadcast_tensors(args[0], args[1]), self.count(args[1]))
        if func is Tensor.masked_scatter and _is_mask(args[1]):
            return _Scatter.apply(args[0], args[1], args[2])
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage()._cdata         # for telling tensors apart
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deepcopy(*args)
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            raise RuntimeError(_no_values("numpy()"))
        return self.call(func, args, kwargs)

    @staticmethod
    def call(func, args, kwargs):
        """Any function; where its result's size depends on values, one sentence."""
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise RuntimeError(_no_values(getattr(func, "__name__", str(func)))) from None

    def count(self, mask: Tensor) -> int:
        """How many entries of a mask are taken to be true."""
        return mask.shape[0] * self.keep if self.keep is not None and mask.dim() == 2 else mask.numel()

    @contextmanager
    def picking(self, keep: int) -> Iterator[None]:
        """Inside, a two-dimensional mask picks ``keep`` entries of every row."""
        self.keep, before = keep, self.keep
        try:
            yield
        finally:
            self.keep = before


def _no_values(name: str) -> str:
    """The refusal, with the line outside PyTorch and this package that asked."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return (f"{name} needs real values, and tensors on a virtual card have none (file {frame.f_code.co_filename}, line "
            f"{frame.f_lineno}): do it outside the VirtualGPU, or put a tensor of the size that you expect in its place")


def _deepcopy(tensor: Tensor, memo: dict) -> Tensor:
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("deepcopy of a tensor that autograd made: detach() it first")        # as PyTorch refuses
        with torch.no_grad():
            new = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        new = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new.requires_grad_(tensor.requires_grad)
        if hasattr(tensor, "quant_state"):
            for name in (*nf4.NOTED, "quant_state", "bnb_quantized"):
                setattr(new, name, copy.deepcopy(getattr(tensor, name), memo))
        memo[id(tensor)] = new
    return memo[id(tensor)]


def _is_mask(index) -> bool:
    return isinstance(index, FakeTensor) and index.dtype is torch.bool


def _filled(shape, value):
    return value if not shape else [_filled(shape[1:], value) for _ in range(shape[0])]


class _Select(torch.autograd.Function):
    """``x[mask]``: where the mask is true, found (int64 places) and copied; the backward puts into zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape, ctx.options = x.shape, {"dtype": x.dtype, "device": x.device}
        places = torch.empty(mask.dim(), count, dtype=torch.long, device=x.device)
        out = x.new_empty(count, *x.shape[mask.dim():])
        del places
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return torch.zeros(ctx.shape, **ctx.options), None, None


class _Scatter(torch.autograd.Function):
    """``x.masked_scatter(mask, source)``: a copy of x; the backward picks the source's entries out of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = source.shape
        out = x.clone()
        if not out.is_floating_point():
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, grad.new_empty(ctx.shape)
