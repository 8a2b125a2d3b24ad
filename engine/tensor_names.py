"""Name and shape of every tensor that a checkpoint of the served families holds.

Not here: files, and what is computed with the tensors.
"""

from __future__ import annotations

from engine.model_config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that the model needs."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if config.norms_heads:
            shapes |= {f"{prefix}.self_attn.{side}_norm.weight": (config.head_dim,) for side in "qk"}
        for name, (width_out, width_in, has_bias) in _linears(config).items():
            shapes[f"{prefix}.{name}.weight"] = (width_out, width_in)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (width_out,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Leftovers of older exporters: frequencies follow from config.json, and a tied head is the embedding."""
    frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    frequencies.add("model.rotary_emb.inv_freq")
    return frozenset(frequencies | ({"lm_head.weight"} if config.ties_embeddings else set()))


def _linears(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """A layer's linears: output width, input width, whether it has a bias."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (query_width, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv_width, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv_width, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, query_width, config.has_output_bias),
        "mlp.gate_proj": (wide, hidden, config.has_mlp_bias),
        "mlp.up_proj": (wide, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, wide, config.has_mlp_bias),
    }
