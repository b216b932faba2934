"""Rollouts: batched generation with a KV cache, in parts that can be read, and simulated, one by one.

Prompts are padded on the left, so that every row's last prompt token sits in the last column and one decode
step serves all rows; completions are padded on the right. As in transformers, positions count real tokens
only, the cache is a `DynamicCache` that grows by concatenation, and a row that has ended goes on as padding
until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

TokenIds = int | Sequence[int] | None


@contextmanager
def generation_mode(model, autocast: str | None = None) -> Iterator[None]:
    """Eval mode, KV cache on, activation checkpointing off, no gradients; all of it restored on the way out.

    >>> with generation_mode(model):                                             # doctest: +SKIP
    ...     logits, cache = prefill(model, prompt_ids, prompt_mask)

    Checkpointed layers drop the cache, which makes generation slow or wrong; hence the switch. `autocast` is
    None, "bfloat16" or "float16".
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    checkpointed = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    use_cache = getattr(model.config, "use_cache", None)
    try:
        model.eval()
        model.config.use_cache = True
        for module in checkpointed:
            module.gradient_checkpointing = False
        with torch.no_grad(), autocast_context(model, autocast):
            yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for module in checkpointed:
            module.gradient_checkpointing = True
        model.config.use_cache = use_cache


def autocast_context(model, dtype: str | None):
    """`torch.autocast` on the model's device, or nothing for None."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=getattr(torch, dtype))


def prefill(model, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, object]:
    """The prompts' forward: logits (B, V) after each last token, and the KV cache that it filled.

    >>> logits, cache = prefill(model, prompt_ids, prompt_mask)                   # doctest: +SKIP
    """
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    output = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                   use_cache=True, logits_to_keep=1)  # fmt: skip
    return output.logits[:, -1], output.cache


def decode(model, token_ids: Tensor, attention_mask: Tensor, cache) -> Tensor:
    """One token a row, (B, 1), on top of the cache, which grows by one: logits (B, V).

    >>> logits = decode(model, token_ids, attention_mask, cache)                  # doctest: +SKIP

    `attention_mask` (B, T) covers the cached tokens and the new one.
    """
    position_ids = attention_mask.sum(-1, keepdim=True) - 1
    output = model(input_ids=token_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                   use_cache=True, logits_to_keep=1)  # fmt: skip
    return output.logits[:, -1]


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """One token a row from logits (B, V), as (B,); temperature 0 takes the likeliest.

    >>> sample(torch.tensor([[0.0, 5.0, 1.0]]), temperature=0)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def mask_after_eos(completion_ids: Tensor, eos_token_id: TokenIds) -> Tensor:
    """1 up to and with the first end token, 0 after it, for completions (B, C).

    >>> mask_after_eos(torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8]]), eos_token_id=2)
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 1]])
    """
    ended = is_eos(completion_ids, eos_token_id).long()
    return ((ended.cumsum(1) - ended) == 0).long()


def is_eos(token_ids: Tensor, eos_token_id: TokenIds) -> Tensor:
    """Where a token ends a completion: bool, of the same shape. A model has one end token, many or none."""
    ids = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id or ()
    result = torch.zeros_like(token_ids, dtype=torch.bool)
    for token in ids:
        result = result | (token_ids == token)
    return result


def generate(
    model, prompt_ids: Tensor, prompt_mask: Tensor, *, max_completion_length: int, eos_token_id: TokenIds,
    pad_token_id: int, temperature: float = 1.0, batch_size: int | None = None, num_return_sequences: int = 1,
    autocast: str | None = None, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sample a completion for each prompt row (B, P): ids and mask, (B, C) each, with C the longest's length.

    >>> ids, mask = generate(model, prompt_ids, prompt_mask, max_completion_length=8,
    ...                      eos_token_id=2, pad_token_id=0, temperature=0)        # doctest: +SKIP

    `batch_size` sequences are generated at once (None: all). With `num_return_sequences` n, each prompt runs
    through the model once and its cache is fanned out to n neighbouring rows, B·n rows in all.
    """
    fan_out = num_return_sequences
    if batch_size is not None and batch_size % fan_out:  # a chunk would split a group: no fanning out
        prompt_ids, prompt_mask = (x.repeat_interleave(fan_out, 0) for x in (prompt_ids, prompt_mask))
        fan_out = 1
    rows = len(prompt_ids) if batch_size is None else batch_size // fan_out

    def chunk(ids: Tensor, mask: Tensor) -> Tensor:
        logits, cache = prefill(model, ids, mask)
        if fan_out > 1:
            cache.batch_repeat_interleave(fan_out)
            logits, mask = logits.repeat_interleave(fan_out, 0), mask.repeat_interleave(fan_out, 0)
        length = mask.shape[1]
        mask = F.pad(mask, (0, max_completion_length), value=1)
        finished = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
        tokens: list[Tensor] = []
        while True:
            tokens.append(sample(logits, temperature, generator).masked_fill(finished, pad_token_id))
            finished = finished | is_eos(tokens[-1], eos_token_id)
            if len(tokens) == max_completion_length or finished.all():
                return torch.stack(tokens, dim=1)
            logits = decode(model, tokens[-1][:, None], mask[:, : length + len(tokens)], cache)

    with generation_mode(model, autocast):
        parts = [chunk(*both) for both in zip(prompt_ids.split(rows), prompt_mask.split(rows), strict=True)]
    longest = max(part.shape[1] for part in parts)
    padded = [F.pad(part, (0, longest - part.shape[1]), value=pad_token_id) for part in parts]
    completion_ids = torch.cat(padded)
    return completion_ids, mask_after_eos(completion_ids, eos_token_id)


def special_tokens(tokenizer) -> dict:
    """`eos_token_id` and `pad_token_id` of a tokenizer; the first stands in where there is no second."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad}


def encode_prompts(
    tokenizer, prompts: Sequence[dict], *, max_prompt_length: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokenize each row's "prompt", a text or chat messages, padded on the left: ids and mask, (B, P) each.

    >>> ids, mask = encode_prompts(tokenizer, [{"prompt": "1+1="}, {"prompt": "12+7="}])     # doctest: +SKIP

    ValueError for a prompt longer than `max_prompt_length` tokens: cutting it would ask another question.
    """
    texts = [row["prompt"] for row in prompts]
    if isinstance(texts[0], str):
        rows = tokenizer(texts)["input_ids"]
    else:
        rows = tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=True,
                                             return_dict=True)["input_ids"]  # fmt: skip
    width = max(len(row) for row in rows)
    if max_prompt_length is not None and width > max_prompt_length:
        text = repr(next(text for text, row in zip(texts, rows, strict=True) if len(row) == width))
        text = text if len(text) <= 60 else text[:57] + "..."
        raise ValueError(f"max_prompt_length={max_prompt_length} is shorter than the prompt {text}, which "
                         f"has {width} tokens: raise max_prompt_length to at least {width}, or leave out "
                         "longer prompts.")  # fmt: skip
    pad = special_tokens(tokenizer)["pad_token_id"]
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def reward_completions(
    reward_funcs: Sequence[Callable], tokenizer, prompts: Sequence[dict], completion_ids: Tensor,
    completion_mask: Tensor,
) -> list[float]:  # fmt: skip
    """The sum of the rewards of each completion, whose prompt is the row of `prompts` at the same place.

    >>> reward_completions(task.reward_funcs, tokenizer, prompts, ids, mask)      # doctest: +SKIP
    [1.0, 0.0]

    As in TRL, a function gets the completions as texts (as chat messages for a chat prompt), and the prompts'
    other columns by name. ValueError, naming the function, for one that raises or returns something unusable.
    """
    from ..tasks import call_rewards

    lengths = completion_mask.sum(1).tolist()
    ids = [row[:length] for row, length in zip(completion_ids.tolist(), lengths, strict=True)]
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if not isinstance(prompts[0]["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    names = [name for name in prompts[0] if name not in ("prompt", "completion", "completion_ids")]
    columns = {name: [row[name] for row in prompts] for name in names}
    return call_rewards(reward_funcs, [row["prompt"] for row in prompts], completions,
                        {**columns, "completion_ids": ids})  # fmt: skip
