"""What a model's steps read and multiply, from its config.json: with it limits of a machine become times. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.plan_rates import ModelSize
from engine.config_values import ModelError
from engine.model_config import ModelConfig, read_model_config

_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


def read_model_size(model: Path, dtype: str = "auto") -> ModelSize:
    """Of a model directory. ValueError says in one sentence what is wrong."""
    try:
        config = read_model_config(model)
        return model_size(config, _BYTES[config.resolve_dtype(dtype)])
    except ModelError as error:
        raise ValueError(f"--model {model}: {error}") from None


def model_size(config: ModelConfig, itemsize: int) -> ModelSize:
    """`itemsize`: bytes of a number, of weights and KV alike. A step reads each byte once; an addition is an operation, too."""
    heads_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads_width + 2 * kv_width + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    weights = config.num_layers * layer + head
    return ModelSize(
        weight_bytes=itemsize * weights,
        token_bytes=itemsize * config.num_layers * 2 * kv_width,
        layer_operations=2 * config.num_layers * layer,
        head_operations=2 * head,
        pair_operations=4 * config.num_layers * heads_width,
    )
