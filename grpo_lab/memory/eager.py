"""What plain eager code does where PyTorch does something else while a dispatch mode is on, and what no mode can see.

>>> import torch
>>> from grpo_lab.memory.ledger import Ledger
>>> x = torch.zeros(1000, 1000, requires_grad=True)
>>> with Ledger() as ledger:
...     x.gather(1, torch.zeros(1000, 1, dtype=torch.long)).sum().backward()
>>> [record.requested for _, record, _, _ in ledger.events].count(4_000_000)     # the gradient; with a mode, 2 of them
1

Two kinds of facts about PyTorch's C++ (2.10 to 2.13), each with its source: :func:`eager_again` names the in-place op
that plain code takes instead of ``func``; :data:`KERNEL_TEMPORARIES` are bytes that an op's kernel holds for a moment.
"""
from __future__ import annotations

import functools
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

# Some C++ takes an out-of-place op while any mode is on, and the in-place one without (`isTensorSubclassLike` is true
# of every tensor then). Which op would run in place, and in the formulas of which autograd nodes: torch/csrc/autograd/
# FunctionsManual.cpp, and ReduceOps.cpp and TensorAdvancedIndexing.cpp in aten/src/ATen/native.
SELECTIONS = {f"{name}Backward{n}" for n in (0, 1)
              for name in "Max Min Kthvalue Median Nanmedian Mode Topk Sort".split()}
IN_PLACE = {
    aten.add.Tensor: (aten.add_.Tensor, None),                  # gradients meet: any node, but ADDS_ITSELF
    aten.scatter_add.default: (aten.scatter_add_.default, {"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
    aten.scatter.src: (aten.scatter_.src, SELECTIONS),
    aten.index_put.default: (aten.index_put_.default, {"IndexBackward0"}),
    aten.index_add.default: (aten.index_add_.default, {"IndexSelectBackward0"}),
    aten.masked_scatter.default: (aten.masked_scatter_.default, {"MaskedSelectBackward0"}),
    aten.put.default: (aten.put_.default, {"TakeBackward0"}),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, {"TraceBackward0"}),
    aten.logical_and.default: (aten.logical_and_.default, {"ClampBackward0", *SELECTIONS}),
    aten.logical_or.default: (aten.logical_or_.default, {"ClampBackward0"}),
}
# Their formulas add fresh temporaries out of place, mode or no mode.
ADDS_ITSELF = {f"{name}Backward0" for name in
               "VarMean StdMean Logcumsumexp NativeGroupNorm Atan2 Mvlgamma Cholesky TriangularSolve LuUnpack "
               "LinalgLu LinalgLuFactorEx LinalgLuSolve LinalgCholeskyEx LinalgQr LinalgSvd LinalgLstsq "
               "LinalgPinv".split()}
MATMULS = {aten.mm.default, aten.bmm.default}

# What an op's own C++ allocates and frees inside, the same on the CPU and on CUDA, where no mode can see it: bytes by
# the op's output and arguments, beside that output.
KERNEL_TEMPORARIES = {
    # the maxima and (self - maxes).exp_(), ReduceOps.cpp; both are there when the result is made
    aten.logsumexp.default: lambda out, x, *_: x.nbytes + out.nbytes,
    # an exponential variate for each probability, Distributions.cpp
    aten.multinomial.default: lambda out, x, n, replacement=False: 0 if replacement and n > 1 else x.nbytes,
    # .contiguous() of what isn't, SoftMax.cpp and SoftMax.cu
    aten._softmax.default: lambda out, x, *_: _copied(x),
    aten._log_softmax.default: lambda out, x, *_: _copied(x),
    aten._softmax_backward_data.default: lambda out, grad, output, *_: _copied(grad) + _copied(output),
    aten._log_softmax_backward_data.default: lambda out, grad, output, *_: _copied(grad) + _copied(output),
    # where a mask is true, as int64 places in each of its dimensions (`nonzero`), TensorAdvancedIndexing.cpp
    aten.index.Tensor: lambda out, x, places: _places(out, x, places),
}


def _copied(x: torch.Tensor) -> int:
    return 0 if x.is_contiguous() else x.numel() * x.element_size()


def _places(out: torch.Tensor, x: torch.Tensor, indices) -> int:
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return 0
    rest = x.numel() // max(1, masks[0].numel())
    return out.numel() // max(1, rest) * sum(mask.dim() for mask in masks) * 8


def eager_again(func, args):
    """The in-place form of ``func`` where plain C++ code would have taken it; None where it wouldn't.

    What Python asks for is never touched: only C++ hands over a tensor that no Python frame refers to. In a backward
    pass two gradients of one tensor are added into the first, if nobody else holds it (`accumulate` in torch/csrc/
    autograd/input_buffer.cpp), and some formulas fill a fresh tensor (:data:`IN_PLACE`). In a forward pass a bias or
    an attention mask is added to a product of matrices (`linear` in Linear.cpp, `_scaled_dot_product_attention_math`).
    """
    in_place, nodes = IN_PLACE[func]
    tensor = args[0]
    uses, storage_uses, references = seen_by_a_mode()
    if not isinstance(tensor, torch.Tensor) or sys.getrefcount(tensor) > references:
        return None
    if torch._C._current_graph_task_id() == -1:
        return in_place if func is aten.add.Tensor and _is_free(tensor, uses, storage_uses) else None
    if torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if nodes is not None:
        return in_place if name in nodes else None
    gradients = args[1].shape == tensor.shape and name not in ADDS_ITSELF
    return in_place if gradients and _is_free(tensor, uses, storage_uses) else None


def _is_free(tensor: torch.Tensor, uses: int, storage_uses: int) -> bool:
    """`can_accumulate_inplace`: a dense tensor that only the caller holds."""
    return (tensor._use_count() <= uses
            and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= storage_uses
            and (tensor.is_contiguous() or _is_dense(tensor)))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.cache
def seen_by_a_mode() -> tuple[int, int, int]:
    """How often a tensor, its storage and its Python object are referred to when autograd hands a dispatch mode a
    buffer that nobody else holds: the mode's own handles, whose number depends on the version. Tried out once."""
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                seen.append(look(args))
            return func(*args, **(kwargs or {}))

    def look(args):
        tensor = args[0]
        return (tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
                sys.getrefcount(tensor))

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), Look():
        x = torch.ones(1, requires_grad=True) * 1
        (x * 2 + x * 3).backward()
    return seen[0]
