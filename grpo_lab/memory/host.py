"""The computer's own memory, beside the virtual card's: what is moved there is counted there.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu:
...     x = torch.zeros(2**20)                              # 4 MiB on the card
...     kept = x.cpu()
...     del x
...     back = kept.to("cuda") + 1
>>> report = gpu.report()
>>> report.peak_host, report.peak_allocated                 # back needed two tensors for a moment
(4194304, 8388608)

All tensors on a virtual card are fake CPU tensors, so that the device alone doesn't tell. Host memory is what
``.cpu()``, ``.to("cpu")``, ``device="cpu"`` and ``pin_memory=True`` make, and what is computed from such tensors. A
`torch.device` object, as ``tensor.device`` gives it, means the card.
"""
from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch


class HostMemory:
    """Storages in host memory: ``bytes`` now and ``peak`` at most, as asked for, without what pinning rounds up.

    ``counts=False``: host and card are one, as on a machine without a card.
    """

    def __init__(self, counts: bool = True):
        self.counts = counts
        self.bytes = self.peak = 0
        self._held: dict[int, weakref.ref] = {}             # storage address -> storage
        self.place: str | None = None

    @contextmanager
    def making(self, place: str | None):
        """What is made inside lies on the "host", or on the "card"; None: where its operands lie."""
        self.place, before = place, self.place
        try:
            yield
        finally:
            self.place = before

    def takes(self, args) -> bool:
        """Whether what an op makes from these arguments lies in host memory."""
        if self.place is not None:
            return self.counts and self.place == "host"
        return bool(self._held) and self.holds(args)

    def holds(self, values) -> bool:
        """Whether one of the tensors among the values, or in a list among them, lies in host memory."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.untyped_storage()._cdata in self._held:
                    return True
            elif isinstance(value, (list, tuple)) and self.holds(value):
                return True
        return False

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it dies."""
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._held or not nbytes:
            return
        self._held[key] = weakref.ref(storage, lambda _: self._leave(key, nbytes))
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)

    def _leave(self, key: int, nbytes: int) -> None:
        del self._held[key]
        self.bytes -= nbytes


def is_host(device) -> bool:
    """Whether a caller means host memory by this."""
    return isinstance(device, str) and device == "cpu"


def moves(args: tuple, kwargs: dict) -> tuple[str | None, tuple, dict]:
    """Where ``tensor.to(*args, **kwargs)`` goes, "host", "card" or None, and what else it is asked for.

    >>> moves(("cpu", torch.float32), {}), moves((), {"device": torch.device("cuda")})
    (('host', (torch.float32,), {}), ('card', (), {}))
    """
    place, rest = None, []
    for value in (*args, *([kwargs["device"]] if "device" in kwargs else [])):
        if isinstance(value, (str, torch.device)) or type(value) is int:
            place = "host" if is_host(value) else "card"
        elif not isinstance(value, bool):                   # non_blocking
            rest.append(value)
    others = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
    return place, tuple(rest), others
