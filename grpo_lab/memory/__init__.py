"""The instrument: a ledger of storages, a replica of the allocator, a virtual card, reports. It knows nothing of GRPO."""
from .report import MemoryReport
from .track import track
from .virtual import VirtualGPU

__all__ = ["MemoryReport", "VirtualGPU", "track"]
