"""GRPO on a graphics card that is too small for it: measure, understand and fit.

>>> from grpo_lab import Recipe, simulate
>>> report = simulate(Recipe(model="SmolLM2-135M", max_completion_length=32))
>>> report.fits
True
"""
from importlib import import_module

_HOMES = {  # public name -> module; imported on first use, so that `recipe` and `gpus` stay free of torch
    "Recipe": "recipe", "simulate": "simulation", "measure": "simulation", "train": "grpo.train",
    "estimate": "estimation", "advise": "advice", "diagnose": "diagnosis", "explore": "explorer",
    "find_batch_size": "batch_search",
    "MemoryReport": "memory", "VirtualGPU": "memory", "track": "memory", "oom_guard": "memory.guard",
    "no_weights": "trainer.no_weights", "PhaseCallback": "trainer.phases",
}
__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell) -> None:
    """``%load_ext grpo_lab``: brings ``%%vram`` and ``%vram`` (see :mod:`grpo_lab.magics`)."""
    from .magics import load_ipython_extension as load
    load(shell)
