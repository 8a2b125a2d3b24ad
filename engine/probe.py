"""Ask this machine, at start, whether a row's bits depend on its own tokens only.

The law was measured for one release of torch on a few CPUs; elsewhere the libraries below may choose their kernels by batch.
Then sequences recomputed after a fault may differ from the lost ones, and the node has to say so rather than find out.
"""

from __future__ import annotations

import torch

from engine.batch import Segment, build_batch
from engine.kv_memory import KvMemory
from engine.model import Model

_NUM_TOKENS = (
    130  # past any back end's tile of attention; the three rows that are asked begin with the last one that fills it
)
_BLOCK_SIZE = 16
_BLOCKS_EACH = -(-_NUM_TOKENS // _BLOCK_SIZE)


def find_inexactness(model: Model) -> str | None:
    """Compute some rows whole, in chunks, alone and in a batch; None if all logits have the same bits, else why not, in words.

    One layer and the head: the others have the same shapes. Decode steps are computed twice, since a back end may record what the
    first one launches and only repeat that later. All ranks of a node do this at once. Costs seven small steps, unless the back end
    knows that it is not.
    """
    name = model.kernels.name
    if not model.kernels.keeps_row_bits:
        return f"{name} kernels do not promise it on this machine"
    shallow = model.first_layers(1)
    kv = KvMemory(shallow.config, _BLOCK_SIZE, 2 * _BLOCKS_EACH, model.dtype).part(
        model.split, model.ends.embedding.device
    )
    stride = max(1, model.config.vocab_size // (2 * _NUM_TOKENS))
    one = [index * stride % model.config.vocab_size for index in range(_NUM_TOKENS)]
    two = [(index + _NUM_TOKENS) * stride % model.config.vocab_size for index in range(_NUM_TOKENS)]
    blocks_one, blocks_two = range(_BLOCKS_EACH), range(_BLOCKS_EACH, 2 * _BLOCKS_EACH)

    def logits(*segments: Segment) -> torch.Tensor:
        return shallow.forward(build_batch(segments, _BLOCK_SIZE), kv.tensor)

    whole = logits(Segment(one, 0, blocks_one, 3))
    first, last = _NUM_TOKENS - 3, _NUM_TOKENS - 1
    logits(Segment(one[:first], 0, blocks_one, 0), Segment(two, 0, blocks_two, 0))
    chunk = logits(Segment(one[first:last], first, blocks_one, 2), Segment(two[-1:], last, blocks_two, 0))
    rows = [Segment(one[at : at + 1], at, blocks_one, 1) for at in range(first, _NUM_TOKENS)]
    decoded = [logits(*rows[-num_rows:]) for num_rows in (1, 1, 3, 3)]
    is_same = torch.equal(whole[:2], chunk) and all(torch.equal(whole[-len(each) :], each) for each in decoded)
    if is_same and model.kernels.keeps_row_bits:  # a back end may have asked the device something itself meanwhile
        return None
    return f"with {name} kernels the same rows gave other bits in chunks and in a batch than alone"
