"""Weights of a random model that generates varied text, and that two right implementations compute alike in fp32 and bf16.

The two pull apart (measured over seeds): small branches repeat themselves, large ones amplify bf16's rounding until two
correct implementations differ by 3 % of the largest logit. With these gains they differ by about 1 %, with 30 layers by 1.7 %:
there only every fifth layer says much, for all would bring the difference to 4 %.
Not here: files.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.byte_tokenizer import LEAST_VOCAB_SIZE, READABLE_IDS
from engine.model_config import ModelConfig
from engine.tensor_names import tensor_shapes

# Sharp attention, so that output depends on the whole prompt; quiet branches; logits far apart.
_GAINS: Final = MappingProxyType({"q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.35, "down_proj": 0.35, "lm_head": 2.0})
_ENDS_OF_BRANCHES: Final = ("o_proj", "down_proj")
_NUM_LOUD_LAYERS: Final = 6  # at most; the ends of the others' branches have a tenth of the gain


def draw_weights(config: ModelConfig, dtype: torch.dtype, seed: int, drawn: Callable[[int], None]) -> dict[str, Tensor]:
    """Draw every tensor; `drawn` hears how many numbers were added. Same arguments, same bits."""
    generator = torch.Generator().manual_seed(seed)
    head = "model.embed_tokens.weight" if config.ties_embeddings else "lm_head.weight"
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        tensor = _draw(config, name, shape, generator)
        if name == head:
            # So that a demo's nonsense can at least be read.
            tensor[[index for index in range(LEAST_VOCAB_SIZE) if index not in READABLE_IDS]] *= 0.6
        tensors[name] = tensor.to(dtype)
        drawn(tensor.numel())
    return tensors


def _draw(config: ModelConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One tensor in fp32.

    A tied embedding has the head's size, so its branches are as much smaller; and since a token's embedding stays in the
    stream, every token would follow itself, were not half of the last norm's signs flipped.
    """
    noise = torch.randn(shape, generator=generator)
    *_, part, kind = name.split(".")
    stream = _GAINS["lm_head"] * config.hidden_size**-0.5 if config.ties_embeddings else 1.0
    if name == "model.norm.weight" and config.ties_embeddings:
        return torch.where(torch.arange(shape[0]) % 2 == 0, 1.0, -1.0) * (1 + 0.1 * noise)
    if part in ("q_norm", "k_norm"):  # what q_proj and k_proj gain is normed away
        return 1.5 * (1 + 0.1 * noise)
    if "norm" in part:
        return 1 + 0.1 * noise
    if part == "embed_tokens":
        return stream * noise
    gain = _GAINS.get(part, 1.0)
    if part in _ENDS_OF_BRANCHES:
        gain *= stream * (1.0 if _is_loud(config.num_layers, int(name.split(".")[2])) else 0.1)
    return noise * (0.3 * gain if kind == "bias" else gain / shape[1] ** 0.5)


def _is_loud(num_layers: int, layer: int) -> bool:
    return (layer + 1) % -(-num_layers // _NUM_LOUD_LAYERS) == 0
