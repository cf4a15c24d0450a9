"""One decoder for the Llama family: embedding, layers, final norm and lm_head, all options by configuration.

Covers RMSNorm pre-norm decoders with SwiGLU, grouped queries, rotary embedding, and per model QKV/O/MLP biases, QK
norm, sliding windows, layers without rotary embedding, and tied embeddings. Q, K and V are one linear, gate and up
another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llm42.kernels import Kernels, KVPool, KVShape, PreparedLinear, RowBatch
from llm42.kernels.interface import DecoderLayer, DecoderStack
from llm42.model.config import ModelConfig


class Decoder:
    """The model's weights, prepared for one kernel backend.

    Args:
        config: The model.
        weights: The tensors `llm42.model.weights.load_weights` gives; emptied while they are prepared, so that no
            second copy of the model is held.
        kernels: The backend.
        max_model_len: Positions the rotary table must cover.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], kernels: Kernels, max_model_len: int
    ) -> None:
        self.config = config
        self.kernels = kernels
        embedding = weights.pop("model.embed_tokens.weight")
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._embedding = kernels.prepare_embedding(embedding)
        del embedding
        self._stack = DecoderStack(
            layers=[_prepare_layer(config, weights, kernels, index) for index in range(config.num_hidden_layers)],
            final_norm=weights.pop("model.norm.weight"),
            rope=_rope_table(config, max_model_len).to(self.device),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        if config.tie_word_embeddings:
            self._lm_head = kernels.tied_lm_head(self._embedding)
        else:
            self._lm_head = kernels.prepare_linear(weights.pop("lm_head.weight"))

    @property
    def linears(self) -> dict[str, PreparedLinear]:
        """The linear layers by name, one of each kind (all layers have the same shapes)."""
        layer = self._stack.layers[0]
        return {
            "qkv": layer.qkv,
            "o": layer.o,
            "gate_up": layer.gate_up,
            "down": layer.down,
        }

    @property
    def all_linears(self) -> list[PreparedLinear]:
        """Every linear layer of the model, the lm_head included: what a decode step reads once."""
        layers = [linear for layer in self._stack.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*layers, self._lm_head]

    @property
    def lm_head(self) -> PreparedLinear:
        """The output projection, ``[vocab, hidden]``."""
        return self._lm_head

    def new_kv_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """KV memory of the shape this model needs, zeroed."""
        config = self.config
        shape = KVShape(config.num_hidden_layers, num_blocks * block_size, config.num_key_value_heads, config.head_dim)
        return self.kernels.new_kv_pool(shape, self.dtype, self.device)

    def forward(self, token_ids: torch.Tensor, batch: RowBatch, kv: KVPool) -> torch.Tensor:
        """Run the layers over one pass and write its KV.

        Args:
            token_ids: int64 ``[rows]``; padding rows may hold any id.
            batch: Where the rows lie.
            kv: The pool that is read and written.

        Returns:
            The final hidden states after the last norm, ``[rows, hidden]`` in the model's dtype.
        """
        x = self.kernels.embedding(token_ids, self._embedding)
        return self.kernels.run_layers(self._stack, x, batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[rows, hidden]`` to logits ``[rows, vocab]`` in the model's dtype."""
        return self.kernels.linear(hidden, self._lm_head)


def _prepare_layer(config: ModelConfig, weights: dict[str, torch.Tensor], kernels: Kernels, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def fused(names: tuple[str, ...], *, has_bias: bool) -> PreparedLinear:
        weight = torch.cat([weights.pop(f"{prefix}{name}.weight") for name in names])
        bias = torch.cat([weights.pop(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return kernels.prepare_linear(weight, bias)

    return DecoderLayer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight"),
        qkv=fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), has_bias=config.qkv_bias),
        q_norm=weights.pop(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=weights.pop(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
        o=fused(("self_attn.o_proj",), has_bias=config.o_bias),
        post_attention_norm=weights.pop(f"{prefix}post_attention_layernorm.weight"),
        gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), has_bias=config.mlp_bias),
        down=fused(("mlp.down_proj",), has_bias=config.mlp_bias),
        window=config.sliding_windows[index],
        has_rope=config.rope_layers[index],
    )


def _rope_table(config: ModelConfig, max_model_len: int) -> torch.Tensor:
    """Cosines and sines of every position, fp32 ``[max_model_len, 2, head_dim / 2]``."""
    angles = torch.outer(torch.arange(max_model_len).float(), config.rope.inverse_frequencies(config.head_dim))
    # In fp64, so that no position's value can depend on where in the table a vector loop ends.
    angles = angles.double()
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * config.rope.attention_scaling).float()


def kv_bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV memory that one position takes in all layers together."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def element_types() -> Mapping[str, torch.dtype]:
    """The dtypes a model can be loaded in, by their configuration name."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
