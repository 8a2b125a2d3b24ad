"""The loads of the prefix benchmark: chats grow, a trace goes on sharing, what must be computed is counted exactly."""

from __future__ import annotations

import json

import pytest

from bench.block_index import CacheIndexConfig, Case, measure
from bench.prefix import PrefixConfig
from bench.prefix_load import Ask, Chats, chat_asks, fresh_tokens, trace_asks


def test_each_turn_of_a_chat_begins_with_the_turn_before_and_all_begin_alike() -> None:
    chats = Chats(talks=3, turns=4, system_tokens=10, turn_tokens=20, output_tokens=2, rate=5.0)
    asks = chat_asks(chats, vocab_size=256, seed=1)
    assert asks == chat_asks(chats, vocab_size=256, seed=1)
    assert len(asks) == 12 and len({ask.prompt[:10] for ask in asks}) == 1
    assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)
    grown = sorted(asks, key=lambda ask: len(ask.prompt))
    heads = [sum(other.prompt[: len(ask.prompt)] == ask.prompt for other in grown) for ask in grown]
    assert sorted(heads) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3, (
        "each is the beginning of those behind it, and of no other"
    )


def test_a_trace_keeps_what_its_requests_share() -> None:
    entries = [
        {"timestamp": 0, "input_length": 1024, "output_length": 320, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 10, "hash_ids": [7, 8, 9]},
        {"timestamp": 6000, "input_length": 5120, "output_length": 64, "hash_ids": [*range(20, 30)]},
    ]
    first, second, third = trace_asks(map(json.dumps, entries), scale=32, speed=3, max_prompt=100, vocab_size=256)
    assert (len(first.prompt), len(second.prompt), len(third.prompt)) == (32, 46, 100)
    assert second.prompt[:32] == first.prompt and third.prompt[:16] != first.prompt[:16]
    assert [(each.at_s, each.max_tokens) for each in (first, second, third)] == [(0, 10), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match="line 2: timestamp is missing"):
        trace_asks([json.dumps(entries[0]), "{}"], 32, 1, 100, 256)


def test_what_nobody_has_computed_is_counted_by_blocks_and_one_token_at_least() -> None:
    def ask(*tokens: int) -> Ask:
        return Ask(0.0, tokens, 1)

    assert fresh_tokens([ask(1, 2, 3, 4, 5)], 2) == 5
    assert fresh_tokens([ask(1, 2, 3, 4, 5), ask(1, 2, 3, 4, 6)], 2) == 5 + 1
    assert fresh_tokens([ask(1, 2, 3, 4), ask(1, 2, 3, 4)], 2) == 4 + 2, (
        "the last token is always computed, with its block"
    )
    assert fresh_tokens([ask(1, 2, 3, 4), ask(9, 9, 3, 4)], 2) == 8, "a block counts behind its own beginning only"


@pytest.mark.covers("R02")
def test_the_index_says_nothing_wrong_at_its_bound_and_within() -> None:
    config = CacheIndexConfig(blocks=4096, lookups=50)
    whole, sample = (measure(config, Case(nodes, 1), lambda: None) for nodes in (4, 40))
    assert (whole.share, whole.short_by, whole.wrong) == (1.0, 0.0, 0)
    shared, of_shared = (measure(config, Case(nodes, 1, are_shared=True), lambda: None) for nodes in (30, 90))
    assert (shared.share, shared.short_by, shared.wrong, shared.dropped) == (1.0, 0.0, 0, 0)
    assert shared.keys < 0.5 * shared.blocks and shared.blocks > 100_000
    assert of_shared.share < 1 and of_shared.wrong == 0 and of_shared.mib <= 1
    assert sample.share < 1 and sample.wrong == 0 and 0 < sample.short_by < 16 / sample.share
    assert sample.mib <= 1


def test_flags_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="is none of"):
        PrefixConfig(model=None, ways="by_luck")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no multiple"):
        PrefixConfig(model=None, scale=100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be like"):
        CacheIndexConfig(cases="many")
