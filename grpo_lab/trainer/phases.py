"""The phases of a TRL training step, as `track` or a `VirtualGPU` names them.

>>> from grpo_lab import track
>>> with track() as memory, phases(trainer, memory):                            # doctest: +SKIP
...     trainer.train()
>>> memory.report().phases                                                      # doctest: +SKIP

`phases` looks into the trainer: rollout, old and reference log-probs, forward, backward, optimizer.
:class:`PhaseCallback` is for where a callback is all one can add; it tells the optimizer's step from the rest.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from transformers import TrainerCallback

from .generate import _set

BEFORE_STEP = "rollout, forward, backward"


class PhaseCallback(TrainerCallback):
    """``trainer.add_callback(PhaseCallback(memory))``: phases "rollout, forward, backward" and "optimizer" a step.

    >>> with track() as memory:                                                 # doctest: +SKIP
    ...     trainer.add_callback(PhaseCallback(memory))
    ...     trainer.train()

    ``memory`` is what `track` or a `VirtualGPU` gives. A callback hears of no more than this, whatever the trainer:
    gradients are clipped before it hears of the optimizer, and belong to the first. Works with any transformers
    trainer.
    """

    def __init__(self, memory):
        self.memory, self._open = memory, ExitStack()

    def _enter(self, name: str) -> None:
        self._open.close()
        self._open.enter_context(self.memory.phase(name))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._open.close()                              # of a training that ended in an error
        if model is not None and hasattr(self.memory, "watch"):
            self.memory.watch(model)

    def on_step_begin(self, args, state, control, **kwargs):
        self._enter(BEFORE_STEP)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._enter("optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._open.close()

    def on_train_end(self, args, state, control, **kwargs):
        self._open.close()


@contextmanager
def phases(trainer, memory) -> Iterator[None]:
    """Inside, ``trainer.train()`` of a `trl.GRPOTrainer` runs in named phases; the trainer is as before afterwards.

    ``memory`` is what `track` or a `VirtualGPU` gives. The optimizer's phase has the clipping of gradients in it.
    """
    phase = memory.phase
    callback = _OptimizerPhase(phase)

    def scoring(call: Callable):
        def run(model, *args, **kwargs):
            if "forward" in callback.inside:            # of compute_loss
                return call(model, *args, **kwargs)
            with phase("reference log-probs" if _is_reference(trainer, model) else "old log-probs"):
                return call(model, *args, **kwargs)
        return run

    def within(name: str, call: Callable):
        def run(*args, **kwargs):
            callback.inside.append(name)
            try:
                with phase(name):
                    return call(*args, **kwargs)
            finally:
                callback.inside.pop()
        return run

    with ExitStack() as stack:
        for thing, name, phase_name in ((trainer, "_generate", "rollout"), (trainer, "compute_loss", "forward"),
                                        (trainer.accelerator, "backward", "backward"),
                                        (trainer, "_clip_grad_norm", "optimizer")):
            stack.enter_context(_set(thing, name, within(phase_name, getattr(thing, name))))
        name = "_get_per_token_logps_and_entropies"
        stack.enter_context(_set(trainer, name, scoring(getattr(trainer, name))))
        trainer.add_callback(callback)
        try:
            yield
        finally:
            trainer.remove_callback(callback)
            callback.open.close()


class _OptimizerPhase(TrainerCallback):
    def __init__(self, phase: Callable):
        self.phase, self.open, self.inside = phase, ExitStack(), []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.open.enter_context(self.phase("optimizer"))

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.open.close()


def _is_reference(trainer, model) -> bool:
    """Whether log-probs of ``model`` are the reference's: another model, or the policy without its adapter."""
    if model is getattr(trainer, "ref_model", None):
        return True
    layers = [part for part in model.modules() if hasattr(part, "disable_adapters") and hasattr(part, "base_layer")]
    return bool(layers) and (layers[0].disable_adapters or "ref" in layers[0].active_adapters)
