"""The shape of a decoder, and how many parameters it has, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The dense decoders whose parameters the closed form counts; head_dim is the class's default,
# 0 for hidden / heads.
_FAMILIES: dict[str, dict[str, int]] = {
    "llama": {"head_dim": 0},
    "mistral": {"head_dim": 0},
    "qwen2": {"head_dim": 0},
    "qwen3": {"head_dim": 128},
}


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder, from its `config.json`.

    >>> from grpo_lab import models
    >>> qwen = models.architecture("Qwen2.5-1.5B")
    >>> qwen.num_hidden_layers, qwen.num_key_value_heads, qwen.head_dim, qwen.parameters
    (28, 2, 128, 1543714304)

    The fields are named as in `config.json`; `config` holds that file's facts whole. Counts are numbers of
    parameters (times the bytes of a dtype gives bytes); weights shared by embedding and head count once.
    """

    name: str
    hub_id: str | None
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    config: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str, hub_id: str | None = None) -> Architecture:
        """Read the facts of a `config.json`, given as a dict.

        Raises ValueError for a model family whose parameters grpo_lab cannot count.
        """
        kind = config.get("model_type")
        if kind not in _FAMILIES:
            raise ValueError(
                f"model={name!r} has model_type {kind!r}; grpo_lab knows the shapes of "
                + ", ".join(sorted(_FAMILIES))
            )
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise ValueError(f"model={name!r}: its config.json lacks {', '.join(missing)} (whole numbers)")
        heads = config["num_attention_heads"]
        return cls(
            name=name,
            hub_id=hub_id,
            model_type=kind,
            **{key: config[key] for key in _REQUIRED},
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _FAMILIES[kind]["head_dim"] or config["hidden_size"] // heads,
            max_position_embeddings=config.get("max_position_embeddings", 0),
            # What each transformers class assumes where its config.json is silent.
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind == "qwen3",
            config=config,
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers inside the decoder layers: what LoRA adapts and NF4 quantizes."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        return self.num_hidden_layers * (h * q + 2 * h * kv + q * h + 3 * h * self.intermediate_size)

    @property
    def bias_parameters(self) -> int:
        """Biases of the linear layers. Qwen2 has them on q, k and v; `attention_bias` adds them on o too."""
        if not self.attention_bias:
            bias = 0
        else:
            d = self.head_dim
            bias = (self.num_attention_heads + 2 * self.num_key_value_heads) * d
            bias += 0 if self.model_type == "qwen2" else self.hidden_size
        if self.config.get("mlp_bias"):
            bias += 2 * self.intermediate_size + self.hidden_size
        return self.num_hidden_layers * bias

    @property
    def norm_parameters(self) -> int:
        """Scales of the RMS norms: two a layer, one at the end, and Qwen3's two per head size."""
        per_layer = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_hidden_layers * per_layer + self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The token embedding, and the language-model head where it is a weight of its own."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return (
            self.embedding_parameters + self.linear_parameters + self.bias_parameters + self.norm_parameters
        )
