"""Choices that libraries make by looking at the device, led to a card's while fake CPU tensors stand in for it.

Each entry names where the choice is made. They are private names of pinned versions: a missing one raises at once.
"""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def cuda_choices(move_in, kernels: str = "cuda"):
    """Inside, transformers builds its attention mask only where it would on the card, autocast for "cuda" is autocast,
    and modules may be moved to "cuda": ``move_in(module)`` puts real weights onto the virtual card. With the card's
    ``kernels``, optimizers and gradient clipping take the foreach ones, and autocast is CUDA's for who asks."""
    with ExitStack() as stack:
        patch = lambda target, name, new: stack.enter_context(mock.patch.object(target, name, new))  # noqa: E731
        if kernels == "cuda":
            _foreach(patch)
            _autocast(patch)
        _masks(patch)
        _moves(patch, move_in)
        _ends(patch)
        yield


@contextmanager
def kv_cache_known(ledger):
    """Inside, keys and values that a transformers cache holds are entered as "KV cache" in the ledger."""
    from transformers.cache_utils import Cache
    update = Cache.update

    def tag(layers):
        held = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
        ledger.tag((t for t in held if isinstance(t, torch.Tensor)), "KV cache")

    def tagging_update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 0:                      # what was repeated or moved since the last token
            tag(self.layers)
        out = update(self, key_states, value_states, layer_idx, *args, **kwargs)
        tag(self.layers[layer_idx:layer_idx + 1])
        return out

    with mock.patch.object(Cache, "update", tagging_update):
        yield


def _foreach(patch) -> None:
    from torch.nn.utils import clip_grad
    from torch.optim import _functional  # noqa: F401  (torch.optim is loaded)
    from torch.utils import _foreach_utils as utils
    import importlib
    optimizer = importlib.import_module("torch.optim.optimizer")
    # torch/optim/optimizer.py: _default_to_fused_or_foreach; torch/utils/_foreach_utils.py: _has_foreach_support
    devices = ["cuda", "cpu"]
    patch(optimizer, "_get_foreach_kernels_supported_devices", lambda: devices)
    patch(utils, "_get_foreach_kernels_supported_devices", lambda: devices)
    patch(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor])
    if not hasattr(clip_grad, "_has_foreach_support"):
        raise RuntimeError("torch.nn.utils.clip_grad no longer asks _has_foreach_support: grpo_lab needs an update")
    patch(clip_grad, "_has_foreach_support", lambda tensors, device: True)


def _autocast(patch) -> None:
    """Without a device these ask about CUDA; peft/tuners/lora/bnb.py casts its inputs where the answer is no."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def here(device_type: str) -> str:
        return "cpu" if device_type == "cuda" and enabled("cpu") else device_type

    patch(torch, "is_autocast_enabled", lambda device_type="cuda": enabled(here(device_type)))
    patch(torch, "get_autocast_dtype", lambda device_type: dtype(here(device_type)))
    patch(torch, "get_autocast_gpu_dtype", lambda: dtype(here("cuda")))


def _masks(patch) -> None:
    from transformers import masking_utils
    # A fake tensor looks like tracing, and tracing always builds a mask; a card drops one that masks nothing.
    patch(masking_utils, "is_tracing", lambda *a, **k: False)
    # It asks whether the positions are those of packed sequences; a fake comparison reads as "they are".
    patch(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def _ends(patch) -> None:
    """`generate` stops when all rows are finished, which fake values never say: at its full length, then."""
    from transformers import GenerationMixin, StoppingCriteriaList
    ask, full = StoppingCriteriaList.__call__, []

    def criteria(self, input_ids, scores, **kwargs):
        if self.max_length is not None and input_ids.shape[-1] >= self.max_length:
            full.append(True)
        return ask(self, input_ids, scores, **kwargs)

    def unfinished(self, *args, **kwargs):
        ended = bool(full)
        full.clear()
        return not ended

    patch(StoppingCriteriaList, "__call__", criteria)
    patch(GenerationMixin, "_has_unfinished_sequences", unfinished)


def _moves(patch, move_in) -> None:
    module_apply, autocast_init = torch.nn.Module._apply, torch.amp.autocast_mode.autocast.__init__

    def apply(self, fn, recurse=True):
        # Module.to swaps tensors in place, which fake ones refuse: put the converted ones in their stead.
        if any(not isinstance(t, FakeTensor) and t.device.type != "meta" for t in self.parameters()):
            move_in(self)
        if not any(isinstance(t, FakeTensor) for t in self.parameters()):
            return module_apply(self, fn, recurse)
        for part in self.modules() if recurse else [self]:
            for name, parameter in part._parameters.items():
                with torch.no_grad():
                    new = parameter if parameter is None else fn(parameter)
                if new is not parameter:
                    part._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
            part._buffers.update({name: b if b is None else fn(b) for name, b in part._buffers.items()})
        return self

    def autocast(self, device_type, dtype=None, *args, **kwargs):
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        return autocast_init(self, device_type, dtype, *args, **kwargs)

    patch(torch.nn.Module, "_apply", apply)
    patch(torch.amp.autocast_mode.autocast, "__init__", autocast)
