"""A random four-layer Llama of 31 million parameters: large enough that a byte count means something, fast to step."""
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIG = LlamaConfig(vocab_size=32000, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
                     num_attention_heads=6, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def make_llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa")
