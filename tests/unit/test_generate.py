"""`simulate_generate` and `few_tokens` against transformers' own `generate`, run token by token on real tensors."""
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo_lab.trainer.generate import generate_phases, simulate_generate
from grpo_lab.memory import track

SHAPE = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE), "qwen2": Qwen2Config(**SHAPE), "qwen3": Qwen3Config(**SHAPE),
    "llama, a head each": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "mistral, window 16": MistralConfig(**SHAPE, sliding_window=16),
    "gemma3, windows of 16": Gemma3TextConfig(**SHAPE, sliding_window=16, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])}
ROWS, PROMPT = 4, 24


def make(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def token_by_token(model, new: int, padded: bool = True, **options):
    """The report of a real `generate`, all tokens of it."""
    with track(existing=False) as memory, generate_phases(model, memory.phase):
        memory.watch(model)
        ids = torch.randint(3, 500, (ROWS, PROMPT))
        mask = torch.ones_like(ids)
        mask[0, :5] = 0 if padded else 1
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **options)
    assert out.shape == (ROWS, PROMPT + new)
    return memory.report()


def simulated(model, new: int, **options):
    return simulate_generate(model, gpu="RTX 3080 Laptop 8GB", batch_size=ROWS, prompt_length=PROMPT, kernels="cpu",
                             max_new_tokens=new, min_new_tokens=new, **options)


def same(model, new: int, **options) -> None:
    real, fake = token_by_token(model, new, **options), simulated(model, new, **options)
    for phase in ("prefill", "decode"):
        assert fake.phases.loc[phase, "peak_allocated"] == real.phases.loc[phase, "peak_allocated"], phase
    assert fake.timeline["KV cache"].max() == real.timeline["KV cache"].max() > 0


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_peaks_are_those_of_a_run_token_by_token(name, cache):
    """Grown by concatenation, in windows, or allocated in full: byte for byte, in the prefill and while decoding."""
    same(make(CONFIGS[name]), 20, do_sample=True, cache_implementation=cache, disable_compile=True)


@pytest.mark.parametrize("options", [
    {"do_sample": False}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
    {"top_k": 0, "top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.7}, {"use_cache": False}])
def test_what_logits_processors_make_is_counted(options):
    model = make(CONFIGS["llama"])
    if options.get("use_cache", True):
        same(model, 12, **{"do_sample": True} | options)
    else:
        real, fake = token_by_token(model, 12, **options), simulated(model, 12, **options)
        assert fake.phases.loc["decode", "peak_allocated"] == real.phases.loc["decode", "peak_allocated"]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 17])
def test_any_number_of_tokens(new):
    """One token needs no decode step; the tokens between the first and the last two are the ones left out."""
    same(make(CONFIGS["mistral, window 16"]), new, do_sample=True)


def test_equal_prompts_have_no_mask():
    same(make(CONFIGS["llama"]), 8, do_sample=True, padded=False)


def test_16_bit_weights_and_32_bit_logits():
    same(make(CONFIGS["qwen3"], torch.bfloat16), 16, do_sample=True)


def test_every_token_and_few_tokens_agree():
    model = make(CONFIGS["gemma3, windows of 16"])
    few, all_ = simulated(model, 24, do_sample=True), simulated(model, 24, do_sample=True, every_token=True)
    assert few.phases["peak_allocated"].equals(all_.phases["peak_allocated"])
    assert len(few.timeline) < len(all_.timeline) / 3


def test_the_cache_has_the_bytes_that_arithmetic_gives_it():
    report = simulate_generate("Qwen2.5-0.5B", gpu="RTX 3080 Laptop 8GB", batch_size=8, prompt_length=256,
                               max_new_tokens=512, do_sample=True)
    held = 8 * (256 + 512 - 1) * 24 * 2 * 2 * 64 * 2            # rows, tokens, layers, K and V, heads, width, bytes
    assert held <= report.timeline["KV cache"].max() <= 1.15 * held     # blocks keep rests of up to 1 MiB


def test_the_model_is_as_it_was():
    model = make(CONFIGS["llama"])
    before, attributes = dict(model.named_parameters()), set(vars(model))
    simulated(model, 4, cache_implementation="static", disable_compile=True)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert set(vars(model)) == attributes
    assert model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("options, words", [
    ({"num_beams": 2}, "num_beams"), ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'")])
def test_what_cannot_be_simulated_is_said(options, words):
    with pytest.raises(NotImplementedError, match=words):
        simulated(make(CONFIGS["llama"]), 4, **options)
