"""The random models that Baton can make: their sizes, and config.json as Hugging Face writes it for them.

Not here: weights (engine/random_weights.py) and tokenizer (engine/byte_tokenizer.py). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from engine.byte_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, LEAST_VOCAB_SIZE

_DTYPE_NAMES: Final = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a random model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int  # tokens
    ties_embeddings: bool = False
    architecture: str = "LlamaForCausalLM"
    vocab_size: int = LEAST_VOCAB_SIZE
    rope_theta: float = 10_000.0
    stored_dtype: str = "fp32"  # unless asked for another: "fp32", "bf16" or "fp16"
    settings: dict[str, object] = field(default_factory=dict)  # of config.json, beside those of every family


_TINY: Final = ModelSize(
    hidden_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=256,
    max_position_embeddings=4096,
)
# As huggingface.co/meta-llama has them.
_LLAMA3_ROPE: Final[dict[str, object]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_WINDOW: Final[dict[str, object]] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}


def _tiny(architecture: str, settings: dict[str, object], head_dim: int = 16) -> ModelSize:
    return ModelSize(
        hidden_size=_TINY.hidden_size,
        num_layers=_TINY.num_layers,
        num_heads=_TINY.num_heads,
        num_kv_heads=_TINY.num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_TINY.intermediate_size,
        max_position_embeddings=_TINY.max_position_embeddings,
        architecture=architecture,
        rope_theta=1e6,
        settings=settings,
    )


SIZES: Final = MappingProxyType(
    {
        "llama-tiny": _TINY,
        "qwen2-tiny": _tiny("Qwen2ForCausalLM", _QWEN_WINDOW),
        "qwen3-tiny": _tiny("Qwen3ForCausalLM", _QWEN_WINDOW | {"attention_bias": False}, head_dim=32),
        # Short, and no multiple of a block or an attention tile: every test's prompts reach past it.
        "mistral-tiny": _tiny("MistralForCausalLM", {"sliding_window": 100}),
        # To compare with other engines: 100 million weights, a head size and groups that all of them have fast paths for.
        "llama-125m": ModelSize(
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            intermediate_size=2048,
            max_position_embeddings=4096,
            ties_embeddings=True,
            vocab_size=32000,
            stored_dtype="bf16",
        ),
        # huggingface.co/HuggingFaceTB/SmolLM2-135M
        "smollm2-135m": ModelSize(
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            max_position_embeddings=8192,
            ties_embeddings=True,
            vocab_size=49152,
            rope_theta=100_000.0,
            stored_dtype="bf16",
        ),
        # For a GPU: 2.5 and 16 GB, which bench.engine --shape need not write.
        "llama-3.2-1b": ModelSize(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            intermediate_size=8192,
            max_position_embeddings=131_072,
            ties_embeddings=True,
            vocab_size=128_256,
            rope_theta=500_000.0,
            stored_dtype="bf16",
            settings={"rope_scaling": _LLAMA3_ROPE | {"factor": 32.0}},
        ),
        "llama-3.1-8b": ModelSize(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14_336,
            max_position_embeddings=131_072,
            vocab_size=128_256,
            rope_theta=500_000.0,
            stored_dtype="bf16",
            settings={"rope_scaling": _LLAMA3_ROPE | {"factor": 8.0}},
        ),
    }
)


def config_json(size: ModelSize, dtype: str) -> dict[str, object]:
    """Give what config.json holds, for weights of dtype "fp32", "bf16" or "fp16"."""
    is_llama = size.architecture == "LlamaForCausalLM"
    return {
        "architectures": [size.architecture],
        "model_type": size.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.intermediate_size,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.max_position_embeddings,
        "tie_word_embeddings": size.ties_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": size.rope_theta,
        **({"attention_bias": False, "mlp_bias": False} if is_llama else {}),
        **size.settings,
        "bos_token_id": BEGIN_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "torch_dtype": _DTYPE_NAMES[dtype],
    }
