"""Trainers and models without their weights: built on the meta device from an architecture, nothing read or fetched.

>>> from transformers import AutoModelForCausalLM
>>> with no_weights():
...     model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="bfloat16")
>>> model.num_parameters(), model.device
(8190735360, device(type='meta'))
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

STAND_IN = "_stands_in_for"             # on a tokenizer that isn't the model's


@contextmanager
def no_weights() -> Iterator[None]:
    """Inside, `GRPOTrainer("a name", ...)` and `AutoModelForCausalLM.from_pretrained` make models without weights.

    Names are those of :func:`grpo_lab.models.config`: bundled architectures ("Qwen3-8B"), folders, hub ids. TRL loads
    names in float32 unless ``model_init_kwargs`` has a ``dtype``; so does this. Where the tokenizer isn't on this
    machine another stands in: then `simulate` wants ``prompt_length``. Such a trainer can be simulated, not trained.
    """
    from transformers import AutoModelForCausalLM
    from trl.trainer import grpo_trainer

    from .fused_head import need
    with ExitStack() as stack:
        for module, name, new in ((grpo_trainer, "create_model_from_path", _from_name),
                                  (grpo_trainer, "AutoProcessor", _Processors)):
            need(module, name)
            stack.enter_context(mock.patch.object(module, name, new))
        auto = classmethod(lambda cls, name, *args, **kwargs: _from_name(name, **{"dtype": None} | kwargs))
        stack.enter_context(mock.patch.object(AutoModelForCausalLM, "from_pretrained", auto))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", _to))
        yield


def _from_name(model_id, architecture=None, **options):
    """A transformers model on the meta device; ``dtype`` None or "auto" is the checkpoint's."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import AutoHfQuantizer

    from .. import models
    from .._trl import _quantization
    from ..memory import nf4
    config = models.config(model_id)
    config._name_or_path = str(model_id)
    dtype = options.get("dtype", "float32")
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or "float32"
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    chosen = {name: options[name] for name in ("attn_implementation",) if options.get(name) is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
    if (wanted := options.get("quantization_config")) is not None:
        nf4.replace_linears(model, _quantization(wanted), dtype, wanted.bnb_4bit_compute_dtype)
        model.config.dtype, model.config.quantization_config = dtype, wanted
        model.hf_quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=False)       # Trainer asks it
    return model.eval()


class _Processors:
    """In the place of `AutoProcessor`: the model's tokenizer if it is on this machine."""

    @staticmethod
    def from_pretrained(name, **options):
        from transformers import AutoTokenizer

        from .. import models
        try:
            if name == "tiny":
                return models.tokenizer(name)
            return AutoTokenizer.from_pretrained(models.hub_id(name), local_files_only=True, padding_side="left")
        except (OSError, ValueError):
            tokenizer = models.tokenizer("tiny")
            setattr(tokenizer, STAND_IN, name)
            return tokenizer


_module_to = torch.nn.Module.to


def _to(self, *args, **kwargs):
    """``Module.to`` that leaves meta weights where they are, for they can't be moved; dtypes are converted."""
    if not any(p.device.type == "meta" for p in self.parameters()):
        return _module_to(self, *args, **kwargs)
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
    return self if dtype is None else _module_to(self, dtype)
