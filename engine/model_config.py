"""What a Hugging Face model directory says about its model, read once into typed values.

The families differ in few things, and each is a field here; the code that runs them asks for the field, never for the family.
Not here: weights and tokenizer. What Baton cannot run is refused by name: a model that runs with a setting silently ignored
gives wrong text, which is worse than none. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from engine.config_values import ModelError, Settings, read_settings
from engine.rope_config import RopeConfig, read_rope

DTYPES: Final = ("fp32", "bf16", "fp16")
MAX_LAYERS: Final = 10_000
MAX_HEAD_DIM: Final = 1024  # this and the next one: what the compiled kernels take
MAX_GROUP: Final = 256  # query heads that share one of KV


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers' configuration class of an architecture fills in for keys that config.json leaves out."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    norms_heads: bool = False


_FAMILIES: Final = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(max_positions=2048),
        "Qwen2ForCausalLM": _Family(max_positions=32768, num_kv_heads=32, sliding_window=4096),
        "Qwen3ForCausalLM": _Family(
            max_positions=32768, num_kv_heads=32, head_dim=128, sliding_window=4096, norms_heads=True
        ),
        "MistralForCausalLM": _Family(max_positions=131072, num_kv_heads=8, sliding_window=4096),
    }
)
ARCHITECTURES: Final = tuple(_FAMILIES)


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
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: positions that a row sees, its own included; None: all
    has_qkv_bias: bool
    has_output_bias: bool  # of attention's output projection
    has_mlp_bias: bool
    norms_heads: bool  # each head of queries and keys is normed before it is rotated
    ties_embeddings: bool  # the output projection is the embedding table
    stored_dtype: str  # "fp32" or "bf16": what dtype "auto" computes in
    eos_token_ids: tuple[int, ...]  # may be empty

    def resolve_dtype(self, dtype: str) -> str:
        """Turn "auto" into the directory's own dtype. Raises ModelError on any other unknown name."""
        if dtype == "auto":
            return self.stored_dtype
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is unknown: it is {', '.join(DTYPES)} or auto")
        return dtype


def read_model_config(model_dir: Path) -> ModelConfig:
    """Parse config.json and generation_config.json. Raises ModelError, naming file, key and value."""
    source = read_settings(model_dir / "config.json")
    architecture = _architecture(source)
    family = _FAMILIES[architecture]
    _refuse_what_is_ignored(source, architecture)
    _refuse_adapters(model_dir)
    hidden_size, num_layers = source.count("hidden_size"), source.count("num_hidden_layers", most=MAX_LAYERS)
    num_heads, num_kv_heads, head_dim = _heads(source, family, hidden_size)
    max_positions = source.count("max_position_embeddings", family.max_positions)
    rope = read_rope(source, max_positions)
    # Mistral's linears have no bias, and Qwen2's have theirs, whatever such a key says.
    has_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and source.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=source.count("intermediate_size"),
        vocab_size=source.count("vocab_size"),
        max_position_embeddings=_longest(rope, max_positions),
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(source, architecture, num_layers),
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and source.flag("mlp_bias", False),
        norms_heads=family.norms_heads,
        ties_embeddings=source.flag("tie_word_embeddings", False),
        stored_dtype=_stored_dtype(source),
        eos_token_ids=_eos_token_ids(source, model_dir),
    )


def _architecture(source: Settings) -> str:
    names = source.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, not a list of one name")
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]!r} is not supported: Baton runs {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_what_is_ignored(source: Settings, architecture: str) -> None:
    """Settings that change a model's arithmetic, or its weights, and that nothing here computes."""
    model_type = source.values.get("model_type")  # what transformers goes by
    if model_type not in (None, architecture.removesuffix("ForCausalLM").lower()):
        raise ModelError(f"config.json: model_type {model_type!r} is not that of {architecture}")
    if not source.flag("is_causal", True):
        raise ModelError("config.json: is_causal false is not supported: no row sees what comes after it")
    weights = source.values.get("transformers_weights")
    if weights is not None:
        raise ModelError(f"config.json: transformers_weights {weights!r} is not supported, only the usual names")
    activation = source.values.get("hidden_act")
    if activation not in (None, "silu"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    quantization = source.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"config.json: quantization {method!r} is not supported")


def _refuse_adapters(model_dir: Path) -> None:
    """Where peft is installed, transformers adds it to the model in the same directory."""
    if (model_dir / "adapter_config.json").exists():
        raise ModelError(
            f"{model_dir} has an adapter_config.json: LoRA is not supported, unless it is merged into the weights"
        )


def _heads(source: Settings, family: _Family, hidden_size: int) -> tuple[int, int, int]:
    """Number of query heads, of KV heads, and their size."""
    num_heads = source.count("num_attention_heads")
    is_null = "num_key_value_heads" in source.values  # to transformers an absent key is not a null one
    num_kv_heads = source.count("num_key_value_heads", num_heads if is_null else family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if source.values.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ModelError(f"config.json: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
    if num_heads // num_kv_heads > MAX_GROUP:
        raise ModelError(f"config.json: {num_heads} heads share {num_kv_heads} of KV, more than {MAX_GROUP} each")
    head_dim = source.count("head_dim", family.head_dim or hidden_size // num_heads, MAX_HEAD_DIM)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd, which rotary embedding cannot pair")
    return num_heads, num_kv_heads, head_dim


def _longest(rope: RopeConfig, max_positions: int) -> int:
    """Tokens that the model was made for: model cards name the length before scaling, or after."""
    if rope.kind == "linear":
        return max(max_positions, int(rope.factor * max_positions))
    return max(max_positions, int(rope.factor * rope.original_positions)) if rope.kind == "yarn" else max_positions


def _windows(source: Settings, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """What each layer's rows see.

    Mistral's window is that of all layers, and null means none; Qwen's counts where use_sliding_window says so, from layer
    max_window_layers on unless layer_types names each. Llama has none.
    """
    default = _FAMILIES[architecture].sliding_window
    is_null = source.values.get("sliding_window", default) is None
    window = None if is_null or default is None else source.count("sliding_window", default)
    if architecture.startswith("Qwen"):
        window = window if source.flag("use_sliding_window", False) else None
        first = source.values.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelError(f"config.json: max_window_layers is {first!r}, not a number of layers")
        windows = tuple(window if index >= first else None for index in range(num_layers))
    else:
        windows = (window,) * num_layers
    types = source.values.get("layer_types")
    if types is None:
        return windows
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types is not a list of {num_layers} names, one per layer")
    for name in types:
        if not isinstance(name, str) or name not in known or (name == "sliding_attention" and window is None):
            raise ModelError(f"config.json: layer_types {name!r} is not supported for this {architecture}")
    named = tuple(known[name] for name in types)
    if not architecture.startswith("Qwen") and named != windows:
        raise ModelError(f"config.json: layer_types of its own is not supported for {architecture}")
    return named


def _stored_dtype(source: Settings) -> str:
    """fp16 computes in fp32, which holds each of its numbers: most CPUs have no fast fp16, and bf16 would drop three bits."""
    name = source.values.get("dtype") or source.values.get("torch_dtype")
    return "bf16" if name == "bfloat16" else "fp32"


def _eos_token_ids(source: Settings, model_dir: Path) -> tuple[int, ...]:
    """The ids that end a text, of generation_config.json first."""
    path = model_dir / "generation_config.json"
    value = read_settings(path).values.get("eos_token_id") if path.exists() else None
    if value is None:
        value = source.values.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise ModelError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return tuple(values)
