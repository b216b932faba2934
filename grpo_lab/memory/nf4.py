"""4-bit weights on a card that isn't there: bitsandbytes' own modules and ops, with fake packed weights.

>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu:
...     model = gpu.load("SmolLM2-135M", dtype="float16", quantization="nf4")
>>> weight = model.model.layers[0].mlp.up_proj.weight
>>> weight.dtype, weight.shape, weight.quant_state.absmax.shape         # two weights a byte, one float32 per 64
(torch.uint8, torch.Size([442368, 1]), torch.Size([13824]))

transformers' quantizer chooses the layers. Then all goes as in `from_pretrained` on the card: one allocation as large
as the model, let go at once, out of whose segment the weights are cut; each weight is made in 16 bits, quantized and
let go, in the order of the checkpoint's keys.
"""
from __future__ import annotations

from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

QUANTIZATIONS = ("nf4", "nf4_double")           # double: the scales are quantized too (Dettmers et al. 2023, QLoRA)
NOTED = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")

# 16-bit weights that the loader's threads have on the card while one is quantized. None since March 2026: transformers
# turned the threads off where it quantizes (pull request 44576), for what they held could exceed the quantized model.
AHEAD = 0

# From this many rows on, `gemm_4bit` unpacks the weight and multiplies as usual; below it may multiply packed weights.
# bitsandbytes decides by tables for each chip (`_gemm_4bit_use_custom_cuda` in bitsandbytes/backends/cuda/ops.py,
# 0.50); for layers of 4M weights and more all of them end at or below this.
UNPACKED_FROM = 257


def replace_linears(module: torch.nn.Module, quantization: str, dtype: torch.dtype, compute_dtype: torch.dtype):
    """Puts bitsandbytes' `Linear4bit` in place of the linear layers of a transformers model on the meta device.

    Returns transformers' quantizer, for :func:`warm_up`.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r}: takes {', '.join(map(repr, QUANTIZATIONS))}, or None")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ImportError(f"quantization={quantization!r} needs bitsandbytes: install it, or leave it out") from error
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype,
                                bnb_4bit_use_double_quant=quantization == "nf4_double")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    with _disable_current_modes():
        quantizer.preprocess_model(model=module, dtype=dtype, device_map={"": 0})
        quantizer.postprocess_model(module)
    for part in _quantized(module):
        part.support_avx512bf16_for_cpu = False         # a CPU's own packing
        if part.bias is not None:                       # comes from the checkpoint, in its dtype
            part.bias = torch.nn.Parameter(torch.empty_like(part.bias, dtype=dtype), requires_grad=False)
    return quantizer


def warm_up(module: torch.nn.Module, quantizer) -> None:
    """What transformers does before it loads to a card: the whole model's bytes in one allocation, and back."""
    from transformers.modeling_utils import caching_allocator_warmup
    caching_allocator_warmup(module, dict.fromkeys(module.state_dict(), "cuda:0"), quantizer)


def pack_weights(module: torch.nn.Module, put) -> bool:
    """Gives every `Linear4bit` on the meta device its packed fake weight; whether there were any.

    The other parameters are made between them by ``put(part, name)``, in the order in which a checkpoint is read.
    """
    parts = _quantized(module)
    if not parts:
        return False
    from bitsandbytes import functional
    from transformers.core_model_loading import dot_natural_key
    dtype = getattr(getattr(module, "config", None), "dtype", None) or torch.float16
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    keys = sorted(set(module.state_dict()) - set(tied), key=dot_natural_key)
    full: dict[str, torch.Tensor] = {}

    def make(key: str) -> None:
        path, _, name = key.rpartition(".")
        part = module.get_submodule(path)
        if name == "weight" and part in parts:
            full[key] = torch.empty(part.out_features, part.in_features, dtype=dtype)
        elif name in part._parameters:
            put(part, name)

    # bitsandbytes keeps its lookup table for good once it is made: this one must not outlive its card
    with mock.patch.dict(functional.name2qmap, dynamic=torch.empty(256)):
        for index, key in enumerate(keys):
            for other in keys[index:index + 1 + AHEAD]:
                if other not in full:
                    make(other)
            if key in full:
                _pack(module.get_submodule(key.rpartition(".")[0]), full.pop(key), functional)
    return True


def _pack(part: torch.nn.Module, full: torch.Tensor, functional) -> None:
    old = part.weight
    packed, state = functional.quantize_4bit(full, blocksize=old.blocksize, quant_type=old.quant_type,
                                             compress_statistics=old.compress_statistics)
    del full
    # a `Params4bit` can't be built of a fake tensor: a parameter with the same attributes serves
    weight = torch.nn.Parameter(packed, requires_grad=False)
    for name in NOTED:
        setattr(weight, name, getattr(old, name))
    weight.quant_state, weight.bnb_quantized = state, True
    part.weight, part.quant_state = weight, state


def gemm_4bit(run, a, b, shape, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None,
              absmax_offset=None):
    """What bitsandbytes' op of this name does on CUDA, op by op through ``run``; None where one kernel does it all.

    Its 4-bit weight is unpacked whole, and the scales before it where they are quantized too
    (`_dequant_linear_fallback` in bitsandbytes/backends/cuda/ops.py, 0.50).
    """
    aten, bnb = torch.ops.aten, torch.ops.bitsandbytes
    if a.numel() // a.shape[-1] < UNPACKED_FROM:
        return None
    if absmax_8bit is not None:
        unpacked = run(bnb.dequantize_blockwise.default, absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = run(aten.add.Tensor, unpacked, absmax_offset)          # both live to the end, as there
    weight = run(bnb.dequantize_4bit.default, b, absmax, blocksize, quant_type, shape, a.dtype)
    rows, turned = run(aten.view.default, a, [-1, a.shape[-1]]), run(aten.t.default, weight)
    out = run(aten.mm.default, rows, turned) if bias is None else run(aten.addmm.default, bias, rows, turned)
    return run(aten.view.default, out, [*a.shape[:-1], shape[0]])


def _quantized(module: torch.nn.Module) -> set[torch.nn.Module]:
    kinds = {type(part).__name__ for part in module.modules()}
    if "Linear8bitLt" in kinds:
        raise NotImplementedError("a model in bitsandbytes' 8-bit form can't be put on a virtual card: "
                                  "load it in 4 bits or in 16")
    if "Linear4bit" not in kinds:
        return set()                                    # and bitsandbytes needn't be installed
    from bitsandbytes.nn import Linear4bit
    return {part for part in module.modules() if isinstance(part, Linear4bit) and part.weight.device.type == "meta"}
