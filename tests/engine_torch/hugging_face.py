"""Model directories of every served family as transformers itself writes them, small and random, in many variants."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 260
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Variant:
    """One way that checkpoints of a family come."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "10GB"  # what save_pretrained cuts at


VARIANTS = {
    "llama": Variant("llama"),
    "llama-3.2": Variant(
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 5e5},
        },
    ),
    "llama-biases": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}, "60KB"),
    "llama-linear": Variant("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen2": Variant("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-window": Variant(
        "qwen2", {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}, "60KB"
    ),
    "qwen2.5-yarn": Variant("qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen3": Variant("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, "60KB"),
    "qwen3-layer-types": Variant(
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 70,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
    "mistral-v0.1": Variant("mistral", {"sliding_window": 50}, "60KB"),
    "mistral-v0.3": Variant(
        "mistral", {"sliding_window": None, "head_dim": 32, "rope_parameters": {"rope_theta": 1e6}}
    ),
}


def make_directory(variant: Variant, dtype: torch.dtype, out: Path) -> Path:
    """Write a random model of this variant with save_pretrained. Imports transformers, which takes seconds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = SIZES | {"rope_parameters": {"rope_theta": 1e4}} | variant.settings
    settings["rope_parameters"] = {"rope_type": "default"} | settings["rope_parameters"]
    config = AutoConfig.for_model(variant.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(len(json.dumps(settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, is_tied=config.tie_word_embeddings, generator=generator))
    model.to(dtype).save_pretrained(out, max_shard_size=variant.shard_size)
    return out


def _draw(name: str, shape: torch.Size, is_tied: bool, generator: torch.Generator) -> torch.Tensor:
    """Weights that compute alike in fp32 and bf16: branches are quiet beside the stream that they add to.

    A tied model's last norm flips half of the signs, or every token would follow itself.
    """
    noise = torch.randn(shape, generator=generator)
    stream = 64**-0.5 if is_tied else 1.0  # of the embedding, as wide as SIZES says
    if name == "model.norm.weight" and is_tied:
        return noise.sign()
    if "norm" in name:
        return 1 + 0.1 * noise
    if "embed" in name:
        return stream * noise
    gain = 0.35 * stream if "o_proj" in name or "down_proj" in name else 0.9
    return gain * noise * (0.3 if name.endswith("bias") else shape[-1] ** -0.5)


def write_like_transformers_4(model_dir: Path) -> None:
    """Say the same config.json with the keys of the models that are on the hub since before transformers 5."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] != "qwen3" or config.get("layer_types") == ["full_attention"] * 3:
        config.pop("layer_types", None)
    path.write_text(json.dumps(config))
