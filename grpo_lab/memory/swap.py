"""A module's weights exchanged for fake ones on a virtual card, and back: the module object itself stays.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> layer = torch.nn.Linear(4, 4)
>>> mine = layer.weight
>>> with VirtualGPU("T4") as gpu, on_card(gpu, layer):
...     type(layer.weight.data).__name__
'FakeTensor'
>>> layer.weight is mine
True
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import nf4


@contextmanager
def on_card(gpu, module: torch.nn.Module, category: str = "parameters") -> Iterator[torch.nn.Module]:
    """Inside, ``module`` has fake weights of its own shapes and dtypes, placed on ``gpu``; afterwards it is as before.

    Everything that is set on the module or its parts inside (hooks, flags, other forwards, gradients) is undone too.
    Weights may be real or on the meta device, and those of linear layers in bitsandbytes' 4-bit form.
    """
    parts = list(module.modules())
    configs = {id(config): config for part in parts for name in ("config", "generation_config")
               if hasattr(config := getattr(part, name, None), "to_dict")}
    restore = [_remember(thing) for thing in (*parts, *configs.values())]
    try:
        _to_meta(module)
        yield gpu.place(module, category)
    finally:
        for undo in restore:
            undo()


def _remember(thing) -> Callable[[], None]:
    """A function that gives ``thing`` its present attributes back.

    Dictionaries and lists (parameters, hooks) stay the same objects, for hooks' handles hold on to them.
    """
    kept = [(name, value, copy.copy(value) if isinstance(value, (dict, list, set)) else None)
            for name, value in vars(thing).items()]

    def undo() -> None:
        vars(thing).clear()
        for name, value, content in kept:
            if content is not None:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)
            vars(thing)[name] = value

    return undo


def _to_meta(module: torch.nn.Module) -> None:
    """Puts meta tensors in the stead of real parameters and buffers; ties and requires_grad stay."""
    made: dict[int, torch.Tensor] = {}
    with _disable_current_modes(), torch.no_grad():
        for part in module.modules():
            for store in (part._parameters, part._buffers):
                for name, old in store.items():
                    if old is None or old.device.type == "meta":
                        continue
                    if id(old) not in made:
                        new = torch.empty_like(old, device="meta")
                        is_parameter = isinstance(old, torch.nn.Parameter)
                        made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
                        for noted in nf4.NOTED if hasattr(old, "quant_state") else ():
                            setattr(made[id(old)], noted, getattr(old, noted))
                    store[name] = made[id(old)]
