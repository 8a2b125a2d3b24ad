"""What the load generator asks for: lengths, shares and a trace's sharing, from the seed alone."""

from __future__ import annotations

import json
import random
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arrivals import Lengths
from bench.completions import Asking
from bench.serve_config import BenchConfig
from bench.serve_load import Loads
from bench.trace import TRACE_BLOCK, Entry, Scaling, clipped, mean_rate, read_trace, scaled
from bench.workload import (
    Piece,
    Prompts,
    RandomLoad,
    Request,
    Space,
    alphabet,
    num_digits,
    replay,
    width_of,
)

LETTERS = alphabet("token_ids", 256)


def tokens_of(prompts: Prompts, request: Request) -> list[int]:
    """As a server gets them."""
    tokens: list[int] = json.loads(prompts.json(request.pieces))
    return tokens


def num_shared(one: list[int], other: list[int]) -> int:
    """Leading tokens that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@st.composite
def traces(draw: st.DrawFn) -> list[Entry]:
    """Requests whose ids are paths of a tree, as prefixes are; ids are far apart in size."""
    ids: dict[tuple[int, ...], int] = {}
    stretch = draw(st.sampled_from([1, 7, 5000]))
    entries, at_s = [], 0.0
    for _ in range(draw(st.integers(1, 8))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        hash_ids = tuple(ids.setdefault(tuple(path[: end + 1]), len(ids)) * stretch for end in range(len(path)))
        at_s += draw(st.floats(0, 50))
        length = draw(st.integers((len(path) - 1) * TRACE_BLOCK + 1, len(path) * TRACE_BLOCK))
        entries.append(Entry(at_s, length, draw(st.integers(0, 900)), hash_ids))
    return entries


@given(traces(), st.sampled_from([4, 16, 100, 512, 700]), st.one_of(st.none(), st.integers(1, 600)))
def test_requests_that_share_k_hash_ids_share_k_blocks_of_tokens_and_no_other(
    entries: list[Entry], block: int, longest: int | None
) -> None:
    """Those behind differ at once, or in the digits of their names: that is where two ids of one last digit part."""
    small = scaled(entries, Scaling(block, max_prompt_tokens=longest))
    width = width_of(small, len(LETTERS))
    prompts = Prompts("seed", "token_ids", LETTERS, width)
    requests = list(replay(small, block))
    texts = [tokens_of(prompts, request) for request in requests]
    assert [len(text) for text in texts] == [entry.prompt_tokens for entry in small]
    for a, one in enumerate(entries):
        for b, other in enumerate(entries[:a]):
            num_ids = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(one.hash_ids, other.hash_ids, strict=False)))
            found, shortest = num_shared(texts[a], texts[b]), min(len(texts[a]), len(texts[b]))
            assert found >= min(num_ids * block, shortest)
            assert found == shortest or found < num_ids * block + width
            parted = one.hash_ids[num_ids : num_ids + 1] + other.hash_ids[num_ids : num_ids + 1]
            if len({hash_id % len(LETTERS) for hash_id in parted}) == 2:
                assert found == min(num_ids * block, shortest)


@given(traces(), st.floats(0.1, 50), st.sampled_from([4, 25, 512]))
def test_a_replay_keeps_order_scales_gaps_and_lengths_and_leaves_a_token_at_least(
    entries: list[Entry], speed: float, block: int
) -> None:
    small = scaled(entries, Scaling(block, block / TRACE_BLOCK, speed, max_output_tokens=40))
    requests = list(replay(small, block))
    assert [each.index for each in requests] == list(range(len(entries)))
    assert requests[0].at_s == 0
    for (before, after), (a, b) in zip(pairwise(entries), pairwise(requests), strict=True):
        assert b.at_s - a.at_s == pytest.approx((after.at_s - before.at_s) / speed, abs=1e-6)
    for entry, request in zip(entries, requests, strict=True):
        assert request.prompt_tokens == max(entry.prompt_tokens * block // TRACE_BLOCK, 1)
        assert request.output_tokens == min(max(entry.output_tokens * block // TRACE_BLOCK, 1), 40)


def test_a_trace_is_read_by_time_and_what_is_none_is_named_by_its_line() -> None:
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": [length]})
        for at, length in ((0, 1), (2000, 2), (1000, 3), (1000, 4))
    ]
    entries = read_trace([*lines, ""])
    assert [entry.hash_ids[0] for entry in entries] == [1, 3, 4, 2]
    assert mean_rate(entries) == 1.5
    assert len(clipped(entries, None, 1.5)) == 3 and len(clipped(entries, 2, 1.5)) == 2
    for bad in ("{}", "[]", "x", lines[0].replace("[1]", '["a"]'), lines[0].replace(": 0", ": -1")):
        with pytest.raises(ValueError, match="line 2"):
            read_trace([lines[0], bad])


@pytest.mark.parametrize(
    ("name", "bound"), [("input_length", 1 << 24), ("output_length", 1 << 24), ("hash_ids", (1 << 53) - 1)]
)
def test_a_number_of_a_trace_is_bounded_and_the_one_beyond_is_named(name: str, bound: int) -> None:
    """By line, field, value and bound: a prompt of 2**50 tokens was simulated for minutes."""
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    text, beyond = (json.dumps(line | {name: [value] if name == "hash_ids" else value}) for value in (bound, bound + 1))
    assert len(read_trace([text, text])) == 2
    with pytest.raises(ValueError, match=f"^line 2: {name} {bound + 1}: must be a whole number from 0 to {bound}$"):
        read_trace([text, beyond])


@given(st.integers(0, 1 << 60), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(1, 4))
def test_random_prompts_of_a_group_share_their_share_and_the_seed_decides_all(
    seed: int, share: float, groups: int
) -> None:
    load = RandomLoad(Lengths.parse("40:20"), Lengths.parse("exp:5"), share, groups)
    requests = list(load.requests(random.Random(seed), [0.5 * index for index in range(12)]))
    assert requests == list(load.requests(random.Random(seed), [0.5 * index for index in range(12)]))
    prompts = Prompts(str(seed), "token_ids", LETTERS, num_digits(12, len(LETTERS)))
    texts = [tokens_of(prompts, request) for request in requests]
    assert all(20 <= len(text) <= 60 for text in texts)
    for a, one in enumerate(requests):
        for b, other in enumerate(requests[:a]):
            first, second = one.pieces[0], other.pieces[0]
            is_one_group = first.space is second.space is Space.GROUP and first.number == second.number
            shared = min(first.num_tokens, second.num_tokens) if is_one_group else 0
            assert num_shared(texts[a], texts[b]) >= shared
            if is_one_group and first.num_tokens == second.num_tokens:
                assert num_shared(texts[a], texts[b]) == shared, "what is their own differs at once"
    others = Prompts(str(seed + 1), "token_ids", LETTERS, 1)
    assert tokens_of(others, requests[0]) != texts[0]


def test_words_are_as_many_as_tokens_were_asked_for_and_a_shorter_piece_is_a_longer_ones_beginning() -> None:
    prompts = Prompts("s", "words", alphabet("words", 256), 2)
    text = json.loads(prompts.json([Piece(Space.OWN, 3, 7), Piece(Space.OWN, 4, 5)]))
    assert len(text.split()) == 12
    long, short = (json.loads(prompts.json([Piece(Space.GROUP, 1, number)])) for number in (30, 9))
    assert long.split()[:9] == short.split()


def entry_line(at_ms: int, length: int, ids: list[int]) -> str:
    """One line of a trace."""
    return json.dumps({"timestamp": at_ms, "input_length": length, "output_length": 100, "hash_ids": ids})


def test_the_load_of_a_run_follows_from_seed_rate_and_clips(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(entry_line(1000 * index, 1024, [0, index + 1]) for index in range(20)))
    asking = Asking("m", "token_ids")
    config = BenchConfig(trace=path, length_scale=0.05, max_requests=11, duration_s=3.0, seed=4)
    load = Loads(config).of_run(asking, 2.0, "4/0")
    requests = list(load.requests)
    assert [each.at_s for each in requests] == [0.5 * index for index in range(6)], "one a second becomes two a second"
    assert {each.prompt_tokens for each in requests} == {52} and {each.output_tokens for each in requests} == {5}
    bodies = [each.body for each in load.asked(asking, requests)]
    assert bodies == [each.body for each in Loads(config).of_run(asking, 2.0, "4/0").asked(asking, requests)]
    assert bodies != [each.body for each in Loads(config).of_run(asking, 2.0, "4/1").asked(asking, requests)]
    at_random = BenchConfig(duration_s=10.0, rate="50", arrivals="constant")
    drawn = Loads(at_random).of_run(asking, 50.0, "x")
    assert drawn.num_requests == 499 and len(drawn.warmup) == 1
    together = BenchConfig(trace=path, length_scale=0.05, rate="inf")
    assert {each.at_s for each in Loads(together).of_run(asking, float("inf"), "x").requests} == {0.0}


@pytest.mark.parametrize(
    ("content", "flags", "sentence"),
    [
        ("", {}, "has no request"),
        ("nothing", {}, "line 1 is no JSON"),
        (entry_line(0, 9, [1 << 50]), {"length_scale": 0.01}, "--length-scale 0.01: leaves too few tokens"),
        (entry_line(0, 9, [1]), {"rate": "3"}, "--rate: this trace's requests all come at once"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_told_in_one_sentence(
    tmp_path: Path, content: str, flags: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    config = BenchConfig(trace=path, **flags)
    with pytest.raises(ValueError, match=sentence):
        Loads(config).of_run(Asking("m", "token_ids"), 3.0 if config.rate else None, "x")


def test_flags_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.write_text("")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rate": "1", "rates": "1,2"}, "--rate and --rates: give one"),
        ({"sweep": True}, "--sweep: needs to know what is too slow"),
        ({"sweep": True, "slo_ttft_ms": 1.0, "concurrency": 3}, "--sweep: finds the rate itself"),
        ({"sweep": True, "slo_ttft_ms": 1.0, "rate": "2000"}, "--rate 2000: is above --sweep-max-rate 1000"),
        ({"duration_s": 3.0}, "--duration-s 3: is for a rate"),
        ({"speed": 2.0}, "--speed: is of a trace"),
        ({"trace": trace, "speed": 2.0, "rate": "3"}, "--speed: scales a trace's own times"),
        ({"trace": trace, "prefix_share": 0.5}, "--prefix-share: is of random requests"),
        ({"trace": tmp_path / "none"}, "is no file"),
        ({"api": "chat", "prompt_form": "token_ids"}, "a chat takes words only"),
        ({"stream": False, "slo_ttft_ms": 5.0}, "--stream off: "),
        ({"rates": "1,inf"}, "--rates 1,inf: number 2, inf, must be requests per second above 0"),
    ]
    for flags, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            BenchConfig(**flags)
