"""The settings of PyTorch's CUDA allocator: what ``PYTORCH_ALLOC_CONF`` says, read as PyTorch reads it.

>>> AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:128").max_split_size
134217728
>>> AllocatorSettings.parse("max_split_size_mb:10")
Traceback (most recent call last):
...
ValueError: PYTORCH_ALLOC_CONF: max_split_size_mb:10: takes a whole number of MiB, at least 20

Sources: ``AcceleratorAllocatorConfig`` (c10/core/AllocatorConfig.cpp) and ``CUDAAllocatorConfig``
(c10/cuda/CUDAAllocatorConfig.cpp). PyTorch passes over a missing colon and over letters after a number; here both are
refused, since neither is ever meant.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from .segments import LARGE_SEGMENT, MIN_LARGE, ROUND, MiB, round_up

# In the order in which PyTorch looks: the older name wins where both are set.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

INTERVALS = 16              # kRoundUpPowerOfTwoIntervals: sizes from 1 MiB to 64 GiB, by powers of two

SIZES = {                   # setting in MiB -> field
    "max_split_size_mb": "max_split_size", "max_non_split_rounding_mb": "max_non_split_rounding_size",
    "large_segment_size_mb": "large_segment_size"}
# Accepted, without effect on device memory: host memory, locks and graph captures.
ELSEWHERE = {"pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
             "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
             "pinned_free_catch_all", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"}
KEYS = {*SIZES, *ELSEWHERE, "backend", "expandable_segments", "garbage_collection_threshold",
        "roundup_power2_divisions", "per_process_memory_fraction", "throw_on_cudamalloc_oom"}


@dataclass(frozen=True)
class AllocatorSettings:
    """Sizes in bytes. The defaults are PyTorch's.

    ``max_split_size``: blocks of this size and above are never split (None: all are); ``max_non_split_rounding_size``:
    by how much such a block may exceed the request; ``roundup_power2_divisions``: for each power of two from 1 MiB to
    64 GiB into how many steps the way to the next one is divided (0, or an empty tuple: rounding to 512 B only);
    ``garbage_collection_threshold``: the share of the allowed memory above which old cached segments are released
    (works only where a memory fraction below 1 is set); ``per_process_memory_fraction``: the share of the card that
    the allocator may reserve; ``throw_on_cudamalloc_oom``: what exceeds the whole card is refused at once.
    """

    max_split_size: int | None = None
    max_non_split_rounding_size: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False

    @classmethod
    def of(cls, settings: AllocatorSettings | str | None) -> AllocatorSettings:
        """Settings as they are, a string of them, or None for the defaults."""
        if isinstance(settings, cls):
            return settings
        if settings is None or isinstance(settings, str):
            return cls.parse(settings or "")
        raise TypeError(f"settings={settings!r}: takes a string such as 'expandable_segments:True', an "
                        "AllocatorSettings, or None for PyTorch's defaults")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """What the environment asks for.

        >>> AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
        True
        """
        for name in VARIABLES:
            if name in environ:
                return cls.parse(environ[name], name=name)
        return cls()

    @classmethod
    def parse(cls, text: str, name: str = "PYTORCH_ALLOC_CONF",
              base: AllocatorSettings | None = None) -> AllocatorSettings:
        """Reads ``key:value,key:value``. ``base``: the settings in force, of which PyTorch keeps some when it reads a
        second string (:func:`torch.cuda.memory._set_allocator_settings`). Raises ValueError."""
        said = dict(_pairs(re.sub(r"\s", "", text), name))
        base = base or cls()
        large = _size(said, "large_segment_size_mb", MIN_LARGE + MiB, name, base.large_segment_size)
        fields = {
            "large_segment_size": large,
            "max_split_size": _size(said, "max_split_size_mb", large, name, None),
            "max_non_split_rounding_size": _size(said, "max_non_split_rounding_mb", large, name, large),
            "roundup_power2_divisions": _divisions(said.get("roundup_power2_divisions"), name),
            "garbage_collection_threshold": _share(said, "garbage_collection_threshold", name, 0.0, open_ends=True),
            "per_process_memory_fraction": _share(
                said, "per_process_memory_fraction", name, base.per_process_memory_fraction),
        }
        for key in ("expandable_segments", "throw_on_cudamalloc_oom"):
            fields[key] = _flag(said, key, name, getattr(base, key))
        if said.get("backend", "native") != "native":
            raise ValueError(f"{name}: backend:{said['backend']} is not simulated, only PyTorch's own allocator is; "
                             "leave the setting out, or write backend:native")
        return replace(base, **fields)

    def round_size(self, nbytes: int) -> int:
        """What a request counts for (``round_size`` in CUDACachingAllocator.cpp).

        >>> AllocatorSettings().round_size(1200)
        1536
        >>> AllocatorSettings.parse("roundup_power2_divisions:4").round_size(33 * MiB) // MiB   # 32, 40, 48, 56, 64
        40
        """
        if nbytes < ROUND:
            return ROUND
        divisions = 0
        if self.roundup_power2_divisions:
            interval = min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)      # 1 MiB has 21 bits
            divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > ROUND * divisions:
            return round_up(nbytes, (1 << nbytes.bit_length() - 1) // divisions)
        return round_up(nbytes)


def _pairs(text: str, name: str):
    """Yields (key, value); a value in brackets keeps its commas and colons."""
    for item in filter(None, re.split(r",(?![^\[]*\])", text)):
        key, colon, value = item.partition(":")
        if key not in KEYS:
            near = get_close_matches(key, sorted(KEYS), 1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(sorted(KEYS))
            raise ValueError(f"{name}: {key!r} is not a setting of the CUDA allocator; {hint}")
        if not colon or not value:
            raise ValueError(f"{name}: {item!r} has no value; settings are written key:value,key:value")
        yield key, value


def _size(said: dict, key: str, least: int, name: str, default: int | None) -> int | None:
    """A number of MiB, in bytes."""
    if key not in said:
        return default
    if not said[key].isdecimal() or int(said[key]) * MiB < least:
        raise ValueError(f"{name}: {key}:{said[key]}: takes a whole number of MiB, at least {least // MiB}")
    return int(said[key]) * MiB


def _share(said: dict, key: str, name: str, default: float, open_ends: bool = False) -> float:
    if key not in said:
        return default
    try:
        value = float(said[key])
    except ValueError:
        value = -1.0
    if not (0 < value < 1 if open_ends else 0 <= value <= 1):
        span = "between 0 and 1, without the ends" if open_ends else "from 0 to 1"
        raise ValueError(f"{name}: {key}:{said[key]}: takes a number {span}, such as 0.8")
    return value


def _flag(said: dict, key: str, name: str, default: bool) -> bool:
    if said.get(key, "True") not in ("True", "False"):
        raise ValueError(f"{name}: {key}:{said[key]}: takes True or False, with a capital")
    return said[key] == "True" if key in said else default


def _divisions(text: str | None, name: str) -> tuple[int, ...]:
    """``4``, or ``[256:1,512:2,1024:4,>:8]``: from which size on (MiB) into how many steps.

    As PyTorch fills its table: the first value also counts for all sizes below its own; ``>`` for all above the last;
    a size that isn't named keeps 0.
    """
    if text is None:
        return ()
    wrong = ValueError(f"{name}: roundup_power2_divisions:{text}: takes a power of two, or a list such as "
                       "[256:1,512:2,1024:4,>:8] of sizes in MiB and divisions, all powers of two (or 0 divisions)")
    if text.isdecimal() and _is_power(int(text)):
        return (int(text),) * INTERVALS
    if not re.fullmatch(r"\[((\d+|>):\d+)(,(\d+|>):\d+)*\]", text):
        raise wrong
    table, first, last = [0] * INTERVALS, True, 0
    for size, value in (pair.split(":") for pair in text[1:-1].split(",")):
        value = int(value)
        if value and not _is_power(value) or size != ">" and not _is_power(int(size)):
            raise wrong
        if size == ">":
            table[last + 1:] = [value] * (INTERVALS - last - 1)
            continue
        last = min(int(size).bit_length() - 1, INTERVALS - 1)
        if first:
            table[:last], first = [value] * last, False
        table[last] = value
    return tuple(table)


def _is_power(value: int) -> bool:
    return value > 0 and value & value - 1 == 0
