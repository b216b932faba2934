"""`scaled_dot_product_attention` as a card takes it: the kernel that CUDA would choose, on tensors that lie elsewhere.

>>> import torch
>>> q = torch.empty(2, 8, 16, 64, dtype=torch.float16)
>>> choose(q, q, q, is_causal=True, capability=(8, 6)).name, choose(q, q, q, is_causal=True, capability=(7, 5)).name
('FLASH_ATTENTION', 'EFFICIENT_ATTENTION')
>>> few = torch.empty(2, 2, 16, 64, dtype=torch.float16)            # grouped queries: a T4 has no kernel for them
>>> choose(q, few, few, is_causal=True, enable_gqa=True, capability=(7, 5)).name
'MATH'

A CPU build of PyTorch takes the CPU's kernels whatever the card. :func:`choose` follows the tests of
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`can_use_flash_attention`, `can_use_mem_efficient_attention`,
`can_use_cudnn_attention`, `select_sdp_backend`) and `sdp_utils_cpp.h` in PyTorch 2.10 to 2.13; :func:`sdpa` does what
surrounds the kernel in `scaled_dot_product_attention` of `aten/src/ATen/native/transformers/attention.cpp`. Left out:
nested tensors, ROCm, flash attention 3 and 4 (opt-in), and cuDNN's own version tests.
"""
from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
DEFAULT_ORDER = [1, 2, 0, 3, 4]                     # flash, efficient, math, cuDNN, overrideable: ATen/Context.h
CUDNN_FIRST = [3, 1, 2, 0]                          # check_prefer_cudnn_attention, sdp_utils.cpp
EFFICIENT_TAKES_GROUPED_QUERIES = VERSION >= (2, 14)


def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
         is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
         capability: tuple[int, int]) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the kernels of a card of that compute capability.

    >>> q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    >>> sdpa(q, q, q, is_causal=True, capability=(8, 0)).grad_fn.name()
    'ScaledDotProductFlashAttentionBackward0'
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        device = "cpu" if torch.is_autocast_enabled("cpu") else "cuda"
        # scaled_dot_product_attention is in CUDA's lower_precision_fp list; inside it nothing is cast again.
        dtype = torch.get_autocast_dtype(device)
        query, key, value, attn_mask = (_lower(t, dtype) for t in (query, key, value, attn_mask))
        with torch.autocast(device, enabled=False):
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, capability=capability)
    _validate(query, key, value, attn_mask)
    backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability=capability)
    needs_grad = _needs_grad(query, key, value)
    if backend == SDPBackend.FLASH_ATTENTION:
        # flash attention wants heads in multiples of 8: padded outside the op, so autograd keeps the padded copies
        size, scale = query.shape[-1], 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        query, key, value = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if out.shape[-1] != size else out
    if backend == SDPBackend.CUDNN_ATTENTION:
        if attn_mask is not None and attn_mask.dtype is torch.bool:         # convert_boolean_attn_mask_cudnn
            zero = torch.scalar_tensor(0, dtype=query.dtype, device=query.device)
            attn_mask = torch.where(~attn_mask, -65504.0, zero)
        return aten._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, needs_grad, dropout_p, is_causal,
                                                        False, scale=scale)[0]
    mask = _additive(attn_mask, query.dtype)
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_grad, dropout_p, is_causal,
                                                            scale=scale)[0]
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def choose(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, enable_gqa: bool = False, *, capability: tuple[int, int]) -> SDPBackend:
    """The kernel that CUDA takes (`select_sdp_backend`); RuntimeError, in PyTorch's words, where none may.

    ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.enable_*_sdp`` count as on the card.
    """
    call = (query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, tuple(capability))
    why_not = {}
    for backend in map(SDPBackend, _order(capability)):
        if backend == SDPBackend.MATH and torch.backends.cuda.math_sdp_enabled():
            return backend
        if backend in _TESTS:
            why_not[backend] = _TESTS[backend](*call)
            if why_not[backend] is None:
                return backend
    for name, backend in (("Memory efficient", SDPBackend.EFFICIENT_ATTENTION),
                          ("Flash attention", SDPBackend.FLASH_ATTENTION),
                          ("cuDNN attention", SDPBackend.CUDNN_ATTENTION)):
        if why_not.get(backend):
            warnings.warn(f"{name} kernel not used because: {why_not[backend]}", stacklevel=3)
    if all("runtime disabled" in reason for reason in why_not.values()):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found. This is likely due to "
                           "turning off both the math kernel and the fused kernels.")
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(capability: tuple[int, int]) -> list[int]:
    order = list(torch._C._get_sdp_priority_order())
    # cuDNN >= 9.15.1 comes first on Hopper and data-center Blackwell. PyPI's wheels bring one from PyTorch 2.11 on.
    if order == DEFAULT_ORDER and capability[0] in (9, 10) and VERSION >= (2, 11):
        return CUDNN_FIRST
    return order


# ---- what each kernel can take: a reason why not, or None ----------------------------------------------------------

def _flash(query, key, value, mask, dropout, causal, gqa, sm) -> str | None:
    size = query.shape[-1]
    if not torch.backends.cuda.flash_sdp_enabled():
        return "Flash attention has been runtime disabled."
    if reason := _four_dimensions(query, key, value):
        return reason
    if mask is not None:
        return "Flash Attention does not support non-null attn_mask."
    if not size == key.shape[-1] == value.shape[-1] or size > 256:
        return ("Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. "
                f"Got {_last_sizes(query, key, value)} instead.")
    if not (8, 0) <= sm <= (12, 1):
        return ("Flash attention only supports gpu architectures in the range [sm80, sm121]. Attempting to run on a "
                f"sm {sm[0]}.{sm[1]} gpu.")
    small_shared_memory = (8, 6) <= sm <= (8, 9) or (12, 0) <= sm <= (12, 1)
    if small_shared_memory and _needs_grad(query, key, value) and size > 192 and (size <= 224 or dropout > 0):
        return ("Flash attention currently doesn't support training with head_dim in (192, 224] or (head_dim in "
                "(224, 256] and dropout > 0.0) on gpu architectures in the range[sm86, sm89].")
    if causal and query.shape[-2] != key.shape[-2]:
        return "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k."
    return (_dtypes(query, key, value, HALF) or _batch_and_heads(query, key, value, gqa) or _not_empty(query, key)
            or _last_stride(query, key, value, mask, or_one_wide=True))


def _efficient(query, key, value, mask, dropout, causal, gqa, sm) -> str | None:
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "Memory Efficient attention has been runtime disabled."
    if not (5, 0) <= sm <= (12, 1):
        return "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm121]."
    if reason := _four_dimensions(query, key, value):
        return reason
    # minimum_gemm_alignment: 128 bits on tensor cores, at least 4 elements from Ampere on
    half = query.dtype in HALF
    alignment = (8 if half else 4) if sm[0] >= 8 else (8 if half and sm[0] >= 7 else 1)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % alignment or value.shape[-1] % alignment:
        return (f"Mem efficient attention requires last dimension of inputs to be divisible by {alignment}. Got "
                f"{_last_sizes(query, key, value)} instead.")
    return (_not_empty(query, key) or _last_stride(query, key, value, mask)
            or _batch_and_heads(query, key, value, gqa and EFFICIENT_TAKES_GROUPED_QUERIES)
            or _dtypes(query, key, value, (*HALF, torch.float32) if sm[0] >= 8 else (torch.float16, torch.float32)))


def _cudnn(query, key, value, mask, dropout, causal, gqa, sm) -> str | None:
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "cuDNN attention has been runtime disabled."
    if reason := _four_dimensions(query, key, value):
        return reason
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "cuDNN SDPA is not deterministic."
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return "Please use a 2-d or 4-d attn mask that needs no gradient."
    if not (8, 0) <= sm <= (12, 1):
        return f"cuDNN MHA only supports gpu architectures in the range [sm80, sm121]. Attempting to run on a sm {sm}."
    if dropout * 16 != math.floor(dropout * 16):
        return "cuDNN dropout probability resolution is limited to 1/16."
    sizes, most = (query.shape[-1], value.shape[-1]), 256 if sm[0] in (9, 10) else 128
    if max(sizes) > most or sizes[0] % 8 or sizes[1] % 8:
        return f"head_dim should be no more than {most} and a multiple of 8, got {sizes}"
    if key.shape[2] == 1 or dropout and query.shape[2] == 1:
        return "cudnn SDPA does not support key/value sequence length 1, nor query sequence length 1 with dropout."
    return (_dtypes(query, key, value, HALF) or _not_empty(query, key)
            or _last_stride(query, key, value, mask, or_one_wide=True) or _batch_and_heads(query, key, value, gqa))


_TESTS = {SDPBackend.FLASH_ATTENTION: _flash, SDPBackend.EFFICIENT_ATTENTION: _efficient,
          SDPBackend.CUDNN_ATTENTION: _cudnn}


def _last_sizes(query, key, value) -> str:
    return f"Query.size(-1): {query.shape[-1]}, Key.size(-1): {key.shape[-1]}, Value.size(-1): {value.shape[-1]}"


def _four_dimensions(query, key, value) -> str | None:
    if not query.dim() == key.dim() == value.dim() == 4:
        return ("All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: "
                f"{query.dim()}, Key dim: {key.dim()}, Value dim: {value.dim()} instead.")


def _batch_and_heads(query, key, value, grouped: bool) -> str | None:
    """`check_batch_size_and_num_heads_dense`"""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    same = kv_heads == value.shape[-3] and (heads % kv_heads == 0 if grouped and kv_heads else heads == kv_heads)
    if not (query.shape[0] == key.shape[0] == value.shape[0] and same):
        return ("For dense inputs, both fused kernels require query, key and value to have the same batch_size and "
                f"num_heads. Query.sizes(): {list(query.shape)}, Key sizes(): {list(key.shape)}, Value sizes(): "
                f"{list(value.shape)} instead.")


def _not_empty(query, key) -> str | None:
    if query.shape[-2] == 0 or key.shape[-2] == 0:
        return "All fused kernels do not support zero seq_len_q or seq_len_kv."


def _last_stride(query, key, value, mask, or_one_wide: bool = False) -> str | None:
    dense = all(t.stride(-1) == 1 for t in (query, key, value)) or or_one_wide and query.shape[-1] == 1
    if not dense or mask is not None and mask.stride(-1) != 1:
        return "All fused kernels require the last dimension of the input to have stride 1."


def _dtypes(query, key, value, allowed) -> str | None:
    if query.dtype not in allowed or not query.dtype == key.dtype == value.dtype:
        return (f"Expected query, key and value to all be of dtype: {allowed}. Got Query dtype: {query.dtype}, Key "
                f"dtype: {key.dtype}, and Value dtype: {value.dtype} instead.")


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# ---- what surrounds the kernels -----------------------------------------------------------------------------------

def _validate(query, key, value, mask) -> None:
    """`validate_sdpa_input`"""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("Expected query, key, and value to have the same dtype, but got query.dtype: "
                           f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead.")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
                           f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead.")
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise RuntimeError("Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                           f"attn_mask.dtype: {mask.dtype} and  query.dtype: {query.dtype} instead.")


def _lower(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`convert_boolean_attn_mask`: a new tensor of the query's dtype for every call, kept for the backward."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """`preprocess_mask`: the efficient kernel reads rows in steps of 8 elements; others are padded, then sliced."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    return F.pad(mask, (0, 8 - size % 8))[..., :size]


def _math(query, key, value, mask, dropout, causal, scale, gqa) -> Tensor:
    """`_scaled_dot_product_attention_math`: half precision is computed in float32, scores and all.

    Spelled out, because inside a dispatch mode PyTorch adds the mask out of place (`areAnyTensorSubclassLike`).
    """
    dtype, size = query.dtype, query.shape[-1]
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(abs(scale) if scale is not None else 1 / math.sqrt(size))
    query = query * (-root if scale is not None and scale < 0 else root)
    if causal:
        if mask is not None:
            raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when "
                               "is_causal=True")
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, query.dtype)
    if gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = torch._safe_softmax(scores, -1)
    if dropout > 0:
        scores = torch.native_dropout(scores, dropout, True)[0]
    returned = scores.to(dtype)                     # the op's second result: made, then thrown away
    out = (scores @ value).to(dtype)
    del returned
    return out
