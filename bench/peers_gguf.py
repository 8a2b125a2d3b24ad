"""Writes a Llama directory as one GGUF file for llama.cpp. Runs alone, with the Python of llama.cpp's environment:

    ENVS/llama/bin/python bench/peers_gguf.py MODEL_DIR OUT.gguf bf16|q8_0

Imports nothing of ours. Prompts go as token ids, so the vocabulary is names without meaning. Rows of q and k are put in the
order of llama.cpp's rotation (pairs of neighbours), as its own converter does.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(model_dir: Path, out: Path, form: str) -> int:
    """Convert; the model is bf16 in one safetensors file."""
    gguf: Any = import_module("gguf")
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, config["vocab_size"], gguf)
    for name, rows in _tensors(model_dir / "model.safetensors"):
        if "q_proj" in name:
            rows = _as_neighbours(rows, heads)
        elif "k_proj" in name:
            rows = _as_neighbours(rows, kv_heads)
        _add(writer, gguf, _gguf_name(name), rows, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


def _tensors(path: Path) -> list[tuple[str, NDArray[np.uint16]]]:
    """The bits of all bf16 tensors."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    found = []
    for name, each in header.items():
        if name == "__metadata__":
            continue
        if each["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {each['dtype']}, not BF16")
        begin, end = (8 + header_bytes + offset for offset in each["data_offsets"])
        found.append((name, np.frombuffer(data[begin:end], np.uint16).reshape(each["shape"])))
    return found


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _as_neighbours(rows: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    shaped = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return np.ascontiguousarray(shaped.swapaxes(1, 2).reshape(rows.shape))


def _add(writer: Any, gguf: Any, name: str, rows: NDArray[np.uint16], form: str) -> None:
    kinds = gguf.GGMLQuantizationType
    wide = (rows.astype(np.uint32) << 16).view(np.float32)
    if rows.ndim == 1:
        writer.add_tensor(name, wide)
    elif form == "q8_0":
        writer.add_tensor(name, gguf.quants.quantize(wide, kinds.Q8_0), raw_dtype=kinds.Q8_0)
    else:
        writer.add_tensor(name, np.ascontiguousarray(rows).view(np.uint8), raw_dtype=kinds.BF16)


def _add_vocabulary(writer: Any, size: int, gguf: Any) -> None:
    """The first three are special, as llama.cpp wants them; the next are bytes; all others are words."""
    kinds = gguf.TokenType
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    tokens += [f"\u2581w{index}".encode() for index in range(size - len(tokens))]
    types += [kinds.NORMAL] * (size - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(types[:size])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
