"""Make a model directory with random weights, in exactly the layout that Hugging Face uses.

For demos and tests: small enough for any machine, and loaded like a real one, by Baton and by transformers. The tokenizer
maps bytes to ids, so every text has one; printable ASCII is likelier to be generated than other bytes, so that a demo's
nonsense can at least be read. Same arguments, same bytes.

    python -m engine.make_model --like llama-tiny --dtype fp32 --seed 0 --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.config_values import ModelError
from engine.kv_memory import TORCH_DTYPES
from engine.model_config import DTYPES, read_model_config
from engine.tensor_names import tensor_shapes
from engine.weights import SINGLE_FILE

NUM_BYTES: Final = 256
BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_START, MESSAGE_END = range(NUM_BYTES, NUM_BYTES + 4)
SPECIAL_TOKENS: Final = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
# Sharp attention, so that output depends on the whole prompt; quiet branches; logits far apart.
_GAINS: Final = MappingProxyType({"q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.35, "down_proj": 0.35, "lm_head": 2.0})
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a random Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int  # tokens
    ties_embeddings: bool = False  # untied here: a random tied model repeats its last token


SIZES: Final = MappingProxyType(
    {
        "llama-tiny": ModelSize(
            hidden_size=128,
            num_layers=4,
            num_heads=8,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=256,
            max_position_embeddings=4096,
        )
    }
)


def make_model(size: ModelSize, dtype: str, seed: int, out: Path) -> None:
    """Write the directory for dtype "fp32" or "bf16". Raises ModelError if it exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty directory")
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", _config(size, dtype))
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": BEGIN_OF_TEXT, "eos_token_id": [END_OF_TEXT, MESSAGE_END]},
    )
    _write_tokenizer(size, out)
    _write_weights(dtype, seed, out)


def _config(size: ModelSize, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.intermediate_size,
        "vocab_size": NUM_BYTES + len(SPECIAL_TOKENS),
        "max_position_embeddings": size.max_position_embeddings,
        "tie_word_embeddings": size.ties_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16" if dtype == "bf16" else "float32",
    }


def _write_weights(dtype: str, seed: int, out: Path) -> None:
    """Draw weights that make varied greedy output and still compute alike in fp32 and bf16.

    The two pull apart (measured over seeds): small branches repeat themselves, large ones amplify bf16's rounding until two
    correct implementations differ by 3 % of the largest logit. With these gains they differ by about 1 %.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(read_model_config(out)).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.1 * noise
        elif "embed_tokens" in name:
            tensors[name] = noise
        else:
            tensors[name] = noise * (_GAINS.get(name.split(".")[-2], 1.0) / shape[1] ** 0.5)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"][[byte for byte in range(NUM_BYTES) if not 32 <= byte < 127]] *= 0.6
        tensors["lm_head.weight"][NUM_BYTES:] *= 0.6
    torch_dtype = TORCH_DTYPES[dtype]
    # Not save_file: it makes files that only their owner can read, and a container may run as somebody else.
    data = save({name: tensor.to(torch_dtype) for name, tensor in tensors.items()}, metadata={"format": "pt"})
    (out / SINGLE_FILE).write_bytes(data)


def _write_tokenizer(size: ModelSize, out: Path) -> None:
    """Write a byte-level BPE without merges: token id = byte value."""
    tokenizer = Tokenizer(models.BPE(vocab={_printable(byte): byte for byte in range(NUM_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN_OF_TEXT)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    named = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    _write_json(out / "special_tokens_map.json", named)
    _write_json(
        out / "tokenizer_config.json",
        named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": size.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _printable(byte: int) -> str:
    """The character that byte-level tokenizers (GPT-2's table) write for a byte: itself, or the next free from U+0100 on."""
    if _is_plain(byte):
        return chr(byte)
    return chr(0x100 + sum(not _is_plain(other) for other in range(byte)))


def _is_plain(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 1 << 63:
        raise argparse.ArgumentTypeError(f"{seed} is not in 0 .. 2^63 - 1")
    return seed


def main(argv: list[str]) -> int:
    """Run the command; exit code 2 and one line for what cannot be done."""
    parser = _OneLineParser("engine.make_model", description="Make a random-weight model directory.")
    parser.add_argument(
        "--like", choices=sorted(SIZES), default="llama-tiny", help="which sizes (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory to make; must not exist or be empty")
    arguments = parser.parse_args(argv)
    try:
        make_model(SIZES[arguments.like], arguments.dtype, arguments.seed, arguments.out)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"engine.make_model: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
