"""Functions whose code asks for the device: what runs on a card in their stead, and how its autocast treats them.

>>> import torch
>>> scores = torch.empty(4, 16, dtype=torch.float16, device="meta", requires_grad=True)
>>> on_the_card(torch.nn.functional.softmax, (scores,), {"dim": -1, "dtype": torch.float32}, capability=(7, 5)).grad_fn
<SoftmaxBackward0 object at ...>

On a card, softmax of float16 into float32 is one kernel without a float32 copy of its input (`softmax`, `log_softmax`,
aten/src/ATen/native/SoftMax.cpp), and dropout keeps one byte an element instead of a mask in its input's dtype
(`is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp). CUDA's autocast runs more ops in float32 than the
CPU's (AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, aten/src/ATen/autocast_mode.h, PyTorch 2.10 to 2.13); matrix
products, losses and the cache of cast weights are the same. Left out: autocast's rarer ops (trigonometric, pdist,
renorm, upsampling, matrix norms), ``addmv``, ``einsum`` and recurrent cells, and calls that Python code of torch
itself makes inside one function (``F.multi_head_attention_forward``).
"""
from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from . import cuda_attention

SDPA = F.scaled_dot_product_attention               # itself: users replace the name
NOT_HERE = object()                                 # on_the_card has nothing to say: call the function itself

_SOFTMAX = {F.softmax: torch._softmax, torch.softmax: torch._softmax, Tensor.softmax: torch._softmax,
            F.log_softmax: torch._log_softmax, torch.log_softmax: torch._log_softmax,
            Tensor.log_softmax: torch._log_softmax}
_WITH_STACKLEVEL = {F.softmax, F.log_softmax}
_DROPOUT = {F.dropout, torch.dropout}


def _both(*names: str) -> set:
    """The function and the method of each name, where there are both."""
    return {getattr(place, name) for name in names for place in (torch, Tensor) if hasattr(place, name)}


# Cast to float32 before (policy `fp32`)
FLOAT32 = _both("exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow", "logsumexp", "dist",
                "cdist", "layer_norm", "rms_norm", "group_norm", "native_layer_norm", "cosine_similarity", "norm") | {
    Tensor.__pow__, Tensor.__rpow__, F.layer_norm, F.rms_norm, F.group_norm, F.softplus, F.cosine_similarity}
# Computed into float32, unless a dtype is asked for (policy `fp32_set_opt_dtype`)
INTO_FLOAT32 = _both("sum", "prod", "cumsum", "cumprod", "softmax", "log_softmax") | {
    F.softmax, F.log_softmax, torch.linalg.vector_norm}
# The CPU's autocast runs this in float32 from its input on; the card's only what is inside
_INSIDE = {F.cross_entropy}
HANDLED = {SDPA, *_SOFTMAX, *_DROPOUT, *FLOAT32, *INTO_FLOAT32, *_INSIDE}      # all that on_the_card looks at


def on_the_card(func, args: tuple, kwargs: dict, capability: tuple[int, int]):
    """What ``func(*args, **kwargs)`` is on a card; :data:`NOT_HERE` if it is the same on every device."""
    if func is SDPA:
        return cuda_attention.sdpa(*args, capability=capability, **kwargs)
    if func in _DROPOUT:
        return _dropout(*args, **kwargs)
    if torch.is_autocast_enabled("cpu") and args and any(isinstance(arg, Tensor) and _low(arg) for arg in args):
        if func in FLOAT32:
            with torch.autocast("cpu", enabled=False):
                return func(*map(_float, args), **{name: _float(value) for name, value in kwargs.items()})
        if func in INTO_FLOAT32 and kwargs.get("dtype") is None and not _dtype_among(args):
            kwargs = {**kwargs, "dtype": torch.float32}
            with torch.autocast("cpu", enabled=False):
                out = _softmax(func, args, kwargs) if func in _SOFTMAX else NOT_HERE
                return func(*args, **kwargs) if out is NOT_HERE else out
        if func in _INSIDE:
            return _cross_entropy(*args, **kwargs)
    return _softmax(func, args, kwargs) if func in _SOFTMAX else NOT_HERE


@contextmanager
def also_in_backward(mode: TorchFunctionMode):
    """Inside, ``mode`` sees what a backward pass calls, too: the forward that gradient checkpointing runs again.

    ``loss.backward()`` is itself a function that a mode sees, and while a mode handles one function it is off.
    """
    run = torch.autograd._engine_run_backward       # torch/autograd/__init__.py: backward and grad both end there

    def run_with_mode(*args, **kwargs):
        if any(active is mode for active in _get_current_function_mode_stack()):
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_with_mode):
        yield


def _softmax(func, args, kwargs):
    """float16 in, float32 out: one kernel on a card. bfloat16 is converted first there, too."""
    names = ("input", "dim", "_stacklevel", "dtype") if func in _WITH_STACKLEVEL else ("input", "dim", "dtype")
    given = {**dict(zip(names, args)), **kwargs}
    tensor, dim = given.get("input", given.get("self")), given.get("dim")
    if given.get("dtype") is not torch.float32 or dim is None or tensor.dtype is not torch.float16:
        return NOT_HERE
    return _SOFTMAX[func](tensor, dim, True)


def _dropout(input, p=0.5, training=True, inplace=False, train=None):
    training = training if train is None else train
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
                   label_smoothing=0.0):
    """`cross_entropy_loss` is log_softmax and nll_loss; autocast on a card casts inside, the CPU's before it."""
    if label_smoothing or target.is_floating_point():
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    dim = 1 if input.dim() > 1 else 0
    with torch.autocast("cpu", enabled=False):
        if input.dtype is torch.float16:
            chances = torch._log_softmax(input, dim, True)
        else:
            chances = torch.log_softmax(input, dim, dtype=torch.float32)
        weight = weight if weight is None else weight.float()
        return F.nll_loss(chances, target, weight, size_average, ignore_index, reduce, reduction)


def _low(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _float(value):
    return value.float() if isinstance(value, Tensor) and _low(value) else value


def _dtype_among(args: tuple) -> bool:
    return any(isinstance(arg, torch.dtype) for arg in args)
