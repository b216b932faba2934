"""What an op on fake tensors returns depends on shapes, strides and dtypes alone: work it out once, then remember.

>>> import torch
>>> from torch._subclasses.fake_tensor import FakeTensorMode
>>> with FakeTensorMode() as fake:
...     memo, x = Memo(fake), torch.empty(4, 8)
...     first, again = (memo(torch.ops.aten.mul.Tensor, (x, 2.0), {}) for _ in range(2))
>>> again.shape, type(again).__name__, (memo.misses, memo.hits)
(torch.Size([4, 8]), 'FakeTensor', (1, 1))

`FakeTensorMode` computes every output anew or looks it up with a key that covers far more than eager code needs (about
0.3 ms an op); a transformer repeats the same few hundred calls in every layer. A hit costs a tenth of that. What reads
values, returns other shapes for other values, or changes its input's shape is never remembered.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_NEVER = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
_NEVER_OPS = ("aten::set_", "aten::resize", "aten::lift", "aten::_local_scalar", "aten::_to_copy_sparse",
              "aten::set_data", "aten::item", "prim::", "aten::is_pinned", "aten::_pin_memory")
LIFT = torch.ops.aten.lift_fresh.default
CPU = torch.device("cpu")
_KEPT = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


MOST_PLANS = 200_000
PLANS: dict[tuple, tuple] = {}          # shared by all modes: a plan holds shapes, no tensors


class Unknown(Exception):
    """A call that can't be remembered."""


class Memo:
    """``memo(func, args, kwargs)`` is ``func(*args, **kwargs)`` under ``fake``, faster from the second time on."""

    def __init__(self, fake: FakeTensorMode):
        self.fake = fake
        self.hits = self.misses = 0
        with _DisableTorchDispatch():
            self._state = FakeTensor(fake, torch.empty(0, device="meta"), CPU).__dict__     # alike in all

    def __call__(self, func, args: tuple, kwargs: dict):
        with DisableTorchFunction():
            if func is LIFT and type(args[0]) is Tensor and args[0].numel() == 1:
                return self._lift(args[0])
            if not may_remember(func):
                return func(*args, **kwargs)
            tensors: list[Tensor] = []
            try:
                key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
                _key(args, key, tensors)
                for name in kwargs:
                    _key((name, kwargs[name]), key, tensors)
                key = tuple(key)
            except Unknown:
                return func(*args, **kwargs)
            if any(t.constant is not None for t in tensors) and (
                    func._schema.is_mutable or all(t.constant is not None for t in tensors)):
                return func(*args, **kwargs)        # known values are computed with, or written over
            plan = PLANS.get(key)
            if plan is not None:
                self.hits += 1
                return self._make(plan, tensors)
            self.misses += 1
            out = func(*args, **kwargs)
            if len(PLANS) > MOST_PLANS:             # a long session with ever new shapes
                PLANS.clear()
            try:
                PLANS[key] = self._plan(out, tensors, func)
            except Unknown:
                pass
            return out

    def _plan(self, out, tensors: list[Tensor], func) -> tuple:
        if isinstance(out, (tuple, list)):
            return ("all", type(out), [self._plan(item, tensors, func) for item in out])
        if not isinstance(out, Tensor):
            if out is None or isinstance(out, (bool, int, float)):
                return ("value", out)
            raise Unknown
        for place, tensor in enumerate(tensors):
            if out is tensor:
                return ("same", place)
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided \
                or out.fake_device != CPU or out.dtype.is_complex:
            raise Unknown
        geometry = tuple(out.shape), out.stride(), out.storage_offset()
        storage = out.untyped_storage()
        for place, tensor in enumerate(tensors):
            if tensor.untyped_storage()._cdata == storage._cdata:
                if tensor.dtype is not out.dtype:
                    raise Unknown
                return ("view", place, *geometry)
        if geometry[2] != 0 or storage.nbytes() != _bytes(*geometry[:2], out.dtype.itemsize):
            raise Unknown                           # a view of something that isn't among the arguments
        return ("new", geometry[0], geometry[1], out.dtype)

    def _make(self, plan: tuple, tensors: list[Tensor]):
        match plan[0]:
            case "new":
                with _DisableTorchDispatch():
                    return self._fake(torch.empty_strided(plan[1], plan[2], dtype=plan[3], device="meta"))
            case "view":
                with _DisableTorchDispatch():
                    return self._fake(torch.as_strided(tensors[plan[1]], plan[2], plan[3], plan[4]))
            case "same":
                return tensors[plan[1]]
            case "value":
                return plan[1]
        return plan[1](self._make(item, tensors) for item in plan[2])

    def _lift(self, value: Tensor) -> FakeTensor:
        """``torch.tensor(1.0)``: a fake tensor that knows its one value, as `FakeTensorMode` makes it."""
        with _DisableTorchDispatch():
            out = self._fake(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
        out.constant = value
        self.fake.fake_tensor_converter.add_constant_storage_mapping(out)
        return out

    def _fake(self, meta: Tensor) -> FakeTensor:
        """`FakeTensor(mode, meta, device)` without its checks. The caller has dispatch switched off."""
        out = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(out)
        out.__dict__.update(self._state)
        return out


@functools.cache
def may_remember(func) -> bool:
    """Whether ``func`` returns the same kind of thing for the same kinds of arguments."""
    return not (_NEVER & set(func.tags) or func.name().startswith(_NEVER_OPS))


def _key(values, key: list, tensors: list[Tensor]) -> None:
    """Adds to ``key`` what decides the outcome of these arguments, and to ``tensors`` the tensors among them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype = value.dtype
            if dtype.is_complex or value.fake_device != CPU:
                raise Unknown
            tensors.append(value)
            key += value.shape, value.stride(), value.storage_offset(), dtype
        elif kind in _KEPT:
            key += kind, value                      # 1, 1.0 and True are not the same
        elif kind is list or kind is tuple or kind is torch.Size:
            key += list, len(value)
            _key(value, key, tensors)
        else:
            raise Unknown


def _bytes(shape: tuple, stride: tuple, itemsize: int) -> int:
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride))) * itemsize
