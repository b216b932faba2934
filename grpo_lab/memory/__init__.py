"""The instrument: a ledger of storages, a replica of the allocator, a virtual card, reports. It knows nothing of GRPO."""
from importlib import import_module

_HOMES = {"MemoryReport": "report", "track": "tracking", "VirtualGPU": "virtual"}     # on first use: some parts need no torch
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
