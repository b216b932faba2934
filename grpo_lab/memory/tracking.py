"""The instrument over real tensors: what does this code, on this machine, do with memory?

>>> import torch
>>> with track(existing=False) as memory:                          # count from here on
...     with memory.phase("forward"):
...         x = torch.zeros(1024, 1024)
...         y = x * 2
>>> memory.report().phases.loc["forward", "peak_allocated"].item()  # 2 × 4 MiB
8388608
"""
from __future__ import annotations

import gc
from contextlib import ExitStack

import torch

from .. import gpus
from .allocator import CachingAllocator
from .ledger import Ledger, held_by
from .patches import kv_cache_known
from .report import MemoryReport
from .whence import Whence


class track:  # noqa: N801 - used as a function
    """``with track() as memory``: records every tensor that the code inside makes, on the CPU or on CUDA.

    Parameters, gradients and optimizer states are recognized, whoever made them; tensors that were there before are
    counted from the start, as "parameters" where they are and as "other" where not (``existing=False`` leaves them
    out). ``budget`` (a card's name or bytes) raises ``torch.OutOfMemoryError`` where the code goes beyond it. On CUDA
    the peaks are the allocator's own; on a CPU the reserved bytes are those that a card's allocator would have held.
    """

    def __init__(self, budget: str | int | None = None, existing: bool = True, stacks: bool = False):
        self.card = None if budget is None else gpus.get(budget)
        limit = None if self.card is None else self.card.budget
        context = 0 if self.card is None else self.card.total_memory - limit
        self.ledger = Ledger(CachingAllocator(limit), enforce=limit is not None, context=context)
        self.existing, self.stacks = existing, stacks
        self.cuda = torch.cuda.is_available()

    def __enter__(self) -> track:
        if self.existing:
            with self.ledger.phase("before"):
                self._adopt()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self._stack = ExitStack()
        self._stack.enter_context(kv_cache_known(self.ledger))
        self._stack.enter_context(self.ledger)
        self._stack.enter_context(Whence(self.ledger, stacks=self.stacks))
        return self

    def __exit__(self, *exc) -> None:
        self._stack.__exit__(*exc)
        if self.cuda:
            self.peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def phase(self, name: str):
        """``with memory.phase("forward")``: names what runs inside."""
        return self.ledger.phase(name)

    def watch(self, module: torch.nn.Module, category: str = "parameters") -> None:
        """Counts a module that was there before, by name: its weights, later its gradients, and which are logits."""
        self.ledger.adopt(held_by(module), category)
        self.ledger.watch(module, category)

    def report(self) -> MemoryReport:
        """What happened so far."""
        from dataclasses import replace
        report = MemoryReport.of(self.ledger, card=self.card and self.card.name, simulated=False,
                                 budget=self.card and self.card.budget)
        if self.cuda and hasattr(self, "peaks"):
            report = replace(report, peak_allocated=self.peaks[0], peak_reserved=self.peaks[1])
        return report

    def _adopt(self) -> None:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        parameters = [t for t in tensors if issubclass(type(t), torch.nn.Parameter)]
        self.ledger.adopt(parameters, "parameters")
        self.ledger.adopt((p.grad for p in parameters if p.grad is not None), "gradients")
        self.ledger.adopt((t for t in tensors if type(t) is torch.Tensor), "other")
        for module in (o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)):
            if hasattr(module, "config"):
                self.ledger.watch(module)
