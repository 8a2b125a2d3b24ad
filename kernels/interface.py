"""What a decoder layer asks of a back end: a handful of primitives, and one object per step for attention over paged KV.

Not here: any arithmetic. Every back end keeps one law, and the whole cluster leans on it:

    A row's bits depend on its own tokens only: not on how many rows there are or which, not on where prompts were cut into
    chunks, not on prefill or decode, not on the number of threads.

Shapes: a *row* is one token position of one sequence. `num_heads = num_kv_heads * group_size`; query head h reads KV head
h // group_size. All tensors are on the back end's device, contiguous, fp32, bf16 or fp16 ("the dtype"); a step's AttentionBatch
is in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class RowSpan(NamedTuple):
    """Rows of a step that are consecutive positions of one sequence."""

    first_row: int
    num_rows: int
    first_position: int  # of first_row; each row sees all positions up to its own


class AttentionBatch(NamedTuple):
    """Which KV the rows of one step write and see. A block belongs to one writing sequence at most."""

    spans: NDArray[np.int32]  # [num_spans, 3]: RowSpans; every row in exactly one, in row order
    block_tables: Tensor  # [num_spans, max_blocks] int64; columns past a span's last position are never looked at
    write_positions: Tensor  # [num_rows] int64: block id * block_size + offset in the block


class Linear(Protocol):
    """A weight matrix, and its bias if it has one, in the form that the back end likes best."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features], same dtype; the bias is added before rounding.

        out: memory that the product may go to; what is returned counts, whether it lies there or not.
        """


class StepAttention(Protocol):
    """Attention of one step; made once, used by every layer."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's own keys and values, each [num_rows, num_kv_heads, head_dim], where the batch says."""

    def attend(self, layer: int, queries: Tensor, window: int | None = None) -> Tensor:
        """Causal softmax attention, [num_rows, num_heads, head_dim] to the same shape and dtype, scaled by 1/sqrt(head_dim).

        window: a row sees at most this many positions, the last of them its own; None: all up to its own. The layers of one
        model may differ in it.
        """


class StackLayer(NamedTuple):
    """One decoder layer, its linears packed by the back end that is to run it."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size to (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_out: Linear  # num_heads * head_dim to hidden_size
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size to intermediate_size, from pack_gate_up
    down: Linear  # intermediate_size to hidden_size
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None  # [head_dim]
    window: int | None = None  # as in StepAttention.attend


class NearHead(Protocol):
    """A head once more, in fewer bytes, by the back end that is to run it; only that knows what is in it."""


class ModelEnds(NamedTuple):
    """What comes before a model's layers and behind them."""

    embedding: Tensor  # [vocab_size, hidden_size]
    final_norm: Tensor  # [hidden_size]
    head: Linear  # hidden_size to vocab_size, packed by the back end that is to run it
    near_head: NearHead | None = None


class DecodeRows(NamedTuple):
    """Rows that are each their sequence's only one in a step, which wants their logits; contiguous arrays."""

    slots: NDArray[np.int64]  # [num_rows]
    positions: NDArray[np.int64]  # [num_rows]


class StepRows(NamedTuple):
    """The rows of a step."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    logit_rows: Tensor  # [num_logits] int64: which of them want logits


class DecodeStep(NamedTuple):
    """A step of decode rows that are all as far."""

    num_rows: int
    position: int


class LayerStack(Protocol):
    """All decoder layers of a model in one call, where a back end is faster so. Same arithmetic as layer by layer."""

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
        """Run one step over hidden [num_rows, hidden_size]; it may be changed in place. cos, sin as in Kernels.rotate."""

    def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
        """Steps that are to be run once, in this order, before anybody waits for one of at most so many rows and positions."""


Few = tuple[NDArray[np.int32], NDArray[np.float32]]  # token ids, ascending, and their logits


class Contenders(NamedTuple):
    """What can win the draws of a step's rows (engine/sampler.py)."""

    greatest: NDArray[np.float32]  # [num_rows]; not finite where the row is broken
    greatest_ids: NDArray[np.int32]  # [num_rows]; of equals the lowest
    few: list[Few | None]  # of each row whose temperature is not 0: a superset of what can win. None: too many to tell


class Shares(NamedTuple):
    """Which shares of its row's probability others have than one token (engine/truncation.py); off by 1e-5 at most."""

    above: NDArray[np.float64]  # [num_rows]; those whose logit is greater
    beside: NDArray[np.float64]  # [num_rows]; the others whose logit is the same


class PlainDraws(NamedTuple):
    """Draws that logits, temperatures and seeds alone decide (engine/sampler.py), of each row of a step; contiguous arrays."""

    temperatures: NDArray[np.float64]  # [num_rows]; 0: greedy, else 1e-30 at least
    streams: NDArray[np.uint64]  # [num_rows]: where a row's noise begins
    slots: NDArray[np.int64]  # [num_rows], all different: whose draw it is
    broken: int  # what is drawn where a logit is NaN or the greatest is infinite


class SlotNumbers(NamedTuple):
    """What a runner keeps of each slot's sequence, in contiguous arrays that stay where they are."""

    block_ids: NDArray[np.int64]  # [num_slots, max_blocks]: its block table
    num_blocks: NDArray[np.int64]  # [num_slots]: so many of each row are meant
    token_ids: NDArray[np.int64]  # [num_slots]: what its next decode row feeds
    next_indices: NDArray[np.int64]  # [num_slots]: of the token drawn next, in its completion
    seeds: NDArray[np.uint64]  # [num_slots]
    temperatures: NDArray[np.float64]  # [num_slots]; 0: greedy, else 1e-30 at least

    @classmethod
    def of(cls, num_slots: int, max_blocks: int) -> SlotNumbers:
        """Of slots that nobody has."""
        of_each = [np.zeros(num_slots, np.int64) for _ in range(3)]
        tables = np.zeros((num_slots, max_blocks), np.int64)
        return cls(tables, of_each[0], of_each[1], of_each[2], np.zeros(num_slots, np.uint64), np.zeros(num_slots))


class WholeModel(Protocol):
    """A model from token ids to logits in one call, where a back end is faster so. Same arithmetic as layer by layer."""

    def logits(
        self, rows: StepRows, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch, logits: Tensor
    ) -> None:
        """Run one step, into logits [num_logits, vocab_size].

        cos, sin: [num_positions, head_dim / 2] fp32, of every position up to the greatest in the step. Raises IndexError where a
        token id is none of the vocabulary's.
        """

    def decode(
        self, numbers: SlotNumbers, rows: DecodeRows, cos: Tensor, sin: Tensor, kv: Tensor, logits: Tensor
    ) -> NDArray[np.int64] | None:
        """Run a step of decode rows, and draw what logits, temperatures and seeds alone decide (engine/sampler.py): [num_rows].

        What a slot feeds next, and its next index, are noted in `numbers`. None: the logits [num_rows, vocab_size] are there, and
        the draws are still to be done. Raises IndexError as logits() does, and ValueError where a position is past the blocks of
        its sequence.
        """


class BlockCopies(Protocol):
    """Whole KV blocks out of a pool and into it; kv as in Kernels.step_attention, block_ids [num_chosen] int64 on its device."""

    def gather_blocks(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        """What these blocks hold, next to each other: [num_chosen, num_layers, …]."""

    def scatter_blocks(self, kv: Tensor, block_ids: Tensor, chosen: Tensor) -> None:
        """Put what was gathered there, or elsewhere, into these blocks; none is named twice."""


class Kernels(BlockCopies, Protocol):
    """A back end."""

    @property
    def name(self) -> str:
        """Part of the model's fingerprint: KV of back ends with different names is never mixed."""

    @property
    def keeps_row_bits(self) -> bool:
        """Whether the law above holds on this machine, as far as the back end itself can know."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Take [out_features, in_features] and [out_features]; the caller drops its own copies."""

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Take [2 * width, in_features], gate first; the product is silu_gate of the plain linear's."""

    def near_head(self, weight: Tensor) -> NearHead | None:
        """Take a head without bias, [vocab_size, hidden_size], that stays where it is. None: this back end has no use for it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Scale each row of [num_rows, width] to unit mean square, then by weight [width]. `out` as in Linear.

        The width is hidden_size, or head_dim where a model norms each head of its queries and keys (Qwen3).
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary embedding in Llama's half-and-half form to [num_rows, heads, head_dim].

        cos, sin: [num_rows, head_dim / 2] fp32, of each row's position.
        """

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [num_rows, 2 * width], gate first, to [num_rows, width]."""

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        """Prepare one step over kv [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

        Its heads may be some of those that lie in a block: positions are then further apart than it has numbers for each.
        """

    def stack(self, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> LayerStack | None:
        """The layers as one call; None: this back end runs them one primitive after the other."""

    def whole(
        self, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float
    ) -> WholeModel | None:
        """The whole model as one call; None: this back end has none."""

    def contenders(
        self, logits: Tensor, temperatures: NDArray[np.float32], streams: NDArray[np.uint64]
    ) -> Contenders | None:
        """Which tokens can win argmax(logit / temperature + Gumbel noise) in each row of [num_rows, vocab_size].

        streams: [num_rows], where a row's noise begins (engine/sampler.py). None: this back end leaves it to the sampler.
        """

    def shares(
        self,
        logits: Tensor,
        temperatures: NDArray[np.float32],
        greatest: NDArray[np.float32],
        token_ids: NDArray[np.int32],
    ) -> Shares | None:
        """Of softmax(logit / temperature) of each row of [num_rows, vocab_size] whose temperature is not 0, beside a token.

        greatest: the rows' greatest logits, finite. Arrays [num_rows] are contiguous. None: this back end leaves it to the sampler.
        """

    def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> Tensor | None:
        """Draw a token of each row of [num_rows, vocab_size] where the logits are, waiting for nothing: [num_rows] int64.

        It is also put into last [num_slots] int64 at the row's slot, 0 for what is broken. None, and nothing is put there: this
        back end leaves it to the sampler.
        """
