"""What transformers' own `generate` does to memory, without generating every token.

>>> report = simulate_generate("SmolLM2-135M", gpu="RTX 3080 Laptop 8GB", batch_size=4, prompt_length=64,
...                            max_new_tokens=100, do_sample=True, top_p=0.9)
>>> list(report.phases.index), int(report.categories.loc["KV cache", "bytes"]) // 2**20
(['load', 'prefill', 'decode'], 14)

The real `generate` runs, with its cache, its logits processors and its masks. Between the first token and the last two
nothing new happens: each step makes the cache one token longer, so it is made as long at once (:func:`grow`). The last
step holds what the step before it left, hence two of them. (With sliding windows the first decode step runs too: a
prompt longer than the window stays in memory until then.)
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..memory import MemoryReport, VirtualGPU
from ..memory.swap import on_card

LAST = 2                                # steps that run at the end


def simulate_generate(model, *, gpu: str | int, batch_size: int, prompt_length: int, dtype: str = "bfloat16",
                      padded: bool = True, every_token: bool = False, kernels: str = "cuda",
                      **generate_kwargs) -> MemoryReport:
    """What ``model.generate(...)`` would do to a card, without the card: phases "load", "prefill" and "decode".

    ``model``: a name as :func:`grpo_lab.models.config` takes it, or a transformers model (its weights are looked at
    for their shapes only). Rows are ``batch_size`` prompts of ``prompt_length`` tokens; ``padded=False`` says that all
    are equally long, for then no attention mask is built. ``generate_kwargs`` go to ``generate``: ``max_new_tokens``
    (all are generated), ``do_sample``, ``top_k``, ``cache_implementation="static"``, ``generation_config`` and so on.
    ``every_token=True`` runs each step: slow, and the same peaks.
    """
    with VirtualGPU(gpu, enforce=False, kernels=kernels) as card, ExitStack() as stack:
        if isinstance(model, torch.nn.Module):
            with card.phase("load"):
                stack.enter_context(on_card(card, model))
        else:
            model = card.load(model, dtype=dtype)
        stack.enter_context(few_tokens(model, padded=padded, every_token=every_token))
        stack.enter_context(generate_phases(model, card.phase))
        ids = torch.ones(batch_size, prompt_length, dtype=torch.long)
        model.generate(ids, attention_mask=torch.ones_like(ids), **generate_kwargs)
        return card.report()


@contextmanager
def few_tokens(model, *, padded: bool = True, every_token: bool = False) -> Iterator[None]:
    """Inside, ``model.generate`` on fake tensors runs to its full length, by way of the first and the last tokens.

    Fake tokens have no value, so nothing ends early. ``model`` may be a PEFT wrapper.
    """
    generate = model.generate

    def run(*args, **kwargs):
        return generate(*args, custom_generate=_Decoding(padded, every_token), **kwargs)

    with _set(model, "generate", run):
        yield


@contextmanager
def generate_phases(model, phase: Callable) -> Iterator[None]:
    """Inside, ``model.generate`` runs in phases "prefill" (the prompts' forward) and "decode" (all else).

    ``phase`` is that of a `VirtualGPU` or of `track`, so that both can be compared.
    """
    generate, inner = model.generate, _plain(model)
    prefill = inner._prefill
    with ExitStack() as decode:

        def first(*args, **kwargs):
            decode.close()
            with phase("prefill"):
                out = prefill(*args, **kwargs)
            decode.enter_context(phase("decode"))
            return out

        def run(*args, **kwargs):
            with decode:
                return generate(*args, **kwargs)

        with _set(model, "generate", run), _set(inner, "_prefill", first):
            yield


class _Decoding:
    """What ``generate`` calls in the place of ``_sample``, its loop over the tokens: that very loop, shortened."""

    def __init__(self, padded: bool, every_token: bool):
        self.padded, self.every_token = padded, every_token

    def __call__(self, model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None,
                 synced_gpus=False, streamer=None, **kwargs):
        _check(model, generation_config)
        steps = new = stopping_criteria.max_length - input_ids.shape[1]
        sliding = any(getattr(layer, "is_sliding", False) for layer in getattr(kwargs.get("cache"), "layers", ()))
        first = 2 if sliding else 1
        if not self.every_token:
            steps = min(new, first + LAST)
        if not self.padded and kwargs.get("attention_mask") is not None:    # generate drops a mask that masks nothing
            generation_config._mask_length, kwargs["attention_mask"] = input_ids.shape[1], None
        update, state = model._update_model_kwargs_for_generation, {"step": 0}

        def keep(outputs, model_kwargs, **options):
            state["kwargs"] = update(outputs, model_kwargs, **options)
            return state["kwargs"]

        def skip(ids: torch.Tensor) -> None:            # at the end of a step, as if more had gone by
            state["step"] += 1
            if state["step"] == first and (gone := new - steps):
                update({}, state["kwargs"], num_new_tokens=gone)
                grow(state["kwargs"].get("cache"), gone)
                ids.data = torch.cat([ids, ids.new_ones(len(ids), gone)], dim=1)

        criteria = _Noticing(stopping_criteria)
        criteria.notice = skip
        with _set(model, "_update_model_kwargs_for_generation", keep), \
                _set(model, "_has_unfinished_sequences", lambda *_, **__: state["step"] < steps):
            return type(model)._sample(model, input_ids, logits_processor=logits_processor,
                                       stopping_criteria=criteria, generation_config=generation_config,
                                       synced_gpus=False, streamer=None, **kwargs)


class _Noticing(list):
    """Stopping criteria that tell when they are asked: the loop does it once a token, with the ids so far."""

    notice: Callable[[torch.Tensor], None]

    def __call__(self, input_ids, scores, **kwargs):
        from transformers import StoppingCriteriaList
        done = StoppingCriteriaList.__call__(self, input_ids, scores, **kwargs)
        self.notice(input_ids)
        return done

    @property
    def max_length(self) -> int | None:
        from transformers import StoppingCriteriaList
        return StoppingCriteriaList.max_length.fget(self)


def grow(cache, tokens: int) -> None:
    """Makes a transformers cache as long as ``tokens`` more decode steps would.

    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> _ = cache.update(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4), 0)
    >>> grow(cache, 3); cache.layers[0].keys.shape
    torch.Size([2, 1, 8, 4])

    A dynamic layer grows by concatenation, into a new tensor; a sliding one no longer than its window, whose last
    token it keeps as part of the same storage; a static one was allocated in full (transformers/cache_utils.py).
    """
    for layer in getattr(cache, "layers", ()) if tokens > 0 else ():
        kind = type(layer).__name__
        if kind == "DynamicLayer":
            _lengthen(layer, layer.keys.shape[-2] + tokens)
        elif kind == "DynamicSlidingWindowLayer":
            layer.cumulative_length += tokens
            _lengthen(layer, min(layer.cumulative_length, layer.sliding_window))
            layer.keys, layer.values = (x[:, :, -layer.sliding_window + 1:] for x in (layer.keys, layer.values))
        elif kind in ("StaticLayer", "StaticSlidingWindowLayer"):
            layer.cumulative_length.add_(tokens)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int += tokens
        else:
            raise NotImplementedError(f"a cache layer of type {kind} can't be lengthened without running every token: "
                                      "pass every_token=True")


def _lengthen(layer, length: int) -> None:
    for name in ("keys", "values"):
        like = getattr(layer, name)
        shape = (*like.shape[:-2], length, like.shape[-1])
        like = like.new_empty(0)
        setattr(layer, name, None)              # the old one goes first: what meets in a step, meets in the last ones
        setattr(layer, name, like.new_empty(shape))


def _check(model, generation_config) -> None:
    if generation_config.num_beams > 1 or generation_config.return_dict_in_generate:
        raise NotImplementedError("generate with num_beams > 1 or return_dict_in_generate=True can't be simulated: "
                                  "use sampling or greedy decoding that returns token ids")
    if generation_config.cache_implementation in ("quantized", "offloaded", "offloaded_static"):
        kind = generation_config.cache_implementation
        raise NotImplementedError(f"cache_implementation={kind!r} can't be simulated: use None (a dynamic cache) or "
                                  "'static'")
    for name in ("_sample", "_prefill", "_has_unfinished_sequences", "_update_model_kwargs_for_generation"):
        if not hasattr(model, name):
            raise RuntimeError(f"transformers' generate has no {name} any more: grpo_lab needs an update, "
                               "or transformers the version that it pins")


def _plain(model):
    """The transformers model, out of its PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _set(thing, name: str, value) -> Iterator[None]:
    """An attribute of one object, for a while; what its class has shows again afterwards."""
    had, old = name in vars(thing), vars(thing).get(name)
    vars(thing)[name] = value
    try:
        yield
    finally:
        if had:
            vars(thing)[name] = old
        else:
            vars(thing).pop(name, None)
