"""A random two-layer Llama and a character tokenizer, made in milliseconds, to test `grpo_lab.grpo` on."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = 0, 1
LETTERS = "0123456789+-*=abcdefghijklmnopqrstuvwxyz .,:"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, padded on the left."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2}
    vocabulary |= {letter: 3 + i for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                   unk_token="<unk>", padding_side="left")  # fmt: skip


def make_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Weights large enough that the model has opinions: with the usual 0.02 its distributions are flat."""
    shape = dict(vocab_size=3 + len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                 tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
                 initializer_range=0.2)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**shape | changes))


def make_batch(rows: int, prompt: int, completion: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random ids, ragged: prompt_ids, prompt_mask (padded on the left), completion_ids, completion_mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 3 + len(LETTERS), (rows, prompt + completion), generator=generator)
    lengths = torch.randint(1, prompt + 1, (rows, 1), generator=generator)
    prompt_mask = (torch.arange(prompt) >= prompt - lengths).long()
    lengths = torch.randint(1, completion + 1, (rows, 1), generator=generator)
    completion_mask = (torch.arange(completion) < lengths).long()
    return ids[:, :prompt] * prompt_mask, prompt_mask, ids[:, prompt:] * completion_mask, completion_mask
