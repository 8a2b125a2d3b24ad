"""transformers as a peer: it has no server of its own, so it computes here and says how long that took.

    python -m bench.peers_transformers --model DIR --threads 2        reads lines, answers lines

    prefill TOKENS          seconds of one prompt
    decode BATCH CONTEXT STEPS      seconds of so many steps behind random KV, greedy

No HTTP, no scheduler, no sampler: its figures are flattered by that. Static batches, sdpa, bf16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from runtime.config import set_thread_environment


def main(argv: list[str]) -> int:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args(argv)
    set_thread_environment(arguments.threads)
    import torch

    peer: Any = import_module("transformers")  # what is measured, not a part of Baton

    torch.set_num_threads(arguments.threads)
    model: Any = peer.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    config = model.config

    def prefill(num_tokens: int) -> float:
        ids = torch.randint(0, 256, (1, num_tokens))
        begin = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin

    def decode(batch: int, context: int, num_steps: int) -> float:
        cache = peer.DynamicCache()
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), layer)
        ids = torch.randint(0, 256, (batch, 1))
        begin = time.perf_counter()
        for _ in range(num_steps):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        return time.perf_counter() - begin

    ways: dict[str, Callable[..., float]] = {"prefill": prefill, "decode": decode}
    with torch.inference_mode():
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            name, *numbers = line.split()
            sys.stdout.write(f"{ways[name](*map(int, numbers))}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
