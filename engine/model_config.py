"""What a Hugging Face model directory says about its model, read once into typed values.

Not here: weights and tokenizer. What Baton cannot run is refused by name: a model that runs with a setting silently ignored
gives wrong text, which is worse than none. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ARCHITECTURES: Final = ("LlamaForCausalLM",)
DTYPES: Final = ("fp32", "bf16")


class ModelError(ValueError):
    """The model directory cannot be used; the message is one sentence for the person who named it."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only model."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int  # tokens that the model was made for
    rms_norm_eps: float
    rope_theta: float
    ties_embeddings: bool  # the output projection is the embedding table
    stored_dtype: str  # "fp32" or "bf16": what dtype "auto" computes in
    eos_token_ids: tuple[int, ...]  # may be empty

    def resolve_dtype(self, dtype: str) -> str:
        """Turn "auto" into the directory's own dtype. Raises ModelError on any other unknown name."""
        if dtype == "auto":
            return self.stored_dtype
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is unknown: it is fp32, bf16 or auto")
        return dtype


def read_model_config(model_dir: Path) -> ModelConfig:
    """Parse config.json and generation_config.json. Raises ModelError, naming file, key and value."""
    source = _Settings("config.json", _read_object(model_dir / "config.json"))
    generation_path = model_dir / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.exists() else {}
    architecture = _architecture(source)
    _refuse_what_is_ignored(source)
    num_heads = source.count("num_attention_heads")
    num_kv_heads = source.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    hidden_size = source.count("hidden_size")
    head_dim = source.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd, which rotary embedding cannot pair")
    eos = generation.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=source.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=source.count("intermediate_size"),
        vocab_size=source.count("vocab_size"),
        max_position_embeddings=source.count("max_position_embeddings", 2048),
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(source),
        ties_embeddings=source.values.get("tie_word_embeddings") is True,
        stored_dtype=_stored_dtype(source),
        eos_token_ids=_token_ids(source.values.get("eos_token_id") if eos is None else eos),
    )


class _Settings:
    """One JSON object of settings whose values are checked as they are taken."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self.values = values

    def count(self, key: str, default: int | None = None) -> int:
        """Take a positive integer; a null counts as absent."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self._where}: {key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """Take a positive number; a null counts as absent."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self._where}: {key} is {value!r}, not a positive number")
        return float(value)


def _read_object(path: Path) -> Mapping[str, object]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a model directory has one") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is not a JSON object")
    return parsed


def _architecture(source: _Settings) -> str:
    names = source.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, not a list of one name")
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]!r} is not supported: Baton runs {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_what_is_ignored(source: _Settings) -> None:
    """Settings of Llama that change its arithmetic and that nothing here computes."""
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = source.values.get(key)
        if value is not None and value != only:
            raise ModelError(f"config.json: {key} {value!r} is not supported, only {only!r}")
    quantization = source.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"config.json: quantization {method!r} is not supported")


def _rope_theta(source: _Settings) -> float:
    """The base of the rotary frequencies: a key of its own, or inside rope_parameters since transformers 5."""
    theta = source.number("rope_theta", 10_000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = source.values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelError(f"config.json: {key} is {rope!r}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"config.json: {key} of type {kind!r} is not supported, only 'default'")
        share = rope.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor {share!r} is not supported, only 1.0")
        theta = _Settings(f"config.json: {key}", rope).number("rope_theta", theta)
    return theta


def _stored_dtype(source: _Settings) -> str:
    """fp16 computes in fp32: bf16 would drop three bits of every weight."""
    name = source.values.get("dtype", source.values.get("torch_dtype"))
    return "bf16" if name == "bfloat16" else "fp32"


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise ModelError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return tuple(values)
