"""The demo model as it is trained: Qwen2's structure in plain torch, with the tensor names of its files.

Not here: what its first layers begin with (circuit.py), and the engine's model (engine/model.py), which has no gradients.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.demo import circuit
from engine.model_sizes import ModelSize
from kernels.torch_reference import can_pack

# Without AVX-512, torch multiplies bf16 number by number, many times as slowly as fp32.
TRAINED_IN: Final = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
NORM_EPSILON: Final = 1e-6
_INIT_STD: Final = 0.02
_LONGEST_SHORT_ROW: Final = 512  # tokens


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)


class _Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self._size = size
        hidden, width = size.hidden_size, size.head_dim
        self.q_proj = nn.Linear(hidden, size.num_heads * width)
        self.k_proj = nn.Linear(hidden, size.num_kv_heads * width)
        self.v_proj = nn.Linear(hidden, size.num_kv_heads * width)
        self.o_proj = nn.Linear(size.num_heads * width, hidden, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self._size.head_dim).transpose(1, 2)

        query, key = _rotate(heads(self.q_proj(x)), turns), _rotate(heads(self.k_proj(x)), turns)
        value = heads(self.v_proj(x))
        if torch.is_grad_enabled() and x.shape[1] <= _LONGEST_SHORT_ROW:
            out = _attend(query, key, value)
        else:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return result

    def projections(self) -> circuit.Projections:
        return circuit.Projections(self.q_proj, self.k_proj, self.v_proj, self.o_proj)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by two products: on a CPU, over short rows, twice as fast as torch's own, forwards and backwards."""
    rows, heads, length, width = query.shape
    groups = rows * key.shape[1]
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = query.reshape(groups, -1, width) @ (key.reshape(groups, length, width) * width**-0.5).transpose(1, 2)
    shares = (scores.view(groups, -1, length, length) + future).softmax(-1)
    mixed: Tensor = shares.view(groups, -1, length) @ value.reshape(groups, length, width)
    return mixed.view(rows, heads, length, width)


class _Mlp(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.down_proj = nn.Linear(size.intermediate_size, size.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _Norm(size.hidden_size), _Norm(size.hidden_size)
        self.self_attn, self.mlp = _Attention(size), _Mlp(size)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Body(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.num_layers))
        self.norm = _Norm(size.hidden_size)

    def attention(self, layer: int) -> _Attention:
        found = self.layers[layer]
        assert isinstance(found, _Layer)
        return found.self_attn


class Network(nn.Module):
    """In TRAINED_IN; `state_dict()` has the names of a Qwen2 checkpoint with tied embeddings."""

    def __init__(self, size: ModelSize) -> None:
        """Random weights from torch's generator; the two linears that write into the residual stream start smaller, by depth."""
        super().__init__()
        self.size = size
        self.model = _Body(size).to(TRAINED_IN)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_writer = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=_INIT_STD / (2 * size.num_layers) ** 0.5 if is_writer else _INIT_STD)
        if circuit.has_room_for(size):
            first, second = (self.model.attention(layer).projections() for layer in (0, 1))
            circuit.begin(self.model.embed_tokens, first, second, size)
            nn.init.constant_(self.model.norm.weight, circuit.FINAL_NORM)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the targets that are learned; both (rows, positions)."""
        learned = targets >= 0
        return functional.cross_entropy(self.logits(ids, learned).float(), targets[learned])

    def logits(self, ids: Tensor, where: Tensor) -> Tensor:
        """Of the positions of `where`, a mask like `ids`: (count, vocabulary)."""
        turns = _turns(ids.shape[1], self.size.head_dim, self.size.rope_theta)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, turns)
        return functional.linear(self.model.norm(x)[where], self.model.embed_tokens.weight)


def _turns(num_positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (positions, head_dim); RoPE (Su et al. 2021) as Llama's files mean it."""
    angles = torch.outer(torch.arange(num_positions), circuit.frequencies(head_dim, theta)).repeat(1, 2)
    return angles.cos().to(TRAINED_IN), angles.sin().to(TRAINED_IN)


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    cosine, sine = turns
    return x * cosine + torch.cat((-second, first), -1) * sine
