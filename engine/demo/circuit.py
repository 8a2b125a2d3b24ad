"""What the demo model's first two layers hold before it learns anything: heads that look up what followed the same tokens before.

    residual stream, a row of hidden_size:   | own: the token's embedding | the one before | two before | ... | seven before |
    layer 0, head h:   looks h + 1 tokens back, writes the first numbers of that token's embedding to the place "h + 1 before"
    layer 1, a head:   query: own, one before, two before, ...   key: one before, two before, ...   value: own
                       so it looks where the tokens before are those that were read last, and copies what stands there

Recall needs such heads (Olsson et al. 2022, arXiv:2209.11895), and a network that trains for an hour on a CPU does not come upon
them: to begin with structure instead is mimetic initialisation (Trockman, Kolter 2023, arXiv:2305.09828). All of it is learned
further, more slowly than the rest (train.py). How far to look back: in "red door is 7312" the 2 is seven tokens behind "red".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from engine.model_sizes import ModelSize

EMBEDDING_STD: Final = 0.25  # large: AdamW's steps are as large for all weights, and what is large changes more slowly
FINAL_NORM: Final = 0.24  # so that logits begin small in spite of it
_NUM_BACK: Final = 7
_CODE: Final = 20  # numbers of an embedding that are looked for
_NUM_FAST: Final = 6  # rotary frequencies, the fastest: they tell neighbours apart
_NUM_TURNING: Final = 12  # rotary frequencies that turn over a thousand tokens: content is compared by the others
_SHARPNESS: Final = 8.0  # so that the neighbours of the one that is looked at get about a hundredth
_MATCH: Final = 10.0  # of a score, for each token that is the same
_QUIET: Final = 0.1  # of the random weights around a head that looks back
_COPIED: Final = 3.0  # times the token's own embedding
# Which of the tokens before each KV head compares: for the first digits of a code, and for the last ones.
_COMPARED: Final = ((0, 2, 3, 4), (0, 1, 4, 5, 6))


@dataclass(frozen=True, slots=True)
class Projections:
    """The four of one layer's attention; biases of q, k and v are zero."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear


def has_room_for(size: ModelSize) -> bool:
    """Whether a network of this size is wide enough for all of it."""
    own, num_free = _own_width(size), size.head_dim - 2 * _NUM_TURNING
    has_layers = size.num_layers > 1 and size.num_heads >= _NUM_BACK
    return has_layers and own >= _CODE and own // size.num_kv_heads <= size.head_dim and num_free >= 2 * _NUM_BACK


def frequencies(head_dim: int, theta: float) -> Tensor:
    """Of rotary embeddings, fastest first: (head_dim / 2,)."""
    return theta ** (-torch.arange(0, head_dim, 2) / head_dim)


@torch.no_grad()
def begin(embedding: nn.Embedding, first: Projections, second: Projections, size: ModelSize) -> None:
    """Write the circuit into the embedding and the attention of layers 0 and 1."""
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    embedding.weight[:, _own_width(size) :] = 0
    _look_back(first, size)
    _match(second, size)


def _look_back(layer: Projections, size: ModelSize) -> None:
    width, group = size.head_dim, size.num_heads // size.num_kv_heads
    angles = frequencies(width, size.rope_theta)[:_NUM_FAST]
    for linear in (layer.query, layer.key, layer.value, layer.out):
        linear.weight.mul_(_QUIET)
    code = torch.arange(_CODE)
    for back in range(_NUM_BACK):
        first, kv_first = back * width, back // group * width
        layer.key.bias[kv_first : kv_first + _NUM_FAST] = _SHARPNESS
        # A query at i turned by i times the angles meets a key at j turned by j times: they agree where i - j = back + 1.
        half = first + width // 2
        layer.query.bias[first : first + _NUM_FAST] = _SHARPNESS * torch.cos((back + 1) * angles)
        layer.query.bias[half : half + _NUM_FAST] = -_SHARPNESS * torch.sin((back + 1) * angles)
        layer.value.weight[kv_first + code, code] = 1
        # What layer 0 reads is normed to 1 over a row that is zero but for `own`; written is the embedding as it was.
        layer.out.weight[_place(size, back) + code, first + code] = (
            EMBEDDING_STD * (_own_width(size) / size.hidden_size) ** 0.5
        )


def _match(layer: Projections, size: ModelSize) -> None:
    width, group = size.head_dim, size.num_heads // size.num_kv_heads
    free = torch.tensor([each for half in (0, width // 2) for each in range(half + _NUM_TURNING, half + width // 2)])
    code = torch.arange(_CODE)
    for kv in range(size.num_kv_heads):
        heads = range(kv * group, (kv + 1) * group)
        compared = _COMPARED[kv % len(_COMPARED)]
        rows_each = len(free) // len(compared)
        scale = (_MATCH * width**0.5 / rows_each) ** 0.5
        for index, back in enumerate(compared):
            said = nn.init.orthogonal_(torch.empty(rows_each, _CODE)).mul_(scale).to(layer.key.weight.dtype)
            rows = free[index * rows_each : (index + 1) * rows_each, None]
            layer.key.weight[kv * width + rows, _place(size, back) + code] = said
            for head in heads:
                layer.query.weight[head * width + rows, (0 if back == 0 else _place(size, back - 1)) + code] = said
        part = _own_width(size) // size.num_kv_heads
        copied = torch.arange(kv * part, (kv + 1) * part)
        layer.value.weight[kv * width + torch.arange(part), copied] = 1
        for head in heads:
            layer.out.weight[copied, head * width + torch.arange(part)] = _COPIED * EMBEDDING_STD / group


def _own_width(size: ModelSize) -> int:
    return size.hidden_size - _NUM_BACK * _CODE


def _place(size: ModelSize, back: int) -> int:
    return _own_width(size) + back * _CODE
