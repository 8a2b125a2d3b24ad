"""How soon a prompt is computed, by one node's measured speeds: for the node itself, and for the router that chooses it. Pure.

What is computed waits for those in front first, and what is fetched from the KV pool is fetched meanwhile:

    fetch      max(front, latency + blocks x per block) + what is not fetched, and the share that does not come
    compute    front + all of it

so it pays to fetch while  latency + blocks x per block < front + share that comes x blocks x block_size x per token.
A node decides by these functions (prefill_node/fetching.py); a router that reckons with the same ones, and what that node told
it, reckons with what the node will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final, NamedTuple

# A look may take this share of what there is to win: unless most prompts are known to the pool, more would be lost than won.
LOOK_SHARE: Final = 1 / 8
_RATES: Final = (1e-3, 1e9)  # prompt tokens per second that a node may tell; seconds of a fetch are below 1 / the first


@dataclass(frozen=True, slots=True)
class FetchSpeed:
    """Of reading the KV pool."""

    latency_s: float
    block_s: float
    share: float  # of the blocks asked for, that come
    look_s: float  # until the pool has said what it has


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Of one node."""

    token_s: float  # per prompt position computed; above 0
    block_size: int
    fetch: FetchSpeed | None = None  # None: it reads no pool, or has read nothing yet


class Expected(NamedTuple):
    """When a prompt's last token is computed, and by what."""

    seconds: float
    num_fetched: int  # tokens


def read_rate(tokens_per_s: float) -> float | None:
    """A rate as a node tells it; None: it is none, or cannot be right."""
    return tokens_per_s if _RATES[0] <= tokens_per_s <= _RATES[1] else None


def read_fetch_speed(latency_s: float, block_s: float, share: float, look_s: float) -> FetchSpeed | None:
    """Likewise."""
    times = (latency_s, block_s, look_s)
    if not all(isfinite(each) and 0 <= each <= 1 / _RATES[0] for each in times) or not 0 <= share <= 1:
        return None
    return FetchSpeed(latency_s, block_s, share, look_s)


def num_worth(speed: PrefillSpeed, num_blocks: int, num_tokens_in_front: int) -> int:
    """How many leading ones of so many blocks, which the pool has, are fetched sooner than computed."""
    if (fetch := speed.fetch) is None:
        return 0
    won_per_block = fetch.share * speed.block_size * speed.token_s - fetch.block_s
    ahead_s = num_tokens_in_front * speed.token_s - fetch.latency_s
    if ahead_s + num_blocks * won_per_block > 0:
        return num_blocks
    # Each block costs something, or as many would be worth it where one is.
    return min(num_blocks, int(ahead_s / -won_per_block)) if ahead_s > 0 else 0


def is_worth_a_look(speed: PrefillSpeed, num_blocks: int, num_tokens_in_front: int) -> bool:
    """Whether to ask the pool for so many blocks, which it may not have."""
    if speed.fetch is None:
        return False
    to_win_s = LOOK_SHARE * num_blocks * speed.block_size * speed.token_s
    room_s = num_tokens_in_front * speed.token_s + to_win_s
    return num_worth(speed, num_blocks, num_tokens_in_front) > 0 and speed.fetch.look_s <= room_s


def expected(speed: PrefillSpeed, num_tokens_in_front: int, num_uncached: int, num_in_pool: int) -> Expected:
    """For a prompt of which the node lacks `num_uncached` tokens, the first `num_in_pool` of them in the KV pool.

    Never more than computing all of it takes.
    """
    compute = Expected(speed.token_s * (num_tokens_in_front + num_uncached), 0)
    num_blocks, fetch = num_in_pool // speed.block_size, speed.fetch
    num_missing = max(num_uncached - 1, 0) // speed.block_size  # whole blocks; the last token is always computed
    if fetch is None or not num_blocks or not is_worth_a_look(speed, num_missing, num_tokens_in_front):
        return compute
    num_fetched = num_worth(speed, num_blocks, num_tokens_in_front) * speed.block_size
    front_s = max(
        num_tokens_in_front * speed.token_s, fetch.latency_s + num_fetched // speed.block_size * fetch.block_s
    )
    tokens = int(fetch.share * num_fetched)
    by_fetching = Expected(front_s + speed.token_s * (num_uncached - tokens), tokens)
    return min(compute, by_fetching, key=lambda each: each.seconds) if tokens else compute
