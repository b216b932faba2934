"""TRL's fused head as it runs on a card, on fake tensors: its allocations, without its Triton kernels.

On CUDA, TRL 1.16 scores only the tokens that count: it picks their hidden states by a mask, projects them in tiles of
4,096 tokens (`TOKEN_CHUNK_SIZE`) × 32,768 words, folds each tile into a few numbers a
token inside a kernel that allocates nothing, and accumulates gradients in float32 without copying a tile. On a CPU it
scores every position and makes several float32 tiles. Both are the same function of
``trl/kernels/chunked_logprob.py``, which runs here as it is; only what it asks the device is answered for a card.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

TILE = 32768                            # words in a tile: _CHUNKED_LOGPROB_CHUNK_SIZE, trl/trainer/utils.py


@contextmanager
def triton_head() -> Iterator[None]:
    """Inside, TRL's fused head takes its CUDA path on fake tensors."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils
    if not chunked_logprob._MM_OUT_DTYPE:
        raise RuntimeError("this PyTorch has no addmm with out_dtype: grpo_lab needs 2.10 or later")
    with ExitStack() as stack:
        for module, name, new in (
                (utils, "_use_triton", lambda device: True), (chunked_logprob, "_use_triton", lambda device: True),
                (chunked_logprob, "_forward_kernel", _NoKernel()), (chunked_logprob, "_backward_kernel", _NoKernel()),
                (chunked_logprob, "_addmm_fp32", lambda total, left, right: None)):     # cuBLAS adds in place
            need(module, name)
            stack.enter_context(mock.patch.object(module, name, new))
        stack.enter_context(mock.patch.object(chunked_logprob, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
                                              create=True))
        yield


class _NoKernel:
    """A Triton kernel launched on nothing: ``kernel[grid](...)``."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def need(thing, name: str) -> None:
    """Raises where a private name of the pinned TRL or transformers is gone."""
    if not hasattr(thing, name):
        where = thing.__name__ if hasattr(thing, "__name__") else type(thing).__name__
        raise RuntimeError(f"{where} has no {name} any more: grpo_lab needs an update, or the TRL that it pins (1.16)")
