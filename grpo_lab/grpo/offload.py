"""Host memory as a second shelf: checkpoints of activations, and a reference model that only scores.

Copies of checkpoints run on a CUDA stream of their own, beside the computation. On a CPU, where there is nothing to
gain, the same code copies from memory to memory.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where the tensor is on a card; the copy may still be under way there.

    >>> to_host(torch.ones(2))
    tensor([1., 1.])
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


class CheckpointOffload:
    """Keeps what a checkpointed layer was given in host memory until the backward pass comes for it.

    >>> offload_checkpoints(model)                                                # doctest: +SKIP

    At most two layers' inputs lie on the card. In the forward: the running layer's, and the one before it while it is
    copied out. In the backward: the layer's that is computed again, and the next one's, which is fetched meanwhile.
    """

    def __init__(self) -> None:
        self.newest: _Kept | None = None

    def __call__(self, function, *args, **keywords):
        """In the place of `torch.utils.checkpoint.checkpoint`, whose inputs our hooks see."""
        with saved_tensors_hooks(self.pack, self.unpack):
            return checkpoint(function, *args, use_reentrant=False, **keywords)

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> _Kept:
        if self.newest is not None:
            self.newest.release()  # a whole layer has run meanwhile: its copy is done
        self.newest = _Kept(tensor.detach(), self.newest)
        return self.newest

    @torch.no_grad()
    def unpack(self, kept: _Kept) -> Tensor:
        tensor = kept.fetch()
        if kept is self.newest:  # the last layer's; nothing will be packed after it
            self.newest = None
        kept.on_card = None
        if (before := kept.before and kept.before()) is not None:
            before.start_fetching()
        return tensor


class _Kept:
    """One tensor, on the card while it is copied and otherwise on the host."""

    def __init__(self, tensor: Tensor, before: _Kept | None) -> None:
        self.device, self.on_card = tensor.device, tensor
        self.before = None if before is None else weakref.ref(before)
        with _beside(tensor.device) as done:
            self.host = to_host(tensor)
        self.done = done

    def release(self) -> None:
        self._wait()
        self.on_card = None

    def start_fetching(self) -> None:
        if self.on_card is None:
            self.on_card = torch.empty_like(self.host, device=self.device)
            with _beside(self.device) as done:
                self.on_card.copy_(self.host, non_blocking=True)
            self.done = done

    def fetch(self) -> Tensor:
        self.start_fetching()
        self._wait()
        return self.on_card

    def _wait(self) -> None:
        """Let what comes next on the card wait for the copy; nobody waits on the host."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


class _beside:
    """Inside, copies go to the device's second stream, after what is queued so far; gives an event of their end."""

    streams: dict[torch.device, torch.cuda.Stream] = {}

    def __init__(self, device: torch.device) -> None:
        self.device, self.event = device, None

    def __enter__(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        if self.device not in self.streams:
            self.streams[self.device] = torch.cuda.Stream(self.device)
        stream = self.streams[self.device]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self.event, self.context = torch.cuda.Event(), torch.cuda.stream(stream)
        self.context.__enter__()
        return self.event

    def __exit__(self, *exc) -> None:
        if self.event is not None:
            self.event.record()
            self.context.__exit__(*exc)


def offload_checkpoints(model) -> None:
    """Let the model's checkpointed layers keep their inputs on the host (after `activation_checkpointing_enable`).

    >>> model.activation_checkpointing_enable(); offload_checkpoints(model)       # doctest: +SKIP
    """
    keeper = CheckpointOffload()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = keeper


@torch.no_grad()
def stream_layers(model) -> None:
    """Keep a frozen model's decoder layers on the host; each comes to the card while it runs, and goes after.

    >>> stream_layers(reference)                                                  # doctest: +SKIP

    Embeddings, the last norm and the output layer stay on the card.
    """
    for layer in model.get_decoder().layers:
        parameters = list(layer.parameters())
        device, kept = parameters[0].device, [to_host(parameter) for parameter in parameters]
        layer.register_forward_pre_hook(partial(_bring, parameters, kept, device))
        layer.register_forward_hook(partial(_leave, parameters, kept))
        _leave(parameters, kept)


def _bring(parameters, kept, device, *_) -> None:
    for parameter, host in zip(parameters, kept, strict=True):
        parameter.data = torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def _leave(parameters, kept, *_) -> None:
    for parameter, host in zip(parameters, kept, strict=True):
        parameter.data = host
