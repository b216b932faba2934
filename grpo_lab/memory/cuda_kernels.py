"""What CUDA kernels take from the caching allocator inside an op and give back at its end, where no mode can look.

>>> import torch
>>> aten = torch.ops.aten
>>> ids, grad = torch.zeros(8, 768, dtype=torch.long), torch.empty(8, 768, 896, dtype=torch.bfloat16)
>>> inside(aten.embedding_dense_backward.default, (grad, ids, 151936, -1, False), {}, capability=(8, 6))[-1]
('grad_weight_per_segment', 24220672)

Each entry of :data:`TEMPORARIES` is ``function(args, kwargs, capability)`` and returns ``[(name, bytes), ...]``: what
is alive together, beyond the op's outputs, at its fullest moment. The rules were read in the file named above each
function, in PyTorch 2.10 to 2.13. Left out: what stays below some KiB (CUB's histograms, reductions across blocks,
topk, cumsum, nll_loss), split keys in flash attention's forward (they depend on the number of multiprocessors and are
for a few tokens only) and its deterministic backward, and cuDNN's workspaces, which only cuDNN knows.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
Temporaries = list[tuple[str, int]]
HALF = (torch.float16, torch.bfloat16)
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
KiB, MiB = 2**10, 2**20


def inside(func, args: tuple, kwargs: dict, capability: tuple[int, int]) -> Temporaries:
    """The temporaries of this call on a card of that compute capability: names and bytes; [] if there are none."""
    rule = TEMPORARIES.get(func)
    return [] if rule is None else [(name, size) for name, size in rule(args, kwargs, capability) if size]


def nbytes(*shape: int, itemsize: int = 4) -> int:
    return math.prod(shape) * itemsize


def copy_of(tensor: Tensor) -> int:
    """Bytes that ``tensor.contiguous()`` takes: none if it is contiguous already."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---- flash attention: cuda/attention_backward.cu (_flash_attention_backward), flash_attn/flash_api.cpp

def flash_backward(args, kwargs, capability) -> Temporaries:
    """mha_bwd: softmax_d, the float32 accumulator of dq, and under grouped queries dk and dv of every query head."""
    grad, query, key, _, out = args[:5]
    batch, heads, length, size = query.shape
    rows, width = up(length, 128), up(size, 32 if size <= 128 else 64)
    found = [("grad_out.contiguous()", copy_of(grad.transpose(1, 2))),
             ("out.contiguous()", copy_of(out.transpose(1, 2))),
             ("softmax_d", nbytes(batch, heads, rows)), ("dq_accum", nbytes(batch, rows, heads, width))]
    if key.shape[1] != heads:
        expanded = nbytes(batch, key.shape[2], heads, size, itemsize=query.element_size())
        found += [("dk_expanded", expanded), ("dv_expanded", expanded)]
    return found


# ---- memory-efficient attention: attention.cu, attention_backward.cu, mem_eff_attention/kernel_{forward,backward}.h -

# Most shared memory a block may opt in to, bytes: CUDA C++ Programming Guide, technical specifications.
SHARED_MEMORY = {7: 64 * KiB, 8: 163 * KiB, 9: 227 * KiB, 10: 227 * KiB, 11: 227 * KiB, 12: 99 * KiB}
# Backward kernels in the order they are tried (kernels/cutlassB.h): queries and keys a block, largest head size, and
# sizeof(SharedStorage), compiled from the headers of PyTorch 2.13.
BACKWARD_KERNELS = {
    ("half", 7): [(64, 64, 64, 27_904), (128, 64, 128, 54_784), (128, 64, 65536, 54_784), (64, 64, 65536, 27_904)],
    ("half", 8): [(64, 64, 64, 51_456), (128, 64, 96, 91_648), (128, 128, 128, 152_064), (64, 64, 128, 34_048),
                  (128, 64, 65536, 60_928), (64, 64, 65536, 34_048)],
    ("float", 7): [(64, 64, 65536, 37_120)],
    ("float", 8): [(64, 64, 64, 53_504), (128, 64, 65536, 121_344), (64, 64, 65536, 67_840)],
}


def shared_memory(capability: tuple[int, int]) -> int:
    return 99 * KiB if capability in ((8, 6), (8, 9)) else SHARED_MEMORY.get(capability[0], 64 * KiB)


def efficient_kernel(size: int, half: bool, dropout: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """(queries a block, keys a block, whether dK and dV stay in registers) of the first kernel that fits."""
    for queries, keys, most, needed in BACKWARD_KERNELS["half" if half else "float", 8 if capability[0] >= 8 else 7]:
        if most == 96 and (dropout or capability not in ((8, 6), (8, 9))):      # compiled for these alone
            continue
        if size <= most and needed <= shared_memory(capability):
            return queries, keys, half and most <= queries                      # kOutputInRF
    raise RuntimeError("cutlassB: no kernel found to launch!")


def efficient_backward(args, kwargs, capability) -> Temporaries:
    """mem_efficient_attention_backward_cutlass: delta, and a float32 workspace for dq (for dk and dv too, if they
    don't stay in registers)."""
    grad, query, key, value, _, out = args[:6]
    dropout, half = args[9] > 0, query.dtype in HALF
    batch, heads, length, size = query.shape
    keys, value_size = key.shape[2], value.shape[3]
    block_q, block_k, in_registers = efficient_kernel(max(size, value_size), half, dropout, capability)
    splits = -(-keys // block_k)
    if batch * heads >= 256 and keys <= 2 * block_k:
        splits = 1
    if not in_registers:
        splits = min(splits, 200 // (batch * heads))
    deterministic = torch.are_deterministic_algorithms_enabled()
    if splits < 1 or capability < (7, 0) or deterministic:
        splits = 1
    tile = block_q * block_k + 4                            # GradQTempStorage: a lock, a counter, padding, the tile
    elements = -(-length // block_q) * -(-size // block_k) * tile
    if not in_registers:
        elements += splits * block_k * (up(size, block_q) + up(value_size, block_q))
    workspace = nbytes(batch, heads, up(elements, 4))
    delta = nbytes(batch, heads, length)
    product = 0 if half else nbytes(batch, length, heads, value_size) + delta   # (grad_out * out).sum(-1), before it
    widest = ("workspace", workspace) if workspace >= product else ("grad_out * out", product)
    return [("grad_out.contiguous()", copy_of(grad.transpose(1, 2))), ("delta", delta), widest]


def efficient_forward(args, kwargs, capability) -> Temporaries:
    """_efficient_attention_forward: a float32 accumulator of the output for head sizes above 128."""
    query, value = args[0], args[2]
    if query.dtype not in HALF or max(query.shape[3], value.shape[3]) <= 128:
        return []
    return [("output_accum", nbytes(*query.shape[:3], value.shape[3]))]


# ---- native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu -----------------------------------------------------------

def embedding_backward(args, kwargs, capability) -> Temporaries:
    """Up to 3,072 tokens rows are added one by one; above, indices are sorted and summed in float32 segments."""
    grad, indices, num_weights, _, by_frequency = args[:5]
    tokens, width, index = indices.numel(), grad.shape[-1], indices.element_size()
    found = [("grad.contiguous()", copy_of(grad))]
    if tokens <= 3072 and not by_frequency:
        return found
    segments = min(tokens, num_weights)
    partial = tokens // 10 + segments                       # NROWS_PER_THREAD = 10, and one more for each segment
    names = [("sorted_indices", tokens), ("orig_indices", tokens), ("count", tokens if by_frequency else 0),
             ("segment_offsets", tokens), ("partials_per_segment", segments),
             ("partials_per_segment_offset", segments), ("partial_segment_offset", partial)]
    return [*found, *((name, count * index) for name, count in names),
            ("grad_weight_per_segment", nbytes(partial, width, itemsize=max(grad.element_size(), 4)))]


# ---- native/cuda/Sort.cpp, SortStable.cu, Indexing.cu; CUB keeps a second copy of keys and values while it sorts ----

def sort(args, kwargs, capability) -> Temporaries:
    """Rows longer than 4,096 go through CUB's radix sort, at once with their row numbers when there are few."""
    tensor = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else -1)
    length, item = (tensor.shape[dim] if tensor.dim() else 1), tensor.element_size()
    if length <= 4096 or not tensor.numel():
        return []
    found = [] if tensor.stride(dim) == 1 else [("self with its dim last", tensor.numel() * item)]
    rows = tensor.numel() // length
    if rows == 1 or length >= 1_000_000:                    # segmented_sort_large_segments
        return [*found, ("indices", length * 8), ("CUB keys and values", length * (item + 8))]
    if rows < 128:                                          # segmented_sort_pairs_by_full_sort
        return [*found, ("indices_and_segment, twice", tensor.numel() * 16), ("keys out", tensor.numel() * item),
                ("CUB keys and values", tensor.numel() * (item + 8))]
    return [*found, ("reverse_indices", tensor.numel() * 8), ("CUB keys and values", tensor.numel() * (item + 8))]


def index_put(args, kwargs, capability) -> Temporaries:
    """index_put_with_sort_kernel, taken when accumulating: the positions are numbered, sorted, and added in order."""
    _, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    if not given or not (accumulate or torch.are_deterministic_algorithms_enabled()):
        return []
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    count = max(masks[0].numel(), 1) if masks else math.prod(torch.broadcast_shapes(*(i.shape for i in given)))
    found = [("nonzero", sum(mask.numel() * mask.dim() * 8 for mask in masks))]
    found += [(name, count * 8) for name in ("linearIndex", "sorted_indices", "orig_indices", "range")]
    return [*found, ("CUB keys and values", count * 16), ("values.contiguous()", copy_of(values))]


# ---- native/cuda/SoftMax.cu (host_softmax, host_softmax_backward), transformers/attention.cpp, Distributions.cpp ----

def softmax_forward(args, kwargs, capability) -> Temporaries:
    return [("input.contiguous()", copy_of(args[0]))]


def log_softmax_backward(args, kwargs, capability) -> Temporaries:
    return [("grad.contiguous()", copy_of(args[0])), ("output.contiguous()", copy_of(args[1]))]


def softmax_backward(args, kwargs, capability) -> Temporaries:
    """softmax_backward_cuda_out: ``grad * output`` is made first. (It showed in every eager attention on a T4.)"""
    grad, output = args[:2]
    size = torch.promote_types(grad.dtype, output.dtype).itemsize
    return [("grad * output", grad.numel() * size), ("output.contiguous()", copy_of(output))]


def safe_softmax(args, kwargs, capability) -> Temporaries:
    """_safe_softmax: softmax, then where() against the rows that are masked altogether."""
    return [("softmax", args[0].numel() * args[0].element_size()), ("eq(-inf)", args[0].numel())]


def multinomial(args, kwargs, capability) -> Temporaries:
    """multinomial_out: one draw an element from an exponential distribution, where nothing is put back."""
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    return [] if replacement and args[1] > 1 else [("q", args[0].numel() * args[0].element_size())]


# ---- native/cuda/ForeachReduceOp.cu (foreach_tensor_norm_cuda) ------------------------------------------------------

def foreach_norm(args, kwargs, capability) -> Temporaries:
    """output_per_tensor: a float32 for each chunk of 65,536 elements, for all tensors as many as the largest has."""
    chunks = max((-(-tensor.numel() // 65536) for tensor in args[0]), default=0)
    return [("output_per_tensor", nbytes(len(args[0]), chunks))]


TEMPORARIES: dict[torch._ops.OpOverload, Callable[[tuple, dict, tuple[int, int]], Temporaries]] = {
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.index_put.default: index_put,
    aten.index_put_.default: index_put,
    aten._index_put_impl_.default: index_put,
    aten._softmax.default: softmax_forward,
    aten._log_softmax.default: softmax_forward,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._safe_softmax.default: safe_softmax,
    aten.multinomial.default: multinomial,
    aten._foreach_norm.Scalar: foreach_norm,
}

# Outputs, by position, that CUDA leaves on the host: philox_seed and philox_offset (attention.cu).
ON_THE_HOST = {aten._scaled_dot_product_efficient_attention.default: (2, 3)}


# ---- cuda/CublasHandlePool.cpp: kept from the first use on, one for each handle (thread) and stream -----------------

def cublas_workspace(capability: tuple[int, int], version: tuple[int, int] = VERSION) -> int:
    """Bytes of cuBLAS's workspace: 8.125 MiB; 32 MiB on Hopper, and from PyTorch 2.12 on Blackwell, RTX 50 included.

    CUBLAS_WORKSPACE_CONFIG (``:KiB:count``, repeated) is respected.
    """
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(int(size) * int(count) * KiB for size, count in chosen)
    large = capability[0] == 9 or capability[0] in (10, 12) and version >= (2, 12)
    return 32 * MiB if large else 2 * 4096 * KiB + 8 * 16 * KiB


def takes_cublaslt(args: tuple, kwargs: dict) -> bool:
    """Whether this ``aten.addmm`` adds its bias in cuBLASLt's epilogue (isInputCompliesAddmmCudaLt, cuda/Blas.cpp)."""
    bias, left, right = args[:3]
    return (kwargs.get("beta", 1) == 1 and bias.dim() == 1 and bias.is_contiguous() and bias.numel() == right.shape[1]
            and min(*left.shape, *right.shape) > 1 and os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1")


def cublaslt_workspace() -> int:
    """Bytes of cuBLASLt's own workspace: 1 MiB a handle, or CUBLASLT_WORKSPACE_SIZE KiB.

    None with TORCH_CUBLASLT_UNIFIED_WORKSPACE=1, when it uses cuBLAS's. That was made the default for a while on the
    way to 2.14; but Qwen2.5-1.5B, which has biases, held exactly 2 MiB more on a T4 (one for each thread) under 2.10
    and 2.14 alike, and models without biases nothing.
    """
    if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return 0
    return int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", 1024)) * KiB
