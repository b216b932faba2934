"""Make the tiny model of data/tiny/: `python scripts/warm_up_tiny.py` (about 10 s on one core).

A character-level Llama of 109,888 parameters is taught additions by plain supervised learning, only until it
gets a third to a half of them right: enough to be rewarded now and then, and with something left for GRPO to
teach.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from grpo_lab import tasks  # noqa: E402
from grpo_lab.grpo.train import evaluate  # noqa: E402

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*()=,:"
# A user's turn ends in "=", an assistant's in <eos>: a chat reads "12+30=42<eos>", like the plain prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}={% endif %}{% endfor %}"
)

SEED = 7
LEARNING_RATE = 3e-3
BATCH_SIZE = 128
WARM_UP_STEPS = 50
STOP_AT = (
    0.2  # validation accuracy; it rises from a tenth to a half within 50 steps, so a step count won't do
)
ANNEAL_STEPS = 20  # from there, the learning rate falls to 0
MAX_STEPS = 600
CHECK_EVERY = 10
ANSWER_TOKENS = 3  # two digits and <eos>


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, padded on the left."""
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate((*SPECIAL, *CHARACTERS))}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = SEED) -> LlamaForCausalLM:
    """109,888 parameters, from random numbers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=192,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[dict]) -> dict[str, torch.Tensor]:
    """Problems with their answers as model inputs (N, T); labels are -100 on all but the answer and <eos>."""
    batch = tokenizer(
        [p["prompt"] + p["answer"] + "<eos>" for p in problems], return_tensors="pt", padding=True
    )
    answer_lengths = torch.tensor([len(p["answer"]) + 1 for p in problems])
    width = batch.input_ids.shape[1]
    is_prompt = torch.arange(width) < (width - answer_lengths)[:, None]
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": (batch.attention_mask.cumsum(1) - 1).clamp(min=0),
        "labels": batch.input_ids.masked_fill(is_prompt, -100),
    }


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rows: dict[str, torch.Tensor]) -> float:
    labels = rows["labels"]
    logits = model(**{key: value for key, value in rows.items() if key != "labels"}).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def warm_up(seed: int = SEED, stop_at: float = STOP_AT, max_steps: int = MAX_STEPS):
    """Train until the validation accuracy reaches `stop_at`, then anneal; return model, tokenizer, steps."""
    tokenizer, task = make_tokenizer(), tasks.get("addition")
    model = make_model(tokenizer, seed)
    data, validation = encode(tokenizer, task.prompts("train")), task.prompts("validation")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    anneal_from = None
    for count in range(max_steps):
        factor = min(1.0, (count + 1) / WARM_UP_STEPS)
        if anneal_from is not None:
            factor = 1 - (count - anneal_from) / ANNEAL_STEPS
            if factor <= 0:
                return model, tokenizer, count
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        chosen = torch.randint(len(data["labels"]), (BATCH_SIZE,), generator=generator)
        loss = step(model, optimizer, {key: value[chosen] for key, value in data.items()})
        if anneal_from is None and count % CHECK_EVERY == CHECK_EVERY - 1:
            accuracy = evaluate(
                model, tokenizer, validation, task.reward_funcs, max_completion_length=ANSWER_TOKENS
            )
            print(f"step {count + 1:4d}  loss {loss:.3f}  validation {accuracy:.3f}", flush=True)
            if accuracy >= stop_at:
                anneal_from = count + 1
    return model, tokenizer, max_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "tiny")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in another order round differently, and the steps taken may then differ
    start = time.perf_counter()
    model, tokenizer, steps = warm_up(options.seed)
    seconds, task = time.perf_counter() - start, tasks.get("addition")
    scores = {
        split: evaluate(
            model, tokenizer, task.prompts(split), task.reward_funcs, max_completion_length=ANSWER_TOKENS
        )
        for split in ("validation", "test")
    }
    if not 1 / 3 <= scores["validation"] <= 1 / 2:
        raise SystemExit(
            f"validation accuracy {scores['validation']:.3f} is not between a third and a half: "
            "nothing written; try another --seed"
        )
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    digest = hashlib.sha256((options.folder / "model.safetensors").read_bytes()).hexdigest()
    print(
        f"{steps} steps, {seconds:.0f} s; greedy accuracy: "
        + ", ".join(f"{k} {v:.3f}" for k, v in scores.items())
    )
    print(f"{options.folder / 'model.safetensors'}: sha256 {digest}")


if __name__ == "__main__":
    main()
