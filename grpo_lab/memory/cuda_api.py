"""``torch.cuda``'s questions about memory and about the card, answered for a card that isn't there.

>>> import torch
>>> from grpo_lab import gpus
>>> from grpo_lab.memory.allocator import CachingAllocator
>>> card = gpus.get("T4")
>>> allocator = CachingAllocator(card.budget, total_memory=card.total_memory)
>>> with cuda_api(allocator, card):
...     block = allocator.allocate(3 * 2**20)
...     print(torch.cuda.get_device_name(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
T4 3145728 20971520

``torch.cuda.is_available()`` is left as it is. Libraries take True for leave to use the card itself: accelerate and
transformers' Trainer would choose ``cuda:0`` and move tensors there, start NCCL and pin host memory. Inside a
``VirtualGPU`` the tensors are fake ones of the CPU.
"""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from .allocator_settings import AllocatorSettings
from .allocator_stats import memory_stats, memory_summary


@contextmanager
def cuda_api(allocator, card):
    """Inside, ``torch.cuda`` answers for ``card`` (a :class:`grpo_lab.gpus.Card`), whose memory ``allocator`` keeps.

    What needs a real card raises RuntimeError with one sentence: streams, CUDA graphs, the time between events.
    """
    with ExitStack() as stack:
        for name, answer in {**_memory(allocator, card), **_device(allocator, card), **_refused()}.items():
            for module in (torch.cuda, torch.cuda.memory):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, answer))
        yield


def _memory(allocator, card) -> dict:
    """torch/cuda/memory.py: each name with its signature there."""
    def of_card(answer):
        """A function of `device`, which may only be this card."""
        def function(device=None):
            _check(device)
            return answer()
        return function

    def set_fraction(fraction, device=None):
        _check(device)
        if not isinstance(fraction, float) or not 0 <= fraction <= 1:
            raise ValueError(f"set_per_process_memory_fraction({fraction!r}): takes a float from 0.0 to 1.0, the "
                             "share of the card's memory that PyTorch may reserve")
        allocator.memory_fraction = fraction

    def free_and_total():
        return max(0, card.budget - allocator.reserved), card.total_memory

    def empty_cache():
        allocator.empty_cache()

    def apply(text):
        allocator.settings = AllocatorSettings.parse(text, base=allocator.settings)

    def summary(device=None, abbreviated=False):
        _check(device)
        return memory_summary(allocator, card.name)

    return {
        "memory_allocated": of_card(lambda: allocator.allocated),
        "max_memory_allocated": of_card(lambda: allocator.peak_allocated),
        "memory_reserved": of_card(lambda: allocator.reserved),
        "max_memory_reserved": of_card(lambda: allocator.peak_reserved),
        "reset_peak_memory_stats": of_card(allocator.reset_peaks),
        "memory_stats": of_card(lambda: memory_stats(allocator)),
        "mem_get_info": of_card(free_and_total),
        "get_per_process_memory_fraction": of_card(lambda: allocator.memory_fraction),
        "set_per_process_memory_fraction": set_fraction,
        "memory_summary": summary,
        "memory_snapshot": lambda mempool_id=None, include_traces=True: allocator.snapshot(),
        "empty_cache": empty_cache,
        "get_allocator_backend": lambda: "native",
        "_set_allocator_settings": apply,
    }


def _device(allocator, card) -> dict:
    """torch/cuda/__init__.py."""
    def properties(device=None):
        _check(device)
        return Properties(card)

    def named(device=None):
        _check(device)
        return card.name

    def capability(device=None):
        _check(device)
        return card.compute_capability

    def synchronize(device=None):
        _check(device)
        allocator.synchronize()

    def bf16(including_emulation=True):
        return card.bf16 or including_emulation     # any card can hold bfloat16; is_bf16_supported says so too

    def stream(device=None):
        _check(device)
        return CurrentStream(allocator)

    return {"current_device": lambda: 0, "device_count": lambda: 1, "set_device": _check, "synchronize": synchronize,
            "get_device_name": named, "get_device_capability": capability, "get_device_properties": properties,
            "is_bf16_supported": bf16, "current_stream": stream, "default_stream": stream, "Event": VirtualEvent,
            "_exchange_device": _check, "_maybe_exchange_device": _check}


def _refused() -> dict:
    """What can't be answered, and the way out. They stay classes, for code that asks isinstance."""
    one_stream = "a virtual card works on one stream; leave the streams out (in TRL and PEFT: use_streams=False)"
    graphs = "a virtual card runs no kernels to record; run the code without CUDA graphs"
    history = ("a virtual card always keeps its history; use gpu.report().save_snapshot(path), which PyTorch's viewer "
               "opens")
    classes = {"Stream": one_stream, "ExternalStream": one_stream, "CUDAGraph": graphs, "graph": graphs,
               "make_graphed_callables": graphs, "MemPool": graphs, "_record_memory_history": history,
               "_dump_snapshot": history, "_snapshot": history}
    return {name: _refusal(name, why) for name, why in classes.items()}


def _refusal(name: str, why: str) -> type:
    where = "torch.cuda.memory." if name.startswith("_") else "torch.cuda."

    def __new__(cls, *args, **kwargs):
        raise RuntimeError(f"{where}{name}: {why}")

    return type(name, (), {"__new__": __new__, "__doc__": why})


def _check(device=None) -> int:
    """The index of the only card: 0. Anything else raises."""
    index = device
    if isinstance(device, str):
        index = torch.device(device)
    if isinstance(index, torch.device):
        index = (index.index or 0) if index.type == "cuda" else device
    if index not in (None, 0, -1):                  # -1: "leave it as it is"
        raise ValueError(f"device={device!r}: there is one virtual card; use 0, 'cuda', 'cuda:0' or nothing")
    return 0


class Properties:
    """``get_device_properties``: what is known of the card."""

    def __init__(self, card):
        self.name, self.total_memory = card.name, card.total_memory
        self.major, self.minor = card.compute_capability
        self.warp_size = 32                         # of every CUDA card (CUDA C++ Programming Guide)

    def __getattr__(self, name):
        raise AttributeError(f"get_device_properties().{name} is not known of a virtual card; known are "
                             + ", ".join(vars(self)))

    def __repr__(self) -> str:
        return (f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
                f"total_memory={self.total_memory // 2**20}MB)")


class CurrentStream:
    """The one stream: work on it is done as soon as it is asked for."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, allocator):
        self._allocator = allocator

    def synchronize(self) -> None:
        self._allocator.synchronize()

    def query(self) -> bool:
        return True

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None):
        return event or VirtualEvent()


class VirtualEvent:
    """``torch.cuda.Event``: it can be recorded and waited for; there is no time between two of them."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        pass

    def record(self, stream=None) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event) -> float:
        raise RuntimeError("torch.cuda.Event.elapsed_time: a virtual card runs no kernels, so that no time passes on "
                           "it; leave the timing out")
